"""Messages of traces: what every process does and when, gathered by the scheduler for one timeline."""

from __future__ import annotations

from typing import NamedTuple

from kvps.protocol.envelope import Answer, Message, tag

SPAN_BYTES = 48
"""Octets of a span in the payload of SPANS and PART."""
SPANS_MAX = 8192
"""Most spans of one message: its payload stays below the longest frame that a scheduler takes."""
TRIPS_MAX = 64
"""Most round trips that a PART names."""


def _span_sizes(count: int) -> tuple[int, ...]:
    """Return the size of the frame of ``count`` spans; no frame for no spans."""
    return (SPAN_BYTES * count,) if count else ()


class RoundTrip(NamedTuple):
    """A clock of a member, read between two times of the scheduler; all are nanoseconds."""

    sent: int
    """The scheduler's clock when it asked."""
    clock: int
    """The member's clock when it answered."""
    back: int
    """The scheduler's clock when the answer came."""


@tag(140)
class Trace(Message):
    """Operator to scheduler: have all processes record their events for ``for_s`` seconds."""

    number: int
    """Chosen by the operator: the same one asks how far that trace is."""
    for_s: float


@tag(141)
class Tracing(Answer):
    """Answer to TRACE."""

    left_s: float
    """Seconds until all parts are there; 0 once they are."""
    parts: int
    """How many there are."""
    wall_s: float
    """Seconds since 1970 at the scheduler, when its clock was ``clock``."""
    clock: int


@tag(142)
class AskClock(Message):
    """Scheduler to member: record for this trace, and say what your clock shows."""

    number: int
    sent: int
    """The scheduler's clock in nanoseconds."""


@tag(143)
class ClockIs(Message):
    """Member's answer to ASK-CLOCK."""

    number: int
    sent: int
    """The field ``sent`` of the ASK-CLOCK."""
    clock: int
    """The member's clock in nanoseconds."""


@tag(144)
class Spans(Message):
    """Member to scheduler: what I did since the last SPANS of this trace."""

    number: int
    host: str
    pid: int
    count: int
    lost: int
    """Spans that were left out, as too many waited."""

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame of spans, or none."""
        return _span_sizes(self.count)


@tag(145)
class Fetch(Message):
    """Operator to scheduler: this part of that trace, please."""

    number: int
    part: int
    """From 0 on."""


@tag(146)
class Part(Answer):
    """Answer to FETCH: spans of one process."""

    role: int
    rank: int
    incarnation: int
    host: str
    pid: int
    trips: tuple[RoundTrip, ...]
    """Readings of that process's clock; the scheduler's own spans need none."""
    count: int
    lost: int

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame of spans, or none."""
        return _span_sizes(self.count)
