"""Whose connections are taken, asked by libzmq itself; and what failed handshakes mean."""

import logging
import socket
import threading
from collections.abc import Iterator

import pytest
import zmq

from kvps.core.key_roles import Keyring, RoleKey
from kvps.net import zap
from kvps.net.zap import (
    DOMAIN,
    FAILURES_MAX,
    OTHER_MECHANISM,
    WAITS_MAX_S,
    Handshakes,
    KeyPair,
    Keys,
    Porter,
    greeting_of,
    new_pair,
)

ENDPOINT = "tcp://127.0.0.1:9"
NO_DETAIL = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Door:
    """A listener with keys, who comes there, and a clock that the test turns."""

    def __init__(self, *, learns: bool) -> None:
        self.now = 0.0
        self.dealers: list[zmq.Socket[bytes]] = []
        self.role, self.session, self.own = new_pair(), new_pair(), new_pair()
        self.context = zmq.Context()
        ring = Keyring({self.role.public: RoleKey("worker")}, learns)
        self.porter = Porter(self.context, ring, lambda: self.now)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        self.router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.router.setsockopt(zmq.CURVE_SERVER, 1)
        self.router.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret.encode())
        self.router.bind("tcp://127.0.0.1:0")
        self.endpoint = self.router.getsockopt_string(zmq.LAST_ENDPOINT)

    def come(self, pair: KeyPair) -> None:
        """Connect by this key, say something, and have the handler answer libzmq."""
        self.knock(pair)
        assert self.porter.socket.poll(10_000), "libzmq asks"
        self.porter.answer()

    def knock(self, pair: KeyPair) -> None:
        """Connect by this key, and say something."""
        dealer = self.context.socket(zmq.DEALER)
        self.dealers.append(dealer)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, self.own.public.encode())
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
        dealer.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        dealer.connect(self.endpoint)
        dealer.send(b"hello")

    def heard(self, limit_ms: int = 10_000) -> str | None:
        """Return the name of the connection along which something comes."""
        if not self.router.poll(limit_ms):
            return None
        return str(self.router.recv_multipart(copy=False)[1].get("User-Id"))


@pytest.fixture(params=[False, True], ids=["scheduler", "server"])
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    item = Door(learns=request.param)
    yield item
    item.context.destroy(0)


@pytest.mark.spec("R245")
def test_a_known_key_gives_the_connection_its_name(door: Door) -> None:
    door.come(door.role)
    assert door.heard() == "role:worker"
    door.porter.trust({door.session.public: "worker:3:17"})
    door.come(door.session)
    assert door.heard() == "worker:3:17"


@pytest.mark.spec("R245")
def test_nobody_is_let_in_where_nothing_answers_libzmq(door: Door) -> None:
    """ZAP_ENFORCE_DOMAIN: without it, libzmq takes every connection when its question finds no handler."""
    monitor = door.router.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    door.porter.socket.unbind(zap.ENDPOINT)
    door.knock(door.role)
    assert monitor.poll(10_000), "the handshake fails"
    assert door.heard(100) is None


@pytest.mark.spec("R245")
def test_an_unknown_key_is_refused_and_told_of_once(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        door.come(new_pair())
    door.now += WAITS_MAX_S
    door.porter.look()
    assert door.heard(200) is None
    assert door.porter.refused == {"unknown_key": 3}
    (line,) = caplog.messages
    assert "refused a connection from 127.0.0.1" in line


@pytest.mark.spec("R245")
def test_a_server_waits_for_the_view_that_names_a_key() -> None:
    door = Door(learns=True)
    door.come(door.session)
    assert door.porter.waiting[0].until == WAITS_MAX_S
    door.porter.look()
    assert door.heard(100) is None
    door.porter.trust({door.session.public: "worker:0:1"})
    assert door.heard() == "worker:0:1"
    assert not door.porter.waiting
    door.context.destroy(0)


def test_waiting_handshakes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zap, "WAITING_MAX", 1)
    door = Door(learns=True)
    door.come(new_pair())
    door.come(new_pair())
    assert door.porter.refused == {"unknown_key": 1}
    door.context.destroy(0)


