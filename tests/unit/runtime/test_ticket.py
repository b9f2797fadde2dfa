"""The switch interval of the interpreter while calls are in flight."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from kvps.runtime.ticket import ShortTurns


@pytest.fixture(autouse=True)
def usual() -> Iterator[float]:
    """Begin with CPython's own interval, whatever a test leaves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield 0.005
    sys.setswitchinterval(before)


def test_turns_are_short_while_any_call_is_in_flight(usual: float) -> None:
    turns = ShortTurns(0.0001)
    turns.begin()
    turns.begin()
    assert sys.getswitchinterval() == pytest.approx(0.0001)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(0.0001)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(usual)


@pytest.mark.parametrize("interval_s", [0.0, 0.01])
def test_turns_are_never_made_longer(usual: float, interval_s: float) -> None:
    turns = ShortTurns(interval_s)
    turns.begin()
    assert sys.getswitchinterval() == pytest.approx(usual)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_an_interval_that_the_script_sets_meanwhile_stays() -> None:
    turns = ShortTurns(0.0001)
    turns.begin()
    sys.setswitchinterval(0.001)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(0.001)


def test_a_fork_has_no_call_in_flight(usual: float) -> None:
    turns = ShortTurns(0.0001)
    turns.begin()
    turns.begin()
    turns.forget()
    assert sys.getswitchinterval() == pytest.approx(usual)
    turns.forget()
    turns.begin()
    assert sys.getswitchinterval() == pytest.approx(0.0001)
