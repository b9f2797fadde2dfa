"""A member's part in a trace: when it records, what its clock shows, and when its spans leave.

It records from the first ASK-CLOCK of a trace until it has heard none for a while, so that a
scheduler that ends or forgets leaves no process recording.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvps.protocol.envelope import Message
from kvps.protocol.tracing import SPANS_MAX, AskClock, ClockIs, Spans
from kvps.tools.trace.spans import TimeSpan, pack

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
        """Leave out what is too much; called now and then."""
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
