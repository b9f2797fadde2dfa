"""An inquiry: one request to the scheduler, repeated until it is answered or given up."""

from dataclasses import replace

import pytest

from kvps.core.effects import Connect, Effect, Exit, Note, Send
from kvps.core.inquiry import ASK_AGAIN_S, Inquiry
from kvps.errors import SchedulerLost, Unauthorized
from kvps.protocol.envelope import Answer, Envelope, Message, Packet, Role
from kvps.protocol.membership import Done, Error, Evict, Look, Seen, Stop
from tests.support.effects import taken

AT = "tcp://127.0.0.1:9091"
SEEN = Seen(1, "running", "going on", (), ())
SCHEDULER = Envelope(bytes(range(16)), 0, Role.SCHEDULER, 0, 0, 0)
SILENT = f"no answer from the scheduler at {AT} for 5 s. Check that kvps-scheduler runs, and that "


def begun(request: Message, answer: type[Answer]) -> Inquiry:
    inquiry = Inquiry(AT, request, answer, 100.0, 5.0)
    connect, ask = taken(inquiry, inquiry.start(100.0))
    assert connect == Connect("scheduler", AT)
    assert is_asking(ask, request)
    return inquiry


def is_asking(effect: Effect, request: Message) -> bool:
    return isinstance(effect, Send) and (effect.to, effect.packet.message) == ("scheduler", request)


def hear(inquiry: Inquiry, message: Message) -> list[Effect]:
    assert inquiry.admit("scheduler", SCHEDULER, type(message))
    return taken(inquiry, inquiry.on_packet("scheduler", Packet(SCHEDULER, message), 101.0))


@pytest.mark.parametrize(("request_", "answer"), [(Look(), SEEN), (Evict(2, 3), Done(1))])
def test_answer_ends_the_inquiry(request_: Message, answer: Answer) -> None:
    inquiry = begun(request_, type(answer))
    assert hear(inquiry, answer) == [Exit(0, "answered")]
    assert inquiry.answer == Packet(SCHEDULER, answer)


def test_inquiry_is_repeated_and_given_up() -> None:
    inquiry = begun(Look(), Seen)
    effects: list[Effect] = []
    assert taken(inquiry, inquiry.on_drop("scheduler", 100.0)) == []
    assert taken(inquiry, inquiry.on_failure("scheduler", SCHEDULER, ValueError(), 100.0)) == []
    assert inquiry.deadline() == 100.0 + ASK_AGAIN_S
    while not any(isinstance(effect, Exit) for effect in effects):
        effects += taken(inquiry, inquiry.on_timer(inquiry.deadline()))
    assert [is_asking(effect, Look()) for effect in effects] == [True] * 9 + [False]
    end = effects[-1]
    assert isinstance(end, Exit)
    assert (end.code, end.reason) == (75, str(inquiry.error))
    assert end.reason.startswith(SILENT)
    assert end.reason.endswith("'kvps doctor' finds out why")
    assert isinstance(inquiry.error, SchedulerLost)
    assert inquiry.answer is None
    assert taken(inquiry, inquiry.on_timer(100.1)) == [], "it is not time yet"


def test_the_job_is_over() -> None:
    inquiry = begun(Evict(2, 3), Done)
    assert hear(inquiry, Stop(0, "every worker left")) == [Exit(75, "the job is over: every worker left")]
    assert isinstance(inquiry.error, SchedulerLost)


def test_refusal_ends_the_inquiry() -> None:
    inquiry = begun(Look(), Seen)
    assert hear(inquiry, Error(1, Unauthorized.code, "no such key")) == [Exit(1, "no such key")]
    assert isinstance(inquiry.error, Unauthorized)


def test_the_second_answer_to_the_request_before_is_none() -> None:
    inquiry = Inquiry(AT, Look(), Seen, 100.0, 5.0, seq=2)
    _, ask = taken(inquiry, inquiry.start(100.0))
    assert isinstance(ask, Send)
    assert ask.packet.envelope.seq == 2
    (note,) = hear(inquiry, SEEN)
    assert isinstance(note, Note)
    assert inquiry.answer is None
    assert hear(inquiry, replace(SEEN, seq=2)) == [Exit(0, "answered")]
