"""Requests: one rank's part in a collective, and the differences between the requests of two ranks.

A request says everything that the ranks must agree on before values move. All tensors of a grouped
operation are parts of one request, so a group runs as a whole or not at all.

Which fields must agree depends on the operation: an allgather may differ in the first dimension,
an alltoall in its splits, and only a broadcast has a root.

Turns: the messages of one cycle, one from each rank, and their bytes.

A turn carries the requests that a rank has made since its last turn. It also says whether the rank
has joined, why it leaves, or that it waits for an operation and can make no other request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from kvps.errors import ProtocolError

ALLREDUCE, ALLGATHER, BROADCAST = "allreduce", "allgather", "broadcast"
ALLTOALL, REDUCESCATTER, BARRIER = "alltoall", "reducescatter", "barrier"
ADD_SET, REMOVE_SET = "add_process_set", "remove_process_set"
KINDS = (*(ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER), *(ADD_SET, REMOVE_SET))
"""The operations that are negotiated."""
UNEVEN = (ALLGATHER, ALLTOALL)
"""Operations whose tensors may differ in the first dimension."""
SUMMING = ("sum", "average")
"""Reductions to which a rank that has joined adds zeros."""
FORM = [str, str, int, list, str, int, float, float, list, list, str]
"""The types of the fields of a request, as they travel."""
NAME_MAX = 1024
"""Characters of a name."""

Key = tuple[int, str]
"""A process set, and the name of an operation in it."""


class Part(NamedTuple):
    """One tensor of a request: its element type, by torch's name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class CollectiveRequest(NamedTuple):
    """One rank's part in a collective.

    Attributes:
        name: matches the requests of the ranks.
        kind: one of :data:`KINDS`.
        process_set: the set whose ranks take part.
        parts: the tensors, in their order.
        op: the reduction: ``sum``, ``average``, ``min``, ``max``, ``product`` or ``adasum``; else empty.
        root: the rank whose tensor is broadcast; else -1.
        prescale, postscale: factors of a reduction.
        splits: of an alltoall: rows for each rank of the set, for each part.
        ranks: the ranks of a process set that is added.
        fault: why the rank refuses its own call; the other ranks are told.
    """

    name: str
    kind: str
    process_set: int = 0
    parts: tuple[Part, ...] = ()
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[tuple[int, ...], ...] = ()
    ranks: tuple[int, ...] = ()
    fault: str = ""

    @property
    def key(self) -> Key:
        """The process set and the name."""
        return self.process_set, self.name


def difference(first: int, request: CollectiveRequest, second: int, other: CollectiveRequest) -> str:
    """Return how the requests of two ranks differ, in words; empty if they fit together.

    Example:
        >>> first = CollectiveRequest("x", ALLREDUCE, parts=(Part("float32", (2,)),), op="sum")
        >>> other = CollectiveRequest("x", ALLREDUCE, parts=(Part("float32", (3,)),), op="sum")
        >>> difference(0, first, 1, other)
        'shapes differ: rank 0 has float32[2], rank 1 has float32[3]'
    """

    def differ(what: str, here: object, there: object) -> str:
        return f"{what} differ: rank {first} has {here}, rank {second} has {there}"

    if request.kind != other.kind:
        return differ("operations", request.kind, other.kind)
    if len(request.parts) != len(other.parts):
        return differ("numbers of tensors", len(request.parts), len(other.parts))
    for index, (here, there) in enumerate(zip(request.parts, other.parts, strict=True)):
        of = f" of tensor {index}" if len(request.parts) > 1 else ""
        if here.dtype != there.dtype:
            return differ(f"types{of}", here.dtype, there.dtype)
        if _compared(request.kind, here) != _compared(request.kind, there):
            return differ(f"shapes{of}", here, there)
    for what, mine, its in (
        ("reductions", request.op, other.op),
        ("root ranks", request.root, other.root),
        ("prescale factors", request.prescale, other.prescale),
        ("postscale factors", request.postscale, other.postscale),
        ("ranks of the process set", list(request.ranks), list(other.ranks)),
    ):
        if mine != its:
            return differ(what, mine, its)
    return ""


def _compared(kind: str, part: Part) -> tuple[int, ...]:
    """Return the part of a shape that must agree: without the first dimension where it may differ."""
    if kind in UNEVEN:
        return (len(part.shape), *part.shape[1:])
    return part.shape


def own_fault(request: CollectiveRequest, ranks: Sequence[int]) -> str:
    """Return the fault of a request by itself, in words; empty if it has none.

    Args:
        request: one rank's.
        ranks: the ranks of its process set.
    """
    if request.fault:
        return request.fault
    if request.kind == BROADCAST and request.root not in ranks:
        return f"root_rank={request.root} is not in the process set {list(ranks)}"
    if request.kind in (*UNEVEN, REDUCESCATTER) and any(not part.shape for part in request.parts):
        return f"{request.kind} needs tensors with 1 dimension or more, got a scalar"
    if request.kind == ALLTOALL:
        for part, splits in zip(request.parts, request.splits, strict=True):
            if len(splits) != len(ranks):
                return f"{len(splits)} splits were given for {len(ranks)} ranks"
            if min(splits) < 0 or sum(splits) > part.shape[0]:
                return f"splits {list(splits)} need more rows than {part} has"
    return ""


class Turn(NamedTuple):
    """One rank's message of one cycle.

    Attributes:
        requests: those made since the last turn, in their order.
        has_joined: the rank has called ``join()`` after them.
        over: why the rank takes no more turns after this one; empty if it does.
        waits_for: the operation that the only thread of the rank that makes requests waits for.
    """

    requests: tuple[CollectiveRequest, ...] = ()
    has_joined: bool = False
    over: str = ""
    waits_for: Key | None = None


def pack(turn: Turn) -> bytes:
    """Return the bytes of a turn.

    Example:
        >>> unpack(pack(Turn(has_joined=True)))
        Turn(requests=(), has_joined=True, over='', waits_for=None)
    """
    packed: bytes = msgpack.packb(turn)
    return packed


def unpack(given: bytes) -> Turn:
    """Return the turn of these bytes.

    Raises:
        ProtocolError: if they do not describe a turn.
    """
    try:
        requests, has_joined, over, waits_for = msgpack.unpackb(given)
        _demand(type(has_joined) is bool and type(over) is str)
        return Turn(
            tuple([_request(CollectiveRequest(*row)) for row in requests]),
            has_joined,
            over,
            None if waits_for is None else _key(*waits_for),
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a turn of the negotiation cannot be read: {error}") from error


def _demand(is_right: bool) -> None:
    if not is_right:
        raise ValueError("a field has the wrong type")


def _key(process_set: Any, name: Any) -> Key:
    _demand(type(process_set) is int and type(name) is str and len(name) <= NAME_MAX)
    return process_set, name


def _request(given: CollectiveRequest) -> CollectiveRequest:
    """Return a request whose fields, as they came, have the right types."""
    _key(given.process_set, given.name)
    _demand(list(map(type, given)) == FORM and given.kind in KINDS)
    return given._replace(
        parts=tuple([_part(*part) for part in given.parts]),
        splits=tuple([_sizes(sizes) for sizes in given.splits]),
        ranks=_sizes(given.ranks),
    )


def _part(dtype: Any, shape: Any) -> Part:
    _demand(type(dtype) is str)
    return Part(dtype, _sizes(shape))


def _sizes(given: Any) -> tuple[int, ...]:
    _demand(type(given) is list and all(type(size) is int for size in given))
    return tuple(given)
