"""The operator of a trace."""

from __future__ import annotations

from kvps.core.agents.trace_inquiry import ASK_AGAIN_S, TraceInquiry
from kvps.core.effects import Connect, Effect, Exit, Note, Send
from kvps.core.membership_client import EXIT_TEMPORARY
from kvps.errors import ConfigError, SchedulerLost
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.protocol.membership import Beat, Error, Stop
from kvps.protocol.tracing import SPAN_BYTES, Fetch, Part, Trace, Tracing

SCHEDULER = Envelope(bytes(16), 0, Role.SCHEDULER, 0, 0, 0)


def begun() -> TraceInquiry:
    one = TraceInquiry("tcp://a:1", 7, 2.0, 0.0, 5.0)
    assert one.admit("scheduler", SCHEDULER, Tracing)
    first, second = one.start(0.0)
    assert first == Connect("scheduler", "tcp://a:1")
    assert message_of(second) == Trace(7, 2.0)
    return one


def message_of(effect: Effect) -> Message:
    assert isinstance(effect, Send)
    return effect.packet.message


def hear(one: TraceInquiry, message: Message, now: float, octets: bytes = b"") -> list[Effect]:
    payload = (memoryview(octets),) if octets else ()
    return list(one.on_packet("scheduler", Packet(SCHEDULER, message, payload), now))


def part(seq: int) -> Part:
    return Part(seq, 2, 0, 1, "gpu-1", 4711, (), 1, 0)


def test_it_waits_for_the_end_and_fetches_part_after_part() -> None:
    one = begun()
    assert hear(one, Tracing(1, 2.0, 0, 0.0, 0), 0.1) == []
    assert one.deadline() == 0.1 + ASK_AGAIN_S
    assert list(one.on_timer(0.3)) == []
    assert [message_of(effect) for effect in one.on_timer(0.6)] == [Trace(7, 2.0)]
    assert [message_of(e) for e in hear(one, Tracing(1, 0.0, 2, 0.0, 0), 2.1)] == [Fetch(7, 0)]
    assert [message_of(effect) for effect in one.on_timer(2.7)] == [Fetch(7, 0)]
    assert [message_of(e) for e in hear(one, part(1), 2.8, bytes(SPAN_BYTES))] == [Fetch(7, 1)]
    assert hear(one, part(1), 2.9, bytes(SPAN_BYTES)) == [], "it came twice"
    (end,) = hear(one, part(2), 3.0, bytes(SPAN_BYTES))
    assert end == Exit(0, "all parts are here")
    assert one.is_complete
    assert len(one.parts) == 2


def test_a_trace_without_parts_is_complete() -> None:
    one = begun()
    assert hear(one, Tracing(1, 0.0, 0, 0.0, 0), 2.1) == [Exit(0, "all parts are here")]


def test_what_ends_it() -> None:
    one = begun()
    (end,) = hear(one, Error(1, ConfigError.code, "another trace is being recorded"), 0.1)
    assert end == Exit(1, "another trace is being recorded")
    assert isinstance(one.error, ConfigError)
    two = begun()
    (end,) = hear(two, Stop(0, "every worker left"), 0.1)
    assert isinstance(end, Exit)
    assert end.code == EXIT_TEMPORARY
    three = begun()
    (end,) = three.on_timer(5.0)
    assert isinstance(end, Exit)
    assert isinstance(three.error, SchedulerLost)
    assert "no answer from the scheduler at tcp://a:1 for 5 s" in end.reason


def test_what_changes_nothing() -> None:
    one = begun()
    (note,) = hear(one, Beat(1), 0.1)
    assert isinstance(note, Note)
    assert list(one.on_drop("scheduler", 0.2)) == []
    assert list(one.on_failure("scheduler", SCHEDULER, ValueError(), 0.2)) == []
