"""Placement: the server of each element of a key.

A key below the bound lives on one server, its *home*. A larger key is cut, and every server gets an equal
share of it. Every process computes the same answer from the same five values, so no process has to be
asked, and the order of ``init`` calls does not matter.

One scheme does both, *cut and paste* (Brinkmann, Salzwedel and Scheideler, SPAA 2000). One server has a line
of elements as a whole. To a line on S servers the next server comes as follows: each of the others gives up
what it has over the new mean, in one strip from an end of a run of its own, and those strips are the share of
the new server. So the shares are equal, up to whole rows, and exactly 1 / (S + 1) of the line moves; no
scheme moves less. For large keys the line is the key. For small keys and for the ids of embedding tables the
line has :data:`POINTS` points, and a hash tells the point of each.

Up to 3 servers each has one run of a key; of 4 servers, one has two; of 16, each has five.

A tensor of two or more dimensions is cut between *rows*, what one index of its first dimension
holds, so that some rows of it can be pushed and pulled without the others. So are the pieces of a
part that is larger than a chunk. Where a row is too long for that, they are cut anywhere, and
such a key is pushed and pulled as a whole (:func:`lies_by_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from math import lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvps.dtypes import Spec

RULE = 2
"""The number of this scheme. Checkpoints name it; those without a number were laid out by another."""
BIGARRAY_BOUND = 100_000
"""Elements from which a key is cut: with ResNet-50 on 4 servers the fullest one then carries
1.02 times the mean; at MXNet's 1,000,000 it would be 1.15 times."""

ALIGN = 16
"""Parts begin at multiples of this many elements, so that vector instructions start aligned."""
PAGE = 1024
PAGES_MIN = 32
"""Parts of so many pages of float32 begin at one, so that they can be mapped side by side."""
GIVERS_MAX = 16
"""About how many servers give a part to a new one. Beyond so many servers the shares may differ by a 16th,
and a server has about 10 parts of a key and not one for every other server."""
POINT_BITS = 16
POINTS = 1 << POINT_BITS
"""Points of the line on which small keys and ids of rows lie."""

JOIN_SERVER = 0
"""The rank of the server that says when a join is over."""
EMBEDDING = "kvps.embedding:"
"""The prefix of the keys of embedding tables: each has one element on every server, the number of the table's
rows there."""


class Part(NamedTuple):
    """Neighbouring elements of a key on one server, which may have several parts."""

    server: int
    start: int
    size: int


def home(key: str, servers: int) -> int:
    """Return the server that answers for ``key``: the only one for a small key.

    Example:
        >>> home("weight", 1)
        0
    """
    return _homes(servers)[
        int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") >> 64 - POINT_BITS
    ]


def parts(
    key: str, count: int, servers: int, bound: int = BIGARRAY_BOUND, width: int = 1
) -> tuple[Part, ...]:
    """Return where the ``count`` elements of ``key`` lie, in the order of the elements.

    A key is cut only if every server gets some of it: then each of them knows the key, and knows
    that all the others do.

    Args:
        key: its name.
        count: elements, a multiple of ``width``.
        servers: how many there are.
        bound: elements from which a key is cut.
        width: elements of a row; parts are whole rows if every server can have some.

    Example:
        >>> parts("weight", 100, servers=2, bound=64)
        (Part(server=0, start=0, size=48), Part(server=1, start=48, size=52))
        >>> parts("table", 99, servers=2, bound=64, width=9)
        (Part(server=0, start=0, size=45), Part(server=1, start=45, size=54))
    """
    if key.startswith(EMBEDDING):
        return tuple(Part(server, server, 1) for server in range(servers))
    if servers == 1 or count < max(bound, servers * ALIGN):
        return (Part(home(key, servers), 0, count),)
    return _cut(count, servers, width)


@lru_cache(maxsize=16)
def points(servers: int) -> npt.NDArray[np.uint16]:
    """Return the server of each of the :data:`POINTS` points; the array is not to be written to.

    Example:
        >>> import numpy as np
        >>> np.bincount(points(3)).tolist()
        [21845, 21846, 21845]
    """
    line = _line(POINTS, servers)
    starts, owners = zip(*line, strict=True)
    return np.repeat(np.array(owners, np.uint16), np.diff([*starts, POINTS]))


@lru_cache(maxsize=16)
def _homes(servers: int) -> list[int]:
    owners: list[int] = points(servers).tolist()
    return owners


@lru_cache(maxsize=1024)
def _cut(count: int, servers: int, width: int) -> tuple[Part, ...]:
    line = _line(count, servers, width)
    stops = [start for start, _ in line[1:]] + [count]
    return tuple(
        [Part(server, start, stop - start) for (start, server), stop in zip(line, stops, strict=True)]
    )


