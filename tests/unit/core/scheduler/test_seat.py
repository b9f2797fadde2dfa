"""One seat: the limits, the words it takes, and the view of it."""

import pytest

from kvps.core.scheduler.seat import SEATS_MAX, Claims, Seat, SeatLink, Settings, State
from kvps.errors import ConfigError
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Hello, Leave

LIMITS = Settings(1, 1)


def hello(host: str = "a", pid: int = 7, guardian: bool = False) -> Hello:
    return Hello(1, 0, "kvps", 0, 2, None, host, pid, "", guardian)


def held(guardian: bool = False) -> Seat:
    seat = Seat(Node(Role.WORKER, 0))
    seat.begin(3, hello(guardian=guardian), 10.0)
    seat.check(seat.node, 2)
    return seat


@pytest.mark.parametrize(
    ("workers", "servers", "limits"),
    [
        (0, 1, {}),
        (1, -1, {}),
        (SEATS_MAX, 1, {}),
        (1, 1, {"silence_max_s": 0}),
        (1, 1, {"replace_max_s": float("nan")}),
        (1, 1, {"forming_max_s": -1.0}),
    ],
)
def test_refuses_settings_that_cannot_be(workers: int, servers: int, limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"in all|must be above 0"):
        Settings(workers, servers, **limits)  # type: ignore[arg-type]


def test_silence_and_a_broken_link_have_their_limits() -> None:
    seat = held()
    assert seat.due(LIMITS) == 22.0
    seat.dropped_at = 11.0
    assert seat.due(LIMITS) == 12.0


def test_lost_member_may_still_say_how_it_ended() -> None:
    seat = held()
    seat.lose("silent", 22.0)
    assert seat.leave(Leave(False, 1, True, ""), 23.0)
    assert seat.leave(Leave(False, 1, False, ""), 24.0)
    assert seat.member(32.0).lost_for_s == 10.0
    assert not seat.leave(Leave(True, 0, True, ""), 25.0)


def test_how_a_holder_stands_in_words() -> None:
    for state in (State.EMPTY, State.VACANT):
        assert Seat(Node(Role.WORKER, 0), state=state).presence(9.0) == "not joined yet"
    seat = held()
    assert seat.presence(seat.heard_at + 2) == "alive, has made no call yet"
    assert seat.presence(seat.heard_at + 3) == "silent for 3 s"
    seat.lose("its connection broke", 100.0)
    assert seat.presence(142.0) == "lost for 42 s: its connection broke"


# --- claims of newcomers, and the numbers of the challenges that decide them ----------------------


def link() -> SeatLink:
    return SeatLink("host", 7, None, 0.0)


def asked(claims: Claims) -> list[int]:
    """The numbers of the challenges that are to be sent, which are then."""
    outgoing, claims.outgoing = claims.outgoing, []
    return [item.number for _, item in outgoing]


@pytest.mark.spec("R216")
def test_numbers_grow_and_are_those_of_no_former_scheduler() -> None:
    claims, links = Claims(), {"a": link(), "b": link()}
    claims.challenge(links, claims.open("x"), 10.0)
    assert asked(claims) == [10_000_000, 10_000_001]
    claims.challenge({"c": link()}, 0, 9.0)
    assert asked(claims) == [10_000_002], "the clock went back"
    claims.challenge({"d": link()}, Claims().open("x"), 11.0)
    assert asked(claims) == [11_000_000]


@pytest.mark.spec("R215")
def test_a_newcomer_counts_from_its_first_hello() -> None:
    claims, links = Claims(), {"a": link()}
    claims.challenge(links, claims.open("x"), 10.0)
    assert claims.open("x") == 0, "still"
    since = claims.open("y")
    assert since == 10_000_000
    claims.challenge(links, since, 11.0)
    assert asked(claims) == [10_000_000, 11_000_000]
    claims.close("x")
    assert claims.open("x") == 11_000_000, "it is another one"


def test_claims_are_bounded() -> None:
    claims = Claims()
    for index in range(SEATS_MAX + 1):
        claims.open(f"x{index}")
    assert "x0" not in claims
    assert "x1" in claims
    claims.close("x1")
    claims.close("x1")
    assert "x1" not in claims
