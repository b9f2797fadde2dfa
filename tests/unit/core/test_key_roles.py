"""The connections that are accepted, and their names."""

import pytest

from kvps.core.key_roles import Allow, Keyring, Refusal, RoleKey, is_key
from tests.vectors.packets import KEY

NULL, CURVE = "NULL", "CURVE"
OTHER = KEY[::-1]


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
def test_key_ring_decides_by_mechanism_address_and_key(
    mechanism: str, address: str, key: str, verdict: Allow | Refusal
) -> None:
    assert ring().decide(mechanism, address, key, 49.9) == verdict


def test_a_key_that_has_ended_opens_nothing() -> None:
    assert ring().decide(CURVE, "10.0.0.1", "u" * 40, 50.0) is Refusal.NEVER


@pytest.mark.spec("R245")
def test_key_ring_that_learns_keys_answers_not_yet() -> None:
    keyring = ring(learns=True)
    assert keyring.decide(CURVE, "10.0.0.1", OTHER, 0.0) is Refusal.NOT_YET
    keyring.sessions = {OTHER: "worker:3:18"}
    assert keyring.decide(CURVE, "10.0.0.1", OTHER, 0.0) == Allow("worker:3:18")
    assert keyring.decide(CURVE, "10.0.0.1", KEY, 0.0) is Refusal.NOT_YET, "a replaced one"
    assert keyring.decide(NULL, "10.0.0.1", "", 0.0) is Refusal.NEVER


def test_keys() -> None:
    assert is_key(KEY)
    assert not is_key(KEY[1:])
    assert not is_key("ü" * 40)
    assert not is_key(" " * 40)
    assert not is_key("\0" * 40)