def _line(count: int, servers: int, width: int = 0) -> list[tuple[int, int]]:
    """Return where each run of a line of ``count`` elements begins, and its server.

    Args:
        count: at least 16 times ``servers``.
        servers: how many there are.
        width: elements of a row; 0 for points, which may be cut anywhere.
    """
    line, held = [(0, 0)], [count]
    for number in range(2, servers + 1):
        _give(line, held, count, _unit(count, number, width) if width else 1)
    return line


def _unit(count: int, servers: int, width: int) -> int:
    """Return the number of elements of which parts are multiples: whole pages and rows, if they are small
    beside the parts and beside what a server gives to the next one."""
    if count < servers * width:
        width = 1
    least = count // (servers * max(PAGES_MIN, 8 * servers))
    return whole(width, PAGE, least) or whole(width, ALIGN, least) or (width if width > 1 else ALIGN)


def _give(line: list[tuple[int, int]], held: list[int], count: int, unit: int) -> None:
    """Give a share of ``line`` to one more server.

    Args:
        line: (start, server) of each run, in order.
        held: the elements of each server.
        count: the elements of all.
        unit: the elements of which a strip is a multiple, but for that at the end of the line.
    """
    new, owed = len(held), _owed(held, count, unit)
    held.append(0)
    ends = [start for start, _ in line[1:]] + [count]
    sizes = {at: ends[at] - start for at, (start, server) in enumerate(line) if server in owed}
    edits: dict[int, list[tuple[int, int]]] = {}

    def strip(at: int, *, from_end: bool) -> None:
        start, server = line[at]
        size = sizes[at]
        if from_end:
            cut = max(start, (start + size - owed[server]) // unit * unit)
            given, runs = start + size - cut, [(start, server), (cut, new)]
        else:
            given = min(size, -(-(start + owed[server]) // unit) * unit - start)
            runs = [(start, new), (start + given, server)]
        edits[at] = [(start, new)] if given == size else runs
        owed[server] -= given
        held[server] -= given
        held[new] += given

    for at in sizes:  # two neighbours that both owe: a strip to each side of their edge
        if at + 1 in sizes and at not in edits:
            left, right = line[at][1], line[at + 1][1]
            if left != right and 0 < owed[left] < sizes[at] and 0 < owed[right] < sizes[at + 1]:
                strip(at, from_end=True)
                strip(at + 1, from_end=False)
    for at in sorted(sizes, key=sizes.__getitem__):  # the smallest run first, which may go as a whole
        if owed[line[at][1]] > 0 and at not in edits:
            strip(at, from_end=at - 1 not in edits or edits[at - 1][-1][1] != new)
    for at in sorted(edits, reverse=True):
        joins = edits[at][-1][1] == new and at + 1 < len(line) and line[at + 1][1] == new
        line[at : at + 2 if joins else at + 1] = edits[at]


def _owed(held: list[int], count: int, unit: int) -> dict[int, int]:
    """Return how much each server has to give to one more, the fullest first."""
    servers, owed = len(held) + 1, {}
    due = given = 0  # times the number of servers, and not
    fullest = iter(sorted(range(len(held)), key=lambda server: (-held[server], server)))
    while due < count:  # the shares over the mean are as many
        server = next(fullest)
        due = min(count, due + max(held[server] * servers - count, count // GIVERS_MAX))
        share = (2 * due + unit * servers) // (2 * unit * servers) * unit - given
        share = min(share, held[server] - unit)
        if share > 0:
            owed[server] = share
            given += share
    return owed


def whole(width: int, align: int, most: int) -> int:
    """Return the least multiple of a row and of ``align``, in elements; 0 if it is over ``most``.

    Example:
        >>> whole(48, 1024, 4096), whole(49, 1024, 4096)
        (3072, 0)
    """
    unit = lcm(width, align)
    return unit if unit <= most else 0


def lies_by_rows(spec: Spec, pieces: Iterable[tuple[int, int]]) -> bool:
    """Whether some rows of a key can be pushed and pulled without the others.

    The workers and the servers ask this of what there is, as chunks may be of any size.

    Args:
        spec: what the key is.
        pieces: where each piece begins in the key, and its size.

    Example:
        >>> table = Spec("float32", (3, 4))
        >>> lies_by_rows(table, [(0, 8), (8, 4)]), lies_by_rows(table, [(0, 6), (6, 6)])
        (True, False)
    """
    width = spec.width
    if len(spec.shape) < 2 or not spec.count:
        return False
    return all(not (start % width or size % width) for start, size in pieces)
