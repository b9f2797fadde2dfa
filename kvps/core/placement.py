"""Placement: the server of each element of a key.

A key below the bound lives on one server, its *home*, chosen by a stable hash of its name. A
larger one is cut into near-equal parts, one for each server. Every process computes the same
answer from the same five values, so no process has to be asked, and the order of ``init`` calls does
not matter. Python's own ``hash`` is not stable between processes; BLAKE2 is.

A tensor of two or more dimensions is cut between *rows*, what one index of its first dimension
holds, so that some rows of it can be pushed and pulled without the others. So are the pieces of a
part that is larger than a chunk. Where a row is too long for that, they are cut anywhere, and
such a key is pushed and pulled as a whole (:func:`lies_by_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from kvps.dtypes import Spec

BIGARRAY_BOUND = 100_000
"""Elements from which a key is cut: with ResNet-50 on 4 servers the fullest one then carries
1.02 times the mean; at MXNet's 1,000,000 it would be 1.15 times."""

ALIGN = 16
"""Parts begin at multiples of this many elements, so that vector instructions start aligned."""
PAGE = 1024
PAGES_MIN = 32
"""Parts of so many pages of float32 begin at one, so that they can be mapped side by side."""

JOIN_SERVER = 0
"""The rank of the server that says when a join is over."""
EMBEDDING = "kvps.embedding:"
"""The prefix of the keys of embedding tables: each has one element on every server, the number of the table's
rows there."""


class Part(NamedTuple):
    """Neighbouring elements of a key on one server."""

    server: int
    start: int
    size: int


def home(key: str, servers: int) -> int:
    """Return the server that answers for ``key``: the only one for a small key.

    Example:
        >>> home("weight", 1)
        0
    """
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") % servers


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
    if count < servers * width:
        width = 1
    least = count // (servers * PAGES_MIN)
    unit = whole(width, PAGE, least) or whole(width, ALIGN, least) or (width if width > 1 else ALIGN)
    cuts = [count * i // servers // unit * unit for i in range(servers)] + [count]
    return tuple(Part(server, start, stop - start) for server, (start, stop) in enumerate(pairwise(cuts)))


def whole(width: int, align: int, most: int) -> int:
    """Return what is whole rows and whole ``align``, the least there is; 0 if it is over ``most``.

    Example:
        >>> whole(48, 1024, 4096), whole(49, 1024, 4096)
        (3072, 0)
    """
    unit = lcm(width, align)
    return unit if unit <= most else 0


def lies_by_rows(spec: Spec, pieces: Iterable[tuple[int, int]]) -> bool:
    """Whether some rows of a key can be pushed and pulled without the others.

    The workers and the servers ask this of what there is, as chunks may be of any size, and keys
    that come from a checkpoint may have been cut for other servers.

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
