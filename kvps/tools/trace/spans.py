"""Spans: what a process did from when to when, for which request, as numbers of a fixed size."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvps.errors import ProtocolError
from kvps.protocol.tracing import SPAN_BYTES

_LAYOUT = struct.Struct("<BBxxIQQQQII")
"""The fields of :class:`TimeSpan` in their order; two bytes after the role are reserved."""
assert _LAYOUT.size == SPAN_BYTES
_INT_32_MAX = 2**32 - 1
NOBODY = 255
"""The role of a span that has no peer."""


class SpanKind(enum.IntEnum):
    """The work that a span is of."""

    COMPUTE = 1
    """The script of a worker runs, and does not wait for a call."""
    WAIT = 2
    """The script waits for a call."""
    COPY = 3
    """The payload of a request is gathered."""
    ENCODE = 4
    """A packet becomes frames."""
    SEND = 5
    """Frames are handed to the network, or lent."""
    REDUCE = 6
    """A server takes in a gradient and adds gradients up."""
    UPDATE = 7
    """A server's optimizer makes a step."""
    REPLY = 8
    """An answer is made and handed to the network."""
    SCATTER = 9
    """Values of an answer are copied to where the caller wants them."""
    SERVE = 10
    """All else that follows from a packet."""


class TimeSpan(NamedTuple):
    """One span."""

    kind: SpanKind
    role: int
    """Role of the peer; :data:`NOBODY` for none."""
    rank: int
    """Rank of the peer."""
    begin: int
    """Nanoseconds on the clock of the process."""
    took: int
    """Nanoseconds."""
    seq: int = 0
    """Number of the request among its worker's requests to its receiver; 0 for none."""
    number: int = 0
    """Number of the round or push."""
    chunk: int = 0
    octets: int = 0
    """Bytes of payload."""

    @property
    def end(self) -> int:
        """When it ended."""
        return self.begin + self.took


def pack(spans: Iterable[TimeSpan]) -> bytes:
    """Return spans as bytes; a number that is too large for its field is the largest that is not."""
    return b"".join([_packed(span) for span in spans])


def _packed(span: TimeSpan) -> bytes:
    try:
        return _LAYOUT.pack(*span)
    except struct.error:
        rank, took = min(span.rank, _INT_32_MAX), max(0, span.took)
        chunk, octets = min(span.chunk, _INT_32_MAX), min(span.octets, _INT_32_MAX)
        return _LAYOUT.pack(*span._replace(rank=rank, took=took, chunk=chunk, octets=octets))


def unpack(octets: bytes | memoryview) -> Iterator[TimeSpan]:
    """Yield the spans that :func:`pack` has written.

    Raises:
        ProtocolError: if they are none.
    """
    if len(octets) % SPAN_BYTES:
        raise ProtocolError(f"{len(octets)} octets are no spans of {SPAN_BYTES}")
    for kind, role, rank, begin, took, *rest in _LAYOUT.iter_unpack(octets):
        if kind not in _KINDS:
            raise ProtocolError(f"no kind of span has number {kind}")
        yield TimeSpan(_KINDS[kind], role, rank, begin, took, *rest)


_KINDS = {kind.value: kind for kind in SpanKind}