def test_keys_need_a_libzmq_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zap, "LIBZMQ_LEAST", (99, 0, 0))
    with pytest.raises(zap.ConfigError, match=r"keys need libzmq 99\.0\.0 or later"):
        new_pair()


class TestHandshakes:
    KEYS = Keys(("a" * 40, "b" * 40), KeyPair("c" * 40, "d" * 40), KeyPair("e" * 40, "f" * 40))

    @pytest.mark.spec("R245")
    def test_a_key_that_is_not_known(self) -> None:
        event = zmq.EVENT_HANDSHAKE_FAILED_AUTH
        is_turned, why = Handshakes(self.KEYS).failed(ENDPOINT, event, 400, 0.0)
        assert not is_turned
        assert "does not know the key of this process" in why
        assert Handshakes(self.KEYS).failed(ENDPOINT, event, 300, 9.0) == (False, "")

    @pytest.mark.spec("R245")
    def test_handshake_without_keys_on_a_side_says_so(self) -> None:
        event = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        for keys, says in ((None, "and this process has none"), (self.KEYS, "has none: start the scheduler")):
            assert says in Handshakes(keys).failed(ENDPOINT, event, OTHER_MECHANISM, 0.0)[1]

    @pytest.mark.spec("R245")
    def test_another_scheduler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zap, "greeting_of", lambda endpoint: b"CURVE")
        handshakes = Handshakes(self.KEYS)
        answers = [handshakes.failed(ENDPOINT, NO_DETAIL, 32, 0.01) for _ in range(2 * FAILURES_MAX)]
        assert [answer[0] for answer in answers].index(True) == FAILURES_MAX - 1, "the other key"
        assert [bool(answer[1]) for answer in answers] == [False] * (2 * FAILURES_MAX - 1) + [True]
        assert "is not the scheduler whose public key" in answers[-1][1]

    def test_a_relay_and_one_that_stands_still_are_no_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handshakes = Handshakes(self.KEYS)
        for _ in range(9):
            assert handshakes.failed(ENDPOINT, NO_DETAIL, 32, 0.01) == (False, ""), "nobody greets there"
        monkeypatch.setattr(zap, "greeting_of", lambda endpoint: b"CURVE")
        for _ in range(9):
            assert handshakes.failed(ENDPOINT, NO_DETAIL, 11, 5.0) == (False, ""), "it was slow"
        handshakes.succeeded("scheduler")
        assert handshakes.failed(ENDPOINT, NO_DETAIL, 32, 0.01) == (False, "")

    @pytest.mark.spec("R245")
    @pytest.mark.parametrize("mechanism", [b"NULL", b"CURVE"])
    def test_early_hangup_is_blamed_on_keys_only_across_mechanisms(
        self, monkeypatch: pytest.MonkeyPatch, mechanism: bytes
    ) -> None:
        monkeypatch.setattr(zap, "greeting_of", lambda endpoint: mechanism)
        for keys in (None, self.KEYS):
            _, why = Handshakes(keys).failed(ENDPOINT, NO_DETAIL, 104, 0.0)
            is_alike = (mechanism == b"CURVE") == (keys is not None)
            assert is_alike == (why == "")


def test_how_who_listens_greets(door: Door) -> None:
    assert greeting_of(door.endpoint) == b"CURVE"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = threading.Thread(target=lambda: listener.accept()[0].close())
        relay.start()
        assert not greeting_of(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        relay.join()
    assert not greeting_of("tcp://127.0.0.1:nonsense")


def test_secrets_are_not_shown() -> None:
    pair = new_pair()
    assert pair.secret not in repr(Keys(("a" * 40,), pair))
