"""The connections that are accepted, and their names."""

import pytest

from kvps.core.key_roles import Allow, Keyring, Refusal, RoleKey, is_key
from tests.vectors.packets import KEY

OTHER = KEY[::-1]


def ring(*, learns: bool = False) -> Keyring:
    roles = {"r" * 40: RoleKey("worker"), "u" * 40: RoleKey("server", until=50.0)}
    return Keyring(roles, learns, {KEY: "worker:3:17"})


@pytest.mark.spec("R245")
@pytest.mark.parametrize(
    ("key", "verdict"),
    [
        (KEY, Allow("worker:3:17")),
        ("r" * 40, Allow("role:worker")),
        ("u" * 40, Allow("role:server")),
        (OTHER, Refusal.NEVER),
        ("", Refusal.NEVER),
    ],
)
def test_key_ring_decides_by_key(key: str, verdict: Allow | Refusal) -> None:
    assert ring().decide(key, 49.9) == verdict


def test_a_key_that_has_ended_opens_nothing() -> None:
    assert ring().decide("u" * 40, 50.0) is Refusal.NEVER


@pytest.mark.spec("R245")
def test_key_ring_that_learns_keys_answers_not_yet() -> None:
    keyring = ring(learns=True)
    assert keyring.decide(OTHER, 0.0) is Refusal.NOT_YET
    keyring.sessions = {OTHER: "worker:3:18"}
    assert keyring.decide(OTHER, 0.0) == Allow("worker:3:18")
    assert keyring.decide(KEY, 0.0) is Refusal.NOT_YET, "a replaced one"
    assert keyring.decide("", 0.0) is Refusal.NEVER


def test_keys() -> None:
    assert is_key(KEY)
    assert not is_key(KEY[1:])
    assert not is_key("ü" * 40)
    assert not is_key(" " * 40)
    assert not is_key("\0" * 40)
