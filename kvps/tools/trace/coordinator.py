"""The scheduler's part in a trace: begins it, reads the clocks of all members, and keeps their
spans to be fetched.

One trace is recorded at a time. What it keeps is bounded, and forgotten some time after its end.
Members are those that say BEAT: the envelope of each was judged before, so that strangers have no
part in this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvps.core.effects import Route
from kvps.errors import ConfigError
from kvps.protocol.envelope import Envelope, Message
from kvps.protocol.tracing import (
    SPANS_MAX,
    TRIPS_MAX,
    AskClock,
    ClockIs,
    Fetch,
    Part,
    RoundTrip,
    Spans,
    Trace,
    Tracing,
)

FOR_MAX_S = 600.0
"""The longest trace that an operator may ask for."""
ASK_EVERY_S = 0.5
"""How often every clock is read."""
GATHER_S = 1.5
"""How long the last spans may take to come."""
KEEP_S = 120.0
"""How long a trace that is over can be fetched."""
BYTES_MAX = 96 << 20
"""Bytes of spans that are kept; further spans are counted as lost."""
GONE_S = 15.0
"""A member that said no BEAT for so long is asked no more."""

Identity = tuple[int, int, int]
"""Role, rank and incarnation."""


@dataclass(slots=True)
class Batch:
    """Spans of one process, as they came."""

    who: Identity
    host: str
    pid: int
    count: int
    payload: bytearray
    lost: int


@dataclass(slots=True)
class Recording:
    """One trace."""

    number: int
    until: float
    """When members are asked no more."""
    batches: list[Batch] = field(default_factory=list)
    newest: dict[Identity, Batch] = field(default_factory=dict)
    """The last batch of each process: further spans are added to it while there is room."""
    size_bytes: int = 0
    trips: dict[Identity, list[RoundTrip]] = field(default_factory=dict)
    lost: dict[Identity, int] = field(default_factory=dict)
    """Spans that came and were not kept."""


class TraceCoordinator:
    """All traces of one scheduler, one after another."""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self._members: dict[Route, float] = {}
        """The connections along which members said BEAT, and when they said it last."""
        self._ask_at = 0.0

    def is_on(self, now: float) -> bool:
        """Whether members record."""
        return self.recording is not None and now < self.recording.until

    def beat(self, route: Route, now: float) -> None:
        """A member said BEAT."""
        self._members[route] = now

    def begin(self, number: int, for_s: float, now: float) -> None:
        """Begin a trace, in place of one that is over."""
        self.recording = Recording(number, now + for_s)
        self._ask_at = now

    def on_trace(self, seq: int, message: Trace, now: float, clock: int, wall_s: float) -> Message:
        """Begin the trace that an operator asks for, or say how far it is.

        Raises:
            ConfigError: if another one is being recorded, or it would take too long.
        """
        current = self.recording
        if current is None or current.number != message.number:
            if current is not None and now < current.until + GATHER_S:
                raise ConfigError(
                    f"another trace is being recorded for {current.until - now:.1f} s more; ask again then"
                )
            if not 0.0 < message.for_s <= FOR_MAX_S:
                raise ConfigError(
                    f"a trace of {message.for_s:g} s: ask for more than 0 and at most {FOR_MAX_S:g} s"
                )
            self.begin(message.number, message.for_s, now)
            current = self.recording
        assert current is not None
        left_s = max(0.0, current.until + GATHER_S - now)
        return Tracing(seq, left_s, len(current.batches), wall_s, clock)

    def on_clock(self, envelope: Envelope, message: ClockIs, clock: int) -> None:
        """A member has read its clock."""
        current = self.recording
        if current is None or message.number != current.number:
            return
        trips = current.trips.setdefault(_who(envelope), [])
        trips.append(RoundTrip(message.sent, message.clock, clock))
        if len(trips) > TRIPS_MAX:  # the slowest of neighbours tells least
            slow = max(range(1, len(trips) - 1), key=lambda at: trips[at].back - trips[at].sent)
            del trips[slow]

    def on_spans(self, envelope: Envelope, message: Spans, payload: bytes) -> None:
        """A member has sent spans."""
        self.keep(_who(envelope), message, payload)

    def keep(self, who: Identity, message: Spans, payload: bytes) -> None:
        """Keep spans, if they are of this trace and there is room."""
        current = self.recording
        if current is None or message.number != current.number:
            return
        if current.size_bytes + len(payload) > BYTES_MAX:
            current.lost[who] = current.lost.get(who, 0) + message.count
            return
        current.size_bytes += len(payload)
        batch = current.newest.get(who)
        if batch is not None and batch.count + message.count <= SPANS_MAX:
            batch.payload += payload
            batch.count, batch.lost = batch.count + message.count, message.lost
            return
        batch = Batch(who, message.host, message.pid, message.count, bytearray(payload), message.lost)
        current.newest[who] = batch
        current.batches.append(batch)

    def on_fetch(self, seq: int, message: Fetch) -> tuple[Message, bytes]:
        """Return a part of a trace.

        Raises:
            ConfigError: if it is not there, or no longer.
        """
        current = self.recording
        if current is None or current.number != message.number:
            raise ConfigError("this trace is no longer there; record it again")
        if message.part >= len(current.batches):
            raise ConfigError(f"the trace has {len(current.batches)} parts, not {message.part + 1}")
        return self._part(seq, current, current.batches[message.part])

    def parts(self) -> Iterator[tuple[Part, bytes]]:
        """Yield all parts of the newest trace."""
        for batch in [] if self.recording is None else self.recording.batches:
            assert self.recording is not None
            yield self._part(0, self.recording, batch)

    def _part(self, seq: int, current: Recording, batch: Batch) -> tuple[Part, bytes]:
        trips = tuple(current.trips.get(batch.who, ()))
        lost = batch.lost + current.lost.get(batch.who, 0)
        part = Part(seq, *batch.who, batch.host, batch.pid, trips, batch.count, lost)
        return part, bytes(batch.payload)

    def due(self) -> float | None:
        """Return when :meth:`on_time` should be called next; None while no trace is kept."""
        return None if self.recording is None else self._ask_at

    def on_time(self, now: float, clock: int) -> Iterator[tuple[Route, Message]]:
        """Yield the questions that are due."""
        current = self.recording
        if current is None or now < self._ask_at:
            return
        self._ask_at = now + ASK_EVERY_S
        if now >= current.until + KEEP_S:
            self.recording = None
        elif now < current.until:
            for route in [silent for silent, at in self._members.items() if now >= at + GONE_S]:
                del self._members[route]
            for route in self._members:
                yield route, AskClock(current.number, clock)


def _who(envelope: Envelope) -> Identity:
    return envelope.role, envelope.rank, envelope.incarnation
