"""Who sends much that is refused is not heard for a while."""

import pytest

from kvps.core.limits import TABLE
from kvps.net.doorman import IGNORED_S, KEPT_MAX, WITHIN_S, Misbehaviour

REFUSED_MAX = TABLE["refused"].default


@pytest.mark.spec("R244")
def test_a_hundred_in_ten_seconds_are_too_many() -> None:
    one = Misbehaviour()
    assert not any(one.refused(b"a", number / 100) for number in range(REFUSED_MAX - 1))
    assert not one.is_ignored(b"a", 1.0)
    assert one.refused(b"a", 1.0)
    assert one.is_ignored(b"a", 1.0 + IGNORED_S - 0.1)
    assert not one.is_ignored(b"b", 1.0)
    assert not one.is_ignored(b"a", 1.0 + IGNORED_S)
    assert not one.refused(b"a", 1.0 + IGNORED_S), "the count begins anew"


def test_a_few_now_and_then_are_not() -> None:
    one = Misbehaviour()
    for span in range(5):
        assert not any(one.refused(b"a", span * WITHIN_S) for _ in range(REFUSED_MAX - 1))


def test_oldest_refusals_are_forgotten() -> None:
    one = Misbehaviour()
    for _ in range(REFUSED_MAX):
        one.refused(b"a", 0.0)
    for number in range(KEPT_MAX):
        one.refused(number.to_bytes(4, "big"), 0.0)
    assert not one.is_ignored(b"a", 0.0)
