"""The lenses of members and of the scheduler: whole traces between real cores, on clocks that the test sets."""

from collections.abc import Callable

import pytest

from kvps import protocol as p
from kvps.core.counts import Counts
from kvps.core.effects import CoreOutbox, Effect, Exit, Finish, Note, Route, Send
from kvps.net.driver import Doors, Lens
from kvps.net.transport import Encoding
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.tools.trace.chrome import merge
from kvps.tools.trace.lens import MemberLens, SchedulerLens, parts_of
from kvps.tools.trace.member import NOBODY, SpanKind, TimeSpan, TracedMember
from kvps.tools.trace.tracer import Tracer

WORKER = Envelope(bytes(range(16)), 3, Role.WORKER, 1, 5, 0)
SERVER = Envelope(bytes(range(16)), 3, Role.SERVER, 0, 2, 0)
SCHEDULER = Envelope(bytes(16), 0, Role.SCHEDULER, 0, 0, 0)


class Clock:
    """Nanoseconds, one microsecond more at each look."""

    def __init__(self) -> None:
        self.now = 10**9

    def __call__(self) -> int:
        self.now += 1000
        return self.now


class Core:
    """A core that does what the test says, and takes the time that it says."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.effects: list[tuple[int, Effect]] = []
        """Time to make each, in nanoseconds."""
        self.heard: list[str] = []
        self.outbox = CoreOutbox()
        self.said: list[Effect] = []
        """Effects that were performed."""

        self.slow: Callable[[Effect], None] | None = None
        """Performs an effect, and takes time for it."""

    def perform(self, effect: Effect) -> None:
        self.said.append(effect)
        if self.slow is not None:
            self.slow(effect)

    def _make(self, what: str) -> None:
        self.heard.append(what)
        for took, effect in self.effects:
            self.clock.now += took
            self.outbox.append(effect)

    def on_packet(self, route: Route, packet: Packet, now: float) -> None:
        self._make(type(packet.message).__name__)

    def on_failure(self, route: Route, envelope: Envelope, error: Exception, now: float) -> None:
        self._make("failure")

    def on_drop(self, route: Route, now: float) -> None:
        self._make("drop")

    def on_timer(self, now: float) -> None:
        self._make("timer")

    def on_call(self, number: int, now: float) -> None:
        self._make(f"call {number} at {now}")

    def leave(self, why: str, now: float) -> None:
        self._make(why)

    def admit(self, route: Route, envelope: Envelope, kind: type[Message]) -> bool:
        return True

    def deadline(self) -> float | None:
        return None

    def start(self, now: float) -> None:
        self._make("start")


def member(role: Role = Role.WORKER) -> tuple[MemberLens, Core, Clock]:
    clock = Clock()
    tracer = Tracer(TracedMember("gpu-1", 4711), role, Encoding(), clock)
    envelope = WORKER if role is Role.WORKER else SERVER
    counts = Counts()
    lens, core = MemberLens(tracer, lambda: envelope, lambda: counts), Core(clock)
    lens.connect(core, core.perform)
    return lens, core, clock


def said(core: Core, door: None) -> list[Effect]:
    """Return what was performed of a door that was just called."""
    performed, core.said = core.said, []
    return performed


def asked(lens: MemberLens, core: Core, now: float = 1.0) -> list[Effect]:
    packet = Packet(SCHEDULER, p.AskClock(7, 55))
    return said(core, lens.own.packet("scheduler", packet, now))


def push(seq: int = 42) -> p.Push:
    return p.Push(3, 1, (1,), 1.0, True, (p.Run(0, 2, 5),))


def with_payload(envelope: Envelope, message: Message) -> Packet:
    return Packet(envelope, message, (memoryview(bytes(8)),))


def numbered(envelope: Envelope, seq: int) -> Envelope:
    return Envelope(envelope.job, envelope.view, envelope.role, envelope.rank, envelope.incarnation, seq)


def kinds(lens: MemberLens) -> list[SpanKind]:
    return [span.kind for span in lens.member.spans]


# --- without a trace --------------------------------------------------------------------------------


def pass_on(doors: Doors) -> None:
    doors.packet("server 0", Packet(SERVER, p.Done(1)), 1.0)
    doors.failure("server 0", SERVER, ValueError(), 1.0)
    doors.drop("server 0", 1.0)
    doors.timer(1.0)


def test_without_a_trace_everything_is_passed_on() -> None:
    lens, core, _ = member()
    pass_on(lens.doors)
    lens.doors.request(Core.on_call, core, 3, 2.5)
    lens.doors.request(Core.leave, core, "bye", 2.5)
    assert core.heard == ["Done", "failure", "drop", "timer", "call 3 at 2.5", "bye"]
    assert lens.member.spans == []
    assert lens.due is None


def test_a_plain_lens_passes_on() -> None:
    _, core, _ = member()
    plain = Lens()
    plain.connect(core, core.perform)
    pass_on(plain.doors)
    plain.doors.request(Core.start, core, 1.0)
    assert core.heard == ["Done", "failure", "drop", "timer", "start"]
    plain.tick(0.0)
    assert core.said == []


# --- members ----------------------------------------------------------------------------------------


@pytest.mark.spec("R341", "R344")
def test_a_member_answers_records_and_sends() -> None:
    lens, core, clock = member()
    (answer,) = asked(lens, core)
    assert answer == Send("scheduler", Packet(WORKER, p.ClockIs(7, 55, clock.now)))
    assert core.heard == [], "no core hears of traces"
    assert lens.tracer.is_on
    assert lens.due == 1.25
    lens.own.packet("server 0", Packet(SERVER, p.Done(9)), 1.1)
    (sent,) = said(core, lens.tick(1.25))
    assert isinstance(sent, Send)
    assert sent.packet.message == p.Spans(7, "gpu-1", 4711, 1, 0)
    assert lens.due == 1.5
    assert said(core, lens.tick(7.0)) == []
    assert lens.due is None
    assert not lens.tracer.is_on


def test_a_stranger_starts_no_trace() -> None:
    lens, core, _ = member()
    packet = Packet(WORKER, p.AskClock(7, 55))
    assert said(core, lens.own.packet(b"route", packet, 1.0)) == []
    assert said(core, lens.own.packet("scheduler", Packet(SCHEDULER, p.Tracing(1, 0, 0, 0, 0)), 1.0)) == []
    assert not lens.tracer.is_on


@pytest.mark.spec("R344")
@pytest.mark.parametrize(
    "end", [Send("scheduler", Packet(WORKER, p.Leave(True, 0, True, "done"))), Exit(0, "over")]
)
def test_recorded_spans_leave_before_the_process(end: Effect) -> None:
    lens, core, _ = member()
    asked(lens, core)
    lens.tracer.waited(10, 20)
    core.effects = [(0, end)]
    sent, last = said(core, lens.own.timer(1.1))
    assert isinstance(sent, Send)
    assert isinstance(sent.packet.message, p.Spans)
    assert last == end


def test_the_loop_of_a_worker() -> None:
    """A call makes it copy, encode and send; the answer is scattered, and the next push follows from an ACK."""
    lens, core, clock = member()
    asked(lens, core)
    packet = with_payload(numbered(WORKER, 42), push())
    core.effects = [(3_000_000, Send("server 0", packet)), (0, Finish(1))]

    def send(effect: Effect) -> None:
        if isinstance(effect, Send):
            clock.now += 200_000
            lens.tracer._encoding.ended_at = clock.now
            clock.now += 100_000

    core.slow = send
    lens.own.request(Core.on_call, core, 1, 1.0)
    core.slow = None
    copy, encode, send = lens.member.spans
    assert [item.kind for item in (copy, encode, send)] == [SpanKind.COPY, SpanKind.ENCODE, SpanKind.SEND]
    assert copy.took == pytest.approx(3_000_000, abs=5000)
    assert encode.took == pytest.approx(200_000, abs=5000)
    assert send.took == pytest.approx(100_000, abs=5000)
    assert all(item[1:3] + item[5:] == (1, 0, 42, 5, 3, 8) for item in (copy, encode, send))

    lens.member.spans.clear()
    core.effects = [(2_000_000, Finish(1))]
    stand = p.Pulled(42, 3, 1, True, (p.Stand(0, 2, 6, 6),))
    lens.own.packet("server 0", with_payload(SERVER, stand), 1.0)
    (scatter,) = lens.member.spans
    assert scatter.kind is SpanKind.SCATTER
    assert scatter.took == pytest.approx(2_000_000, abs=5000)
    assert scatter[5:8] == (42, 5, 3), "the round that closed, and the request that asked for it"

    lens.member.spans.clear()
    core.effects = [(1_000_000, Send("server 0", packet))]
    lens.own.packet("server 0", Packet(SERVER, p.Ack((p.Receipt(41, 5),))), 1.0)
    assert kinds(lens) == [SpanKind.SERVE, SpanKind.COPY, SpanKind.SEND]
    assert lens.member.spans[0].seq == 41
    assert lens.member.spans[0].took == 0, "the copy is none of the ACK's"


def test_the_loop_of_a_server() -> None:
    lens, core, clock = member(Role.SERVER)
    asked(lens, core)
    counts = lens._counts()
    assert counts is not None
    lap = counts.lap
    assert lap is not None

    def step(route: Route, packet: Packet, now: float) -> None:
        clock.now += 1_000_000
        lap()
        clock.now += 5_000_000
        lap()
        answer = p.Pulled(42, 3, 1, True, (p.Stand(0, 2, 6, 6),))
        core.outbox.append(Send(b"w", with_payload(SERVER, answer)))
        core.outbox.append(Send("server 1", Packet(SERVER, p.Done(0))))

    lens._below.packet = step
    lens.own.packet(b"w", with_payload(numbered(WORKER, 42), push()), 1.0)
    reduce, update, reply, other = lens.member.spans
    assert [span.kind for span in lens.member.spans] == [
        *(SpanKind.REDUCE, SpanKind.UPDATE, SpanKind.REPLY, SpanKind.REPLY)
    ]
    assert reduce.took == pytest.approx(1_000_000, abs=9000)
    assert update.took == pytest.approx(5_000_000, abs=9000)
    assert reduce.end == update.begin
    assert (reply.role, reply.rank, reply.seq, reply.number) == (2, 1, 42, 5)
    assert (other.role, other.rank) == (1, 1)
    lens.tick(7.0)
    assert counts.lap is None, "nobody measures any more"


def test_a_timer_that_takes_long_and_one_that_does_not() -> None:
    lens, core, _ = member()
    asked(lens, core)
    core.effects = [(100, Note("info", "short"))]
    lens.own.timer(1.0)
    assert lens.member.spans == []
    core.effects = [(50_000_000, Note("info", "long"))]
    lens.own.timer(1.0)
    (serve,) = lens.member.spans
    assert (serve.kind, serve.role) == (SpanKind.SERVE, NOBODY)


def test_the_script_computes_between_its_waits() -> None:
    lens, core, _ = member()
    asked(lens, core)
    lens.tracer.waited(100, 200)
    lens.tracer.waited(500, 600)
    assert lens.member.spans == [
        TimeSpan(SpanKind.WAIT, NOBODY, 0, 100, 100),
        TimeSpan(SpanKind.COMPUTE, NOBODY, 0, 200, 300),
        TimeSpan(SpanKind.WAIT, NOBODY, 0, 500, 100),
    ]


# --- the scheduler ----------------------------------------------------------------------------------


def scheduler(**options: bool) -> tuple[SchedulerLens, Core]:
    clock = Clock()
    tracer = Tracer(TracedMember("gpu-0", 1), Role.SCHEDULER, Encoding(), clock)
    lens, core = SchedulerLens(tracer, lambda: 1.7e9, **options), Core(clock)
    lens.connect(core, core.perform)
    return lens, core


def answers(core: Core, door: None) -> list[Message]:
    return [effect.packet.message for effect in said(core, door) if isinstance(effect, Send)]


@pytest.mark.spec("R340", "R341", "R342")
def test_a_whole_trace() -> None:
    lens, core = scheduler()
    theirs, their_core, _ = member()
    operator = Envelope(bytes(16), 0, Role.WORKER, 0, 0, 1)
    lens.own.packet(b"w", Packet(WORKER, p.Beat(1)), 0.5)
    tracing, ask = answers(core, lens.own.packet(b"op", Packet(operator, p.Trace(7, 2.0)), 1.0))
    assert isinstance(tracing, p.Tracing)
    assert isinstance(ask, p.AskClock)
    (answer,) = answers(their_core, theirs.own.packet("scheduler", Packet(SCHEDULER, ask), 1.1))
    assert said(core, lens.own.packet(b"w", Packet(WORKER, answer), 1.2)) == []
    theirs.tracer.waited(10**9, 10**9 + 5000)
    (sent,) = said(their_core, theirs.tick(1.3))
    assert isinstance(sent, Send)
    assert said(core, lens.own.packet(b"w", sent.packet, 1.4)) == []
    lens.own.packet(b"w", Packet(WORKER, p.Beat(2)), 1.5)
    assert lens.due is not None
    lens.tick(3.1)
    assert not lens.tracer.is_on
    (done,) = answers(core, lens.own.packet(b"op", Packet(operator, p.Trace(7, 2.0)), 4.6))
    assert isinstance(done, p.Tracing)
    assert (done.left_s, done.parts) == (0.0, 2)
    parts = []
    for number in range(2):
        fetch = Packet(numbered(operator, 1 + number), p.Fetch(7, number))
        (effect,) = said(core, lens.own.packet(b"op", fetch, 4.7))
        assert isinstance(effect, Send)
        assert effect.packet.envelope.job == bytes(16)
        assert isinstance(effect.packet.message, p.Part)
        parts.append((effect.packet.message, b"".join(effect.packet.payload)))
    trace = merge(parts)
    assert {process.name for process in trace.processes} == {"scheduler", "worker 1"}
    assert core.heard == ["Beat", "Beat"], "no core hears of traces"


@pytest.mark.spec("R340")
def test_a_refusal_is_told_to_the_operator() -> None:
    lens, core = scheduler()
    operator = Envelope(bytes(16), 0, Role.WORKER, 0, 0, 4)
    (error,) = answers(core, lens.own.packet(b"op", Packet(operator, p.Fetch(7, 0)), 1.0))
    assert isinstance(error, p.Error)
    assert error.seq == 4
    (note,) = said(core, lens.own.packet(b"op", Packet(operator, p.AskClock(7, 0)), 1.0))
    assert isinstance(note, Note)


def test_a_timeline_is_recorded_from_the_start() -> None:
    lens, core = scheduler(from_start=True)
    assert lens.due == 0.0
    lens.tick(1.0)
    assert lens.tracer.is_on
    lens.own.packet(b"w", Packet(WORKER, p.Beat(1)), 1e6)
    assert [type(message) for message in answers(core, lens.tick(1e6))] == [p.AskClock]
    ((part, octets),) = parts_of(lens, 1e6 + 1)
    assert (part.role, part.count) == (Role.SCHEDULER, len(octets) // 48)
