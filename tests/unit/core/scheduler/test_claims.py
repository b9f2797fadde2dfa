"""Claims of newcomers, and the numbers of the challenges that decide them."""

import pytest

from kvps.core.scheduler.seat import SEATS_MAX, Claims, SeatLink


def link() -> SeatLink:
    return SeatLink("host", 7, None, 0.0)


def asked(claims: Claims) -> list[int]:
    """The numbers of the challenges that are to be sent, which are then."""
    outgoing, claims.outgoing = claims.outgoing, []
    return [one.number for _, one in outgoing]


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
