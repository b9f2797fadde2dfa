"""A relay: it gives what came, tells readers to wait for what is on its way, and refuses all else."""

import pytest

from kvps import protocol as p
from kvps.core import relay
from kvps.core.effects import Effect, Exit, Send
from kvps.core.relay import KEPT_S, Relay, range_of
from kvps.errors import BY_CODE, KeyNotFound
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from tests.support.effects import taken

OCTETS = memoryview(b"abcdefgh")


class Stage:
    """A relay that reads version 3, and a test that is the other readers."""

    def __init__(self) -> None:
        self.core = Relay(Envelope(bytes(16), 0, Role.READER, 1, 2, 0))
        self.core.on_version("policy", 3, 0.0)

    def ask(self, start: int = 0, seq: int = 1, route: bytes = b"r", number: int = 3) -> list[Message]:
        read = p.Read("policy", number, 5, start, 8, server=1)
        packet = Packet(Envelope(bytes(16), 0, Role.READER, 9, 9, seq), read)
        return said(taken(self.core, self.core.on_packet(route, packet, 1.0)))

    def comes(self, start: int = 0) -> list[Message]:
        place = range_of(1, p.Read("policy", 3, 5, start, 8))
        return said(taken(self.core, self.core.on_range(place, OCTETS, 1.0)))


def said(effects: list[Effect]) -> list[Message]:
    return [effect.packet.message for effect in effects if isinstance(effect, Send)]


def is_refused(messages: list[Message]) -> bool:
    (message,) = messages
    return isinstance(message, p.Error) and BY_CODE[message.code] is KeyNotFound


@pytest.mark.spec("R590")
def test_ranges_are_given_once_they_have_come() -> None:
    stage = Stage()
    assert stage.ask(seq=4) == [p.Elsewhere(4)]
    assert stage.ask(seq=4) == [p.Elsewhere(4)], "again"
    assert stage.ask(seq=7, route=b"other") == [p.Elsewhere(7)]
    assert stage.comes() == [p.Octets(4, 8), p.Octets(7, 8)]
    assert stage.comes() == []
    assert stage.ask(seq=4) == [p.Elsewhere(4)], "they are on their way"
    assert stage.ask(seq=5) == [p.Octets(5, 8)]


@pytest.mark.spec("R590")
def test_other_versions_and_what_does_not_come_are_refused() -> None:
    stage = Stage()
    stage.comes()
    assert is_refused(stage.ask(number=2))
    assert stage.ask(8) == [p.Elsewhere(1)]
    assert is_refused(said(taken(stage.core, stage.core.on_version("policy", 0, 2.0))))
    assert is_refused(stage.ask(8))
    assert stage.ask(seq=2) == [p.Octets(2, 8)], "what has come stays"
    stage.core.on_version("policy", 4, 2.0)
    assert is_refused(stage.ask(seq=3)), "until another version is read"


@pytest.mark.spec("R590")
def test_memory_and_waiting_requests_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "KEPT_BYTES_MAX", 16)
    monkeypatch.setattr(relay, "WAITING_MAX", 1)
    stage = Stage()
    assert stage.core.deadline() is None
    for start in (0, 8, 16):
        stage.comes(start)
    assert stage.ask(16) == [p.Octets(1, 8)]
    assert is_refused(stage.ask(0, seq=2)), "it came longest ago, and comes no more"
    assert stage.ask(24, seq=3) == [p.Elsewhere(3)]
    assert is_refused(stage.ask(32, seq=4))
    assert stage.core.deadline() == 1.0 + KEPT_S
    stage.core.on_timer(1.0 + KEPT_S)
    assert stage.core.deadline() is None
    assert is_refused(stage.ask(16, seq=5)), "nobody had asked"
    assert is_refused(said(taken(stage.core, stage.core.on_version("policy", 4, 20.0))))
    assert stage.ask(16, seq=6, number=4) == [p.Elsewhere(6)], "of this version it is yet to come"


@pytest.mark.spec("R590")
def test_readers_that_wait_for_one_range_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "WAITERS_MAX", 2)
    stage = Stage()
    said = [stage.ask(route=b"%d" % number) for number in range(3)]
    assert said[:2] == [[p.Elsewhere(1)]] * 2
    assert is_refused(said[2])


@pytest.mark.spec("R590")
def test_readers_that_do_not_read_keep_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "AWAY_BYTES_MAX", 16)
    stage = Stage()
    stage.comes()
    packet = Packet(Envelope(bytes(16), 0, Role.READER, 9, 9, 1), p.Read("policy", 3, 5, 0, 8, server=1))
    (first,) = taken(stage.core, stage.core.on_packet(b"r", packet, 1.0))
    assert stage.ask(seq=2) == [p.Octets(2, 8)]
    assert is_refused(stage.ask(seq=3))
    assert isinstance(first, Send)
    assert first.hold is not None
    first.hold.release()
    assert stage.ask(seq=3) == [p.Octets(3, 8)]


def test_requests_that_were_answered_are_forgotten_where_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "GIVEN_MAX", 2)
    stage = Stage()
    stage.comes()
    assert [stage.ask(seq=seq) for seq in (1, 2, 3)] == [[p.Octets(seq, 8)] for seq in (1, 2, 3)]
    assert stage.ask(seq=1) == [p.Octets(1, 8)]


def test_relay_ends_with_its_reader() -> None:
    stage = Stage()
    (end,) = taken(stage.core, stage.core.on_end(1.0))
    assert isinstance(end, Exit)
