"""Whose connections are taken, and what may be said along each."""

from __future__ import annotations

import pytest

from kvps import protocol as m
from kvps.core.keys import (
    Allow,
    Keyring,
    Refusal,
    RoleKey,
    check_name,
    is_key,
    name_of,
)
from kvps.errors import Unauthorized
from kvps.protocol.envelope import Envelope, Message, Node, Role
from kvps.protocol.permissions import Place
from tests.vectors.packets import KEY

NULL, CURVE = "NULL", "CURVE"
OTHER = KEY[::-1]
WORKER = Node(Role.WORKER, 3)


def ring(*, learns: bool = False) -> Keyring:
    roles = {"r" * 40: RoleKey("worker"), "u" * 40: RoleKey("server", until=50.0)}
    return Keyring(1000, roles, learns, {KEY: "worker:3:17"})


@pytest.mark.spec("R245", "R248")
@pytest.mark.parametrize(
    ("mechanism", "address", "key", "verdict"),
    [
        (CURVE, "10.0.0.1", KEY, Allow("worker:3:17")),
        (CURVE, "10.0.0.1", "r" * 40, Allow("role:worker")),
        (CURVE, "10.0.0.1", "u" * 40, Allow("role:server")),
        (CURVE, "10.0.0.1", OTHER, Refusal.NEVER),
        (CURVE, "10.0.0.1", "", Refusal.NEVER),
        ("PLAIN", "10.0.0.1", KEY, Refusal.NEVER),
        (NULL, "10.0.0.1", "", Refusal.NEVER),
        (NULL, "host:1000:100:77", "", Allow("user:1000")),
        (NULL, "host:1001:1000:77", "", Refusal.NEVER),
        (NULL, "fe80::1:1000:1", "", Refusal.NEVER),
        (NULL, "", "", Refusal.NEVER),
    ],
)
def test_whose_connections_are_taken(
    mechanism: str, address: str, key: str, verdict: Allow | Refusal
) -> None:
    assert ring().decide(mechanism, address, key, 49.9) == verdict


def test_a_key_that_has_ended_opens_nothing() -> None:
    assert ring().decide(CURVE, "10.0.0.1", "u" * 40, 50.0) is Refusal.NEVER


@pytest.mark.spec("R245")
def test_who_learns_keys_says_not_yet() -> None:
    one = ring(learns=True)
    assert one.decide(CURVE, "10.0.0.1", OTHER, 0.0) is Refusal.NOT_YET
    one.sessions = {OTHER: "worker:3:18"}
    assert one.decide(CURVE, "10.0.0.1", OTHER, 0.0) == Allow("worker:3:18")
    assert one.decide(CURVE, "10.0.0.1", KEY, 0.0) is Refusal.NOT_YET, "a replaced one"
    assert one.decide(NULL, "10.0.0.1", "", 0.0) is Refusal.NEVER


def envelope(role: Role = Role.WORKER, rank: int = 3, life: int = 17) -> Envelope:
    return Envelope(bytes(16), 0, role, rank, life, 1)


@pytest.mark.spec("R246")
@pytest.mark.parametrize(
    ("name", "place", "said", "kind"),
    [
        ("worker:3:17", Place.SCHEDULER, envelope(), m.Beat),
        ("worker:3:17", Place.SERVER, envelope(), m.Push),
        ("role:worker", Place.SCHEDULER, envelope(rank=0, life=0), m.Hello),
        ("role:worker", Place.SCHEDULER, envelope(rank=0, life=0), m.Enrol),
        ("role:worker", Place.SCHEDULER, envelope(rank=0, life=0), m.Rendezvous),
        ("role:server", Place.SCHEDULER, envelope(Role.SERVER, 0, 0), m.Hello),
        ("role:look", Place.SCHEDULER, envelope(rank=0, life=0), m.Look),
        ("role:admin", Place.SCHEDULER, envelope(rank=0, life=0), m.Look),
        ("role:admin", Place.SCHEDULER, envelope(rank=0, life=0), m.Evict),
        ("user:1000", Place.WORKER, envelope(rank=9, life=1), m.Push),
        ("user:1000", Place.SERVER, envelope(rank=9, life=1), m.Push),
    ],
)
def test_what_may_be_said(name: str, place: Place, said: Envelope, kind: type[Message]) -> None:
    check_name(name, place, said, kind)


@pytest.mark.spec("R246")
@pytest.mark.parametrize(
    ("name", "place", "said", "kind"),
    [
        ("worker:3:17", Place.SCHEDULER, envelope(rank=0), m.Beat),
        ("worker:3:17", Place.SCHEDULER, envelope(Role.SERVER), m.Beat),
        ("worker:3:17", Place.SERVER, envelope(life=18), m.Push),
        ("worker:3:17", Place.SCHEDULER, envelope(life=0), m.Hello),
        ("worker:3:17", Place.SCHEDULER, envelope(), m.Enrol),
        ("worker:3:17", Place.SCHEDULER, envelope(), m.Evict),
        ("worker:3:17", Place.SCHEDULER, envelope(), m.Rendezvous),
        ("role:server", Place.SCHEDULER, envelope(life=0), m.Rendezvous),
        ("role:look", Place.SCHEDULER, envelope(life=0), m.Rendezvous),
        ("role:admin", Place.SCHEDULER, envelope(life=0), m.Rendezvous),
        ("role:look", Place.SCHEDULER, envelope(life=0), m.Evict),
        ("role:worker", Place.SCHEDULER, envelope(life=0), m.Evict),
        ("role:worker", Place.SCHEDULER, envelope(), m.Hello),
        ("role:worker", Place.SCHEDULER, envelope(life=0), m.Beat),
        ("role:worker", Place.SCHEDULER, envelope(Role.SERVER, life=0), m.Hello),
        ("role:worker", Place.SERVER, envelope(life=0), m.Hello),
        ("role:look", Place.SCHEDULER, envelope(life=0), m.Hello),
        ("role:scheduler", Place.SCHEDULER, envelope(life=0), m.Look),
        ("user:1000", Place.SCHEDULER, envelope(), m.Beat),
        ("nobody", Place.SERVER, envelope(), m.Push),
    ],
)
def test_what_may_not(name: str, place: Place, said: Envelope, kind: type[Message]) -> None:
    with pytest.raises(Unauthorized):
        check_name(name, place, said, kind)


def test_names() -> None:
    assert name_of(WORKER, 17) == "worker:3:17"
    assert is_key(KEY)
    assert not is_key(KEY[1:])
    assert not is_key("ü" * 40)
    assert not is_key(" " * 40)
    assert not is_key("\0" * 40)
