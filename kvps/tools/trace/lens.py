"""Lenses that record traces: of members, which send their spans to the scheduler, and of the
scheduler itself.

The messages of traces end here: no core hears of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from kvps import protocol as p
from kvps.core.counts import Counts
from kvps.core.effects import Core, Effects, Exit, Note, Route, Send
from kvps.core.membership_client import SCHEDULER
from kvps.errors import ConfigError
from kvps.net.driver import Item, Lens
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.tools.trace.coordinator import TraceCoordinator
from kvps.tools.trace.member import TracedMember
from kvps.tools.trace.tracer import Tracer

C = TypeVar("C", bound=Core)
TAGS = range(p.Trace.TAG, p.Part.TAG + 1)
"""The messages of traces."""


class TimelineLens(Lens):
    """The common part of the lenses of members and schedulers: effects are watched while a trace is recorded.

    Args:
        tracer: of this process.
        counts: returns the counters of the core, which tell when an optimizer makes a step; None without.
        below: the lens that calls the core.
    """

    tags: Collection[int] = TAGS

    def __init__(
        self, tracer: Tracer, counts: Callable[[], Counts | None] = lambda: None, below: Lens | None = None
    ) -> None:
        self.tracer = tracer
        self.member: TracedMember = tracer.member
        self.watch: Tracer | None = None
        """The tracer while a trace is recorded."""
        self._counts = counts
        self._below: Lens = below or Lens()
        self.current: Lens = self._below

    def packet(self, core: Core, route: Route, packet: Packet, now: float) -> Effects:
        """A packet came."""
        if packet.message.TAG in TAGS:
            return self.on_tracing(route, packet, now)
        began = self.tracer.clock()
        effects = self._below.packet(core, route, packet, now)
        return self._watched((route, packet), began, effects, now)

    def failure(self, core: Core, route: Route, envelope: Envelope, error: Exception, now: float) -> Effects:
        """A packet was refused, or caused an unexpected error."""
        return self._below.failure(core, route, envelope, error, now)

    def drop(self, core: Core, route: Route, now: float) -> Effects:
        """A connection broke."""
        return self._below.drop(core, route, now)

    def timer(self, core: Core, now: float) -> Effects:
        """The deadline is reached."""
        began = self.tracer.clock()
        return self._watched(None, began, self._below.timer(core, now), now)

    def item(self, core: C, item: Item[C], now: float) -> Effects:
        """Another thread asks for something."""
        began = self.tracer.clock()
        return self._watched(None, began, self._below.item(core, item, now), now)

    def _watched(
        self, came: tuple[Route, Packet] | None, began: int, effects: Effects, now: float
    ) -> Effects:
        return self.tracer.watch(came, began, effects)

    def on_tracing(self, route: Route, packet: Packet, now: float) -> Effects:
        """Hear a message of traces."""
        raise NotImplementedError

    def _switch(self, was_on: bool) -> None:
        """Measure or stop measuring, if that has changed."""
        is_on = self.tracer.is_on
        if is_on and not was_on:
            self.tracer.open(self._counts())
            self.watch, self.current = self.tracer, self
        elif was_on and not is_on:
            self.tracer.close()
            self.watch, self.current = None, self._below


class MemberLens(TimelineLens):
    """The lens of a server or worker.

    Args:
        tracer: of this process.
        envelope: returns the envelope of this process.
        counts: as in :class:`TimelineLens`.
        below: the lens that calls the core, as in :class:`TimelineLens`.
    """

    def __init__(
        self,
        tracer: Tracer,
        envelope: Callable[[], Envelope],
        counts: Callable[[], Counts | None] = lambda: None,
        below: Lens | None = None,
    ) -> None:
        super().__init__(tracer, counts, below)
        self._envelope = envelope

    def _watched(
        self, came: tuple[Route, Packet] | None, began: int, effects: Effects, now: float
    ) -> Effects:
        """Watch ``effects``; the recorded spans leave before this process does."""
        for effect in self.tracer.watch(came, began, effects):
            is_leave = isinstance(effect, Send) and isinstance(effect.packet.message, p.Leave)
            if is_leave or isinstance(effect, Exit):
                yield from self.tick(now)
            yield effect

    def on_tracing(self, route: Route, packet: Packet, now: float) -> Effects:
        """Answer the scheduler's ASK-CLOCK, and record from then on."""
        message, was_on = packet.message, self.tracer.is_on
        if route != SCHEDULER or not isinstance(message, p.AskClock):
            return
        answer = self.member.on_ask(message, now, self.tracer.clock())
        self._switch(was_on)
        self.due = self.member.due()
        yield Send(SCHEDULER, Packet(self._envelope(), answer))

    def tick(self, now: float) -> Effects:
        """Send the recorded spans."""
        was_on = self.tracer.is_on
        for message, octets in self.member.flush(now):
            yield Send(SCHEDULER, Packet(self._envelope(), message, (memoryview(octets),)))
        self._switch(was_on)
        self.due = self.member.due() if self.tracer.is_on else None


