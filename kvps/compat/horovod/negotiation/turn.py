"""Turns: the messages of one cycle, one from each rank, and their bytes.

A turn carries the requests that a rank has made since its last turn. It also says whether the rank
has joined, why it leaves, or that it waits for an operation and can make no other request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from kvps.compat.horovod.negotiation.request import KINDS, NAME_MAX, CollectiveRequest, Key, Part
from kvps.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Turn:
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
    requests = [
        [
            *(request.name, request.kind, request.process_set),
            [[part.dtype, part.shape] for part in request.parts],
            *(
                request.op,
                request.root,
                request.prescale,
                request.postscale,
                request.splits,
                request.ranks,
                request.fault,
            ),
        ]
        for request in turn.requests
    ]
    row = [requests, turn.has_joined, turn.over, turn.waits_for]
    packed: bytes = msgpack.packb(row)
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
            tuple([_request(*row) for row in requests]),
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


def _request(
    name: Any,
    kind: Any,
    process_set: Any,
    parts: Any,
    op: Any,
    root: Any,
    prescale: Any,
    postscale: Any,
    splits: Any,
    ranks: Any,
    fault: Any,
) -> CollectiveRequest:
    _key(process_set, name)
    _demand(kind in KINDS and type(op) is str and type(root) is int and type(fault) is str)
    _demand(type(prescale) is float and type(postscale) is float)
    return CollectiveRequest(
        name,
        kind,
        process_set,
        tuple([_part(*part) for part in parts]),
        op,
        root,
        prescale,
        postscale,
        tuple([_sizes(sizes) for sizes in splits]),
        _sizes(ranks),
        fault,
    )


def _part(dtype: Any, shape: Any) -> Part:
    _demand(type(dtype) is str)
    return Part(dtype, _sizes(shape))


def _sizes(given: Any) -> tuple[int, ...]:
    _demand(type(given) is list and all(type(size) is int for size in given))
    return tuple(given)
