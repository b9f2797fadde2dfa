"""A member's part in a trace: when it records, what its clock shows, and when its spans leave.

It records from the first ASK-CLOCK of a trace until it has heard none for a while, so that a
scheduler that ends or forgets leaves no process recording.

Spans: what a process did from when to when, for which request, as numbers of a fixed size.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvps.errors import ProtocolError
from kvps.protocol.envelope import Message
from kvps.protocol.tracing import SPAN_BYTES, SPANS_MAX, AskClock, ClockIs, Spans

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


SILENCE_MAX_S = 5.0
"""Recording ends when no ASK-CLOCK came for so long."""
FLUSH_EVERY_S = 0.25
"""Spans leave so often."""
WAITING_MAX = 4 * SPANS_MAX
"""Spans that wait to leave; further spans are left out and counted."""


class TracedMember:
    """The spans of one process, from when they are made until they leave.

    Args:
        host: its host.
        pid: its process id.
    """

    def __init__(self, host: str, pid: int) -> None:
        self.number = 0
        """The trace that is recorded; 0 for none."""
        self.spans: list[TimeSpan] = []
        """Those that have not left; anybody who records appends."""
        self._host, self._pid = host, pid
        self._lost = 0
        self._heard_at = self._flushed_at = 0.0

    @property
    def is_on(self) -> bool:
        """Whether spans are wanted."""
        return self.number != 0

    def begin(self, number: int, now: float) -> None:
        """Record for a trace from now on."""
        if number != self.number:
            self.number, self.spans, self._lost, self._flushed_at = number, [], 0, now
        self._heard_at = now

    def on_ask(self, message: AskClock, now: float, clock: int) -> Message:
        """Record for the trace of an ASK-CLOCK; return the answer.

        Args:
            message: the question.
            now: seconds.
            clock: what the clock of spans shows, in nanoseconds.
        """
        self.begin(message.number, now)
        return ClockIs(message.number, message.sent, clock)

    def bound(self) -> None:
        """Drop events beyond the limit; called now and then."""
        surplus = len(self.spans) - WAITING_MAX
        if surplus > 0:
            del self.spans[-surplus:]
            self._lost += surplus

    def due(self) -> float:
        """Return when :meth:`flush` should be called next."""
        return self._flushed_at + FLUSH_EVERY_S

    def flush(self, now: float) -> Iterator[tuple[Message, bytes]]:
        """Yield the messages with the recorded spans, and stop if nobody asks any more."""
        self._flushed_at = now
        self.bound()
        spans, self.spans = self.spans, []
        for first in range(0, len(spans), SPANS_MAX):
            part = spans[first : first + SPANS_MAX]
            message = Spans(self.number, self._host, self._pid, len(part), self._lost)
            yield message, pack(part)
        if now >= self._heard_at + SILENCE_MAX_S:
            self.number = 0
