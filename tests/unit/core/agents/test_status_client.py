"""One who looks at a job: asks until it is answered, or gives up."""

from __future__ import annotations

from kvps.core.agents.status_client import StatusClient
from kvps.core.effects import Connect, Effect, Exit, Note, Send
from kvps.errors import ProtocolError, Unauthorized
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.protocol.membership import Beat, Error, Look, Seen, Stop

AT = "tcp://127.0.0.1:9091"
SEEN = Seen(1, "running", "going on", (), ())
JOB = bytes(range(16))


def looker() -> StatusClient:
    one = StatusClient(AT, 100.0, 5.0)
    connect, ask = one.start(100.0)
    assert connect == Connect("scheduler", AT)
    assert asks([ask]) == 1
    return one


def asks(effects: list[Effect]) -> int:
    sends = [one for one in effects if isinstance(one, Send)]
    assert all(one.to == "scheduler" and one.packet.message == Look() for one in sends)
    return len(sends)


def hear(one: StatusClient, message: Message) -> list[Effect]:
    envelope = Envelope(JOB, 0, Role.SCHEDULER, 0, 0, 0)
    return list(one.on_packet("scheduler", Packet(envelope, message), 101.0))


def test_is_done_when_it_has_seen() -> None:
    one = looker()
    assert hear(one, SEEN) == [Exit(0, "seen")]
    assert (one.seen, one.job) == (SEEN, JOB)


def test_asks_again_and_gives_up() -> None:
    one, effects = looker(), []
    assert list(one.on_drop("scheduler", 100.0)) == []
    while not any(isinstance(effect, Exit) for effect in effects):
        effects += one.on_timer(one.deadline())
    assert asks(effects[:-1]) == 9
    text = "no answer from the scheduler at tcp://127.0.0.1:9091 for 5 s"
    assert effects[-1] == Exit(75, text)
    assert one.error == text
    assert list(one.on_timer(100.1)) == [], "it is not time yet"


def test_what_else_it_may_hear() -> None:
    assert hear(looker(), Stop(0, "every worker left")) == [
        Exit(75, "the job is over: every worker left")
    ]
    assert hear(looker(), Error(1, ProtocolError.code, "what is that?")) == [
        Exit(1, "what is that?")
    ]
    (note,) = hear(looker(), Beat(0))
    assert isinstance(note, Note)


def test_it_keeps_what_was_said_against_it() -> None:
    one = looker()
    assert one.refusal is None
    hear(one, Error(0, Unauthorized.code, "no key"))
    assert isinstance(one.refusal, Unauthorized)
    assert one.admit("scheduler", Envelope(JOB, 0, Role.SCHEDULER, 0, 0, 0), Seen)
