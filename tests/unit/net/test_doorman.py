"""Frames are judged by their envelope, and decoded only then."""

import logging

import pytest
import zmq

from kvps import protocol as m
from kvps.core.limits import TABLE
from kvps.errors import Fenced, ProtocolError
from kvps.net.doorman import IGNORED_S, KEPT_MAX, WITHIN_S, Doorman, Misbehaviour
from kvps.net.transport import Refused
from kvps.protocol import wire
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from tests.vectors.packets import PACKETS

BEAT = PACKETS["BEAT"]
ROUTE = b"\0somebody"


class Door(Doorman):
    """A scheduler's, with a clock that the test turns, and a core that does as it is told."""

    def __init__(self, role: Role = Role.SCHEDULER) -> None:
        super().__init__(role, lambda: self.now)
        self.now = 0.0
        self.asked: list[type[Message]] = []
        self.answer: bool | Exception = True
        self.admit = self._admit

    def _admit(self, route: str | bytes, envelope: Envelope, kind: type[Message]) -> bool:
        self.asked.append(kind)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def take(self, packet: Packet | bytes, route: str | bytes = ROUTE) -> Packet | None:
        frames = [packet] if isinstance(packet, bytes) else wire.encode(packet)
        return self.decode(route, [memoryview(frame) for frame in frames], zmq.Frame())


def test_permitted_message_is_decoded() -> None:
    assert Door().take(BEAT) == BEAT


@pytest.mark.spec("R240")
def test_message_of_another_role_is_refused_before_the_core_is_asked() -> None:
    door = Door()
    with pytest.raises(Refused) as caught:
        door.take(PACKETS["FOUND-ALL"])
    assert "a server may not send FoundAll to a scheduler" in str(caught.value.__cause__)
    assert caught.value.route == ROUTE
    assert (door.asked, door.counts) == ([], {"refused": 1})


@pytest.mark.spec("R240")
def test_nothing_is_decoded_that_is_not_admitted() -> None:
    door = Door()
    head = bytes(wire.encode(BEAT)[0][: wire.HEAD.size]) + b"\xc1 no fields"
    door.answer = False
    assert door.take(head) is None
    assert (door.asked, door.counts) == ([m.Beat], {"unheard": 1})
    door.answer = True
    with pytest.raises(ProtocolError, match=r"not msgpack.* \(from an unknown host\)"):
        door.take(head)


@pytest.mark.spec("R240")
def test_refusal_of_the_core_is_told_and_an_ignored_packet_is_not() -> None:
    door = Door()
    door.answer = Fenced("you were replaced")
    with pytest.raises(Refused) as caught:
        door.take(BEAT)
    assert caught.value.__cause__ is door.answer
    door.answer = False
    assert door.take(BEAT) is None
    assert door.counts == {"refused": 1, "unheard": 1}


def test_an_answer_that_is_none_is_dropped() -> None:
    door = Door(Role.WORKER)
    answer = PACKETS["DONE"]._replace(message=m.Done(1))
    assert door.take(answer, "server 0") == answer
    with pytest.raises(ProtocolError, match=r"may not send Done to a member \(from scheduler\)"):
        door.take(answer, "scheduler")
    with pytest.raises(ProtocolError, match="may not send Done to a client of a worker"):
        door.take(answer, "worker 1")


@pytest.mark.spec("R244")
def test_connection_with_many_errors_is_ignored_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    door = Door()
    caplog.set_level(logging.WARNING)
    for _ in range(TABLE["refused"].default):
        with pytest.raises(ProtocolError, match="from an unknown host"):
            door.take(b"nonsense")
    assert door.take(BEAT) is None
    assert door.take(BEAT, b"\0another") == BEAT
    (line,) = caplog.messages
    assert "100 packets of one connection" in line
    door.now = IGNORED_S
    assert door.take(BEAT) == BEAT
    assert door.counts == {"bytes": TABLE["refused"].default, "ignored connections": 1, "ignored": 1}


def test_own_connections_are_never_ignored() -> None:
    door = Door()
    for _ in range(TABLE["refused"].default + 1):
        with pytest.raises(ProtocolError):
            door.take(b"nonsense", "scheduler")


# --- who sends much that is refused is not heard for a while --------------------------------------


REFUSED_MAX = TABLE["refused"].default


@pytest.mark.spec("R244")
def test_a_hundred_in_ten_seconds_are_too_many() -> None:
    misbehaviour = Misbehaviour()
    assert not any(misbehaviour.refused(b"a", number / 100) for number in range(REFUSED_MAX - 1))
    assert not misbehaviour.is_ignored(b"a", 1.0)
    assert misbehaviour.refused(b"a", 1.0)
    assert misbehaviour.is_ignored(b"a", 1.0 + IGNORED_S - 0.1)
    assert not misbehaviour.is_ignored(b"b", 1.0)
    assert not misbehaviour.is_ignored(b"a", 1.0 + IGNORED_S)
    assert not misbehaviour.refused(b"a", 1.0 + IGNORED_S), "the count begins anew"


def test_a_few_now_and_then_are_not() -> None:
    misbehaviour = Misbehaviour()
    for span in range(5):
        assert not any(misbehaviour.refused(b"a", span * WITHIN_S) for _ in range(REFUSED_MAX - 1))


def test_oldest_refusals_are_forgotten() -> None:
    misbehaviour = Misbehaviour()
    for _ in range(REFUSED_MAX):
        misbehaviour.refused(b"a", 0.0)
    for number in range(KEPT_MAX):
        misbehaviour.refused(number.to_bytes(4, "big"), 0.0)
    assert not misbehaviour.is_ignored(b"a", 0.0)
