"""Lenses that record traces: of members, which send their spans to the scheduler, and of the
scheduler itself.

The messages of traces end here: no core hears of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from kvps import protocol as p
from kvps.core.counts import Counts
from kvps.core.effects import Core, Effect, Exit, Note, Route, Send
from kvps.core.membership_client import SCHEDULER
from kvps.errors import ConfigError
from kvps.net.driver import Doors, Lens, Perform
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.tools.trace.coordinator import TraceCoordinator
from kvps.tools.trace.member import TracedMember
from kvps.tools.trace.tracer import Tracer

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
        self._lens: Lens = below or Lens()
        self._now = 0.0
        """The time of the door that is called."""

    def connect(self, core: Core, perform: Perform) -> None:
        """The loop begins: have the effects of ``core`` performed, and watched while a trace is recorded."""
        self._lens.connect(core, perform)
        self._perform, self._outbox, self._unwatched = perform, core.outbox, core.outbox.append
        self.doors = self._below = self._lens.doors
        self.own = Doors(self.packet, self._below.failure, self._below.drop, self.timer, self.request)

    def packet(self, route: Route, packet: Packet, now: float) -> None:
        """A packet came."""
        if packet.message.TAG in TAGS:
            self.on_tracing(route, packet, now)
            return
        self._now = now
        self.tracer.begin((route, packet))
        self._below.packet(route, packet, now)
        self.tracer.finish()

    def timer(self, now: float) -> None:
        """The deadline is reached."""
        self._now = now
        self.tracer.begin(None)
        self._below.timer(now)
        self.tracer.finish()

    def request(self, door: Callable[..., None], core: Core, *arguments: Any) -> None:
        """Another thread asks for something."""
        self._now = arguments[-1]
        self.tracer.begin(None)
        self._below.request(door, core, *arguments)
        self.tracer.finish()

    def _watched(self, effect: Effect) -> None:
        self.tracer.watch(effect, self._unwatched)

    def on_tracing(self, route: Route, packet: Packet, now: float) -> None:
        """Hear a message of traces."""
        raise NotImplementedError

    def _switch(self, was_on: bool) -> None:
        """Measure or stop measuring, if that has changed."""
        is_on = self.tracer.is_on
        if is_on and not was_on:
            self.tracer.open(self._counts())
            self.watch, self.doors = self.tracer, self.own
            self._outbox.connect(self._watched)
        elif was_on and not is_on:
            self.tracer.close()
            self.watch, self.doors = None, self._below
            self._outbox.connect(self._unwatched)


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

    def _watched(self, effect: Effect) -> None:
        """Watch an effect; the recorded spans leave before this process does."""
        is_leave = isinstance(effect, Send) and isinstance(effect.packet.message, p.Leave)
        if is_leave or isinstance(effect, Exit):
            self.tick(self._now)
        super()._watched(effect)

    def on_tracing(self, route: Route, packet: Packet, now: float) -> None:
        """Answer the scheduler's ASK-CLOCK, and record from then on."""
        message, was_on = packet.message, self.tracer.is_on
        if route != SCHEDULER or not isinstance(message, p.AskClock):
            return
        answer = self.member.on_ask(message, now, self.tracer.clock())
        self._switch(was_on)
        self.due = self.member.due()
        self._perform(Send(SCHEDULER, Packet(self._envelope(), answer)))

    def tick(self, now: float) -> None:
        """Send the recorded spans."""
        was_on = self.tracer.is_on
        for message, octets in self.member.flush(now):
            self._perform(Send(SCHEDULER, Packet(self._envelope(), message, (memoryview(octets),))))
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

    def packet(self, route: Route, packet: Packet, now: float) -> None:
        """A packet came: a beat, which tells where a member is, whether a trace is recorded or
        not; or any other."""
        if isinstance(packet.message, p.Beat):
            if isinstance(route, bytes):
                self.coordinator.beat(route, now)
            if self.watch is None:
                self._below.packet(route, packet, now)
                return
        super().packet(route, packet, now)

    def on_tracing(self, route: Route, packet: Packet, now: float) -> None:
        """Hear operators and members."""
        envelope, message, clock = packet.envelope, packet.message, self.tracer.clock()
        try:
            match message:
                case p.Trace():
                    answer = self.coordinator.on_trace(envelope.seq, message, now, clock, self._wall_clock())
                    self._perform(Send(route, _ours(answer)))
                    self.tick(now)
                case p.Fetch():
                    answer, octets = self.coordinator.on_fetch(envelope.seq, message)
                    self._perform(Send(route, _ours(answer, octets)))
                case p.ClockIs():
                    self.coordinator.on_clock(envelope, message, clock)
                case p.Spans():
                    self.coordinator.on_spans(envelope, message, b"".join(packet.payload))
                case _:
                    self._perform(Note("debug", f"unexpected {type(message).__name__}"))
        except ConfigError as error:
            self._perform(Send(route, _ours(p.Error(envelope.seq, error.code, str(error)))))

    def tick(self, now: float) -> None:
        """Ask the clocks of all members, and keep the scheduler's own spans."""
        was_on = self.tracer.is_on
        if self._from_start and self.coordinator.recording is None:
            self.coordinator.begin(1, math.inf, now)
        self.keep_own(now)
        for route, message in self.coordinator.on_time(now, self.tracer.clock()):
            self._perform(Send(route, _ours(message)))
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
