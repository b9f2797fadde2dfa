"""An operator's request: said until it is answered, or given up."""

from __future__ import annotations

import pytest

from kvps.core.agents.operator import ASK_AGAIN_S, Operator
from kvps.core.effects import Connect, Effect, Exit, Note, Send
from kvps.errors import SchedulerLost, Unauthorized
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.protocol.membership import Beat, Done, Error, Evict

REQUEST = Evict(2, 3)
SCHEDULER = Envelope(bytes(16), 0, Role.SCHEDULER, 0, 0, 0)


def asked() -> Operator:
    one = Operator("tcp://sched:1", REQUEST, 100.0, 5.0)
    connect, ask = one.start(100.0)
    assert connect == Connect("scheduler", "tcp://sched:1")
    assert isinstance(ask, Send)
    assert ask.packet.message == REQUEST
    return one


def hear(one: Operator, message: Message) -> list[Effect]:
    assert one.admit("scheduler", SCHEDULER, type(message))
    return list(one.on_packet("scheduler", Packet(SCHEDULER, message), 100.5))


def test_it_is_done() -> None:
    one = asked()
    assert hear(one, Done(1)) == [Exit(0, "done")]
    assert one.error is None


def test_it_is_refused() -> None:
    one = asked()
    assert hear(one, Error(1, Unauthorized.code, "not by this key")) == [Exit(1, "not by this key")]
    assert isinstance(one.error, Unauthorized)


def test_it_is_said_again_and_given_up() -> None:
    one = asked()
    assert one.deadline() == 100.0 + ASK_AGAIN_S
    assert list(one.on_timer(100.5)) == []
    assert len(list(one.on_timer(101.0))) == 1
    (end,) = one.on_timer(105.0)
    assert isinstance(end, Exit)
    assert end.code == 75
    assert isinstance(one.error, SchedulerLost)


@pytest.mark.parametrize("what", ["drop", "failure", "packet"])
def test_what_else_happens(what: str) -> None:
    one = asked()
    if what == "drop":
        assert list(one.on_drop("scheduler", 101.0)) == []
    elif what == "failure":
        assert list(one.on_failure("scheduler", SCHEDULER, ValueError(), 101.0)) == []
    else:
        (note,) = hear(one, Beat(1))
        assert isinstance(note, Note)