class SchedulerLens(TimelineLens):
    """The lens of a scheduler, which gathers.

    Args:
        tracer: of this process.
        wall_clock: seconds since 1970.
        from_start: record all the time, and not only when an operator asks.
        below: as in :class:`TimelineLens`.
    """

    tags: Collection[int] = (*TAGS, p.Beat.TAG)

    def __init__(
        self,
        tracer: Tracer,
        wall_clock: Callable[[], float] = time.time,
        *,
        from_start: bool = False,
        below: Lens | None = None,
    ) -> None:
        super().__init__(tracer, below=below)
        self.coordinator = TraceCoordinator()
        self._wall_clock = wall_clock
        self._from_start = from_start
        if from_start:
            self.due = 0.0

    def packet(self, core: Core, route: Route, packet: Packet, now: float) -> Effects:
        """A packet came: a beat, which tells where a member is, whether a trace is recorded or
        not; or any other."""
        if isinstance(packet.message, p.Beat):
            if isinstance(route, bytes):
                self.coordinator.beat(route, now)
            if self.watch is None:
                return self._below.packet(core, route, packet, now)
        return super().packet(core, route, packet, now)

    def on_tracing(self, route: Route, packet: Packet, now: float) -> Effects:
        """Hear operators and members."""
        envelope, message, clock = packet.envelope, packet.message, self.tracer.clock()
        try:
            match message:
                case p.Trace():
                    answer = self.coordinator.on_trace(envelope.seq, message, now, clock, self._wall_clock())
                    yield Send(route, _ours(answer))
                    yield from self.tick(now)
                case p.Fetch():
                    answer, octets = self.coordinator.on_fetch(envelope.seq, message)
                    yield Send(route, _ours(answer, octets))
                case p.ClockIs():
                    self.coordinator.on_clock(envelope, message, clock)
                case p.Spans():
                    self.coordinator.on_spans(envelope, message, b"".join(packet.payload))
                case _:
                    yield Note("debug", f"unexpected {type(message).__name__}")
        except ConfigError as error:
            yield Send(route, _ours(p.Error(envelope.seq, error.code, str(error))))

    def tick(self, now: float) -> Effects:
        """Ask the clocks of all members, and keep the scheduler's own spans."""
        was_on = self.tracer.is_on
        if self._from_start and self.coordinator.recording is None:
            self.coordinator.begin(1, math.inf, now)
        self.keep_own(now)
        for route, message in self.coordinator.on_time(now, self.tracer.clock()):
            yield Send(route, _ours(message))
        recording = self.coordinator.recording
        if recording is not None and self.coordinator.is_on(now):
            self.member.begin(recording.number, now)
        else:
            self.member.number = 0
        self._switch(was_on)
        due = self.coordinator.due()
        self.due = due if due is None or not self.tracer.is_on else min(due, self.member.due())

    def keep_own(self, now: float) -> None:
        """Put the scheduler's own spans beside the members' spans."""
        for message, octets in self.member.flush(now):
            assert isinstance(message, p.Spans)
            self.coordinator.keep((Role.SCHEDULER, 0, 0), message, octets)


def _ours(message: Message, octets: bytes = b"") -> Packet:
    """Return a packet that names no job: an operator is no member."""
    envelope = Envelope(bytes(16), 0, Role.SCHEDULER, 0, 0, 0)
    return Packet(envelope, message, (memoryview(octets),) if octets else ())


def parts_of(lens: SchedulerLens, now: float) -> Iterator[tuple[p.Part, bytes]]:
    """Yield all parts of the newest trace, the scheduler's own spans among them."""
    lens.keep_own(now)
    yield from lens.coordinator.parts()
