"""The steps of a turn by speed: the floor, workers that are unknown, lost, new, or change."""

import math

import pytest

from kvps.torch.local_steps.pace import SILENT_TURNS, DynamicSteps, Report

UNKNOWN = Report(0, 0.0, 0.0)


def report(step_s: float, steps: int = 100, turns: int = 1) -> Report:
    return Report(turns, step_s, step_s * steps)


@pytest.mark.parametrize(
    ("slower", "steps"), [(1.0, 100), (1.3, 80), (2.0, 52), (3.0, 35), (104.0, 1), (1000.0, 1)]
)
def test_a_slower_worker_makes_fewer_steps_in_proportion(slower: float, steps: int) -> None:
    """The floor of 100 / slower, 5 % more, as if the speeds were measured so much too low; at least one."""
    reports = [report(0.5), report(0.5 * slower)]
    assert DynamicSteps(100, 1, rank=1).of(reports, 0.0) == steps
    assert DynamicSteps(100, 1, rank=0).of(reports, 0.0) == 100, "the fastest makes all steps"


def test_equal_workers_make_equal_steps_although_speeds_are_measured() -> None:
    assert DynamicSteps(2, 1, rank=1).of([report(0.100), report(0.104)], 0.0) == 2


def test_a_turn_has_the_least_steps_that_a_delay_needs() -> None:
    assert DynamicSteps(100, 6, rank=1).of([report(0.1), report(10.0)], 0.0) == 6


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.nan, math.inf])
def test_a_worker_whose_speed_is_unknown_does_not_count(step_s: float) -> None:
    other = Report(1, step_s, 1.0)
    assert DynamicSteps(30, 1, rank=1).of([other, report(0.3)], 0.0) == 30
    assert DynamicSteps(30, 1, rank=0).of([other, report(0.3)], 0.0) == 30, "its own is unknown"


def test_a_worker_that_joins_counts_from_its_first_turn() -> None:
    steps = DynamicSteps(30, 1, rank=0)
    assert steps.of([report(0.3), UNKNOWN], 0.0) == 30
    assert steps.of([report(0.3), report(0.1)], 1.0) == 10


def test_the_fastest_worker_counts_until_it_is_silent_for_some_turns() -> None:
    steps = DynamicSteps(30, 1, rank=0)
    fastest = Report(7, 0.1, 4.0)
    silent_s = SILENT_TURNS * 4.0
    assert steps.of([report(0.3), fastest], 50.0) == 10
    assert steps.of([report(0.3), fastest], 50.0 + silent_s) == 10
    assert steps.of([report(0.3), fastest], 50.1 + silent_s) == 30
    assert steps.of([report(0.3), fastest._replace(turns=8)], 60.0 + silent_s) == 10, "it is back"
    assert steps.of([report(0.3), UNKNOWN], 61.0 + silent_s) == 30, "after a rollback"


def test_a_worker_with_short_turns_may_have_turns_of_all_steps_next() -> None:
    """It was slow, and is the fastest that is left: its next turn takes ten times as long."""
    steps = DynamicSteps(30, 1, rank=0)
    reports = [report(3.0), Report(1, 1.0, 3.0)]
    assert steps.of(reports, 0.0) == 10
    assert steps.of(reports, SILENT_TURNS * 30.0) == 10
    assert steps.of(reports, SILENT_TURNS * 30.1) == 30


def test_own_report_counts_however_old() -> None:
    steps = DynamicSteps(30, 1, rank=0)
    assert [steps.of([report(0.3), UNKNOWN], now) for now in (0.0, 1e6)] == [30, 30]


def test_a_change_of_speed_is_followed_at_once_and_the_steps_do_not_swing() -> None:
    """The steps that a worker makes change nothing about its speed, so they have nothing to swing with."""
    fast, slow = DynamicSteps(30, 1, rank=0), DynamicSteps(30, 1, rank=1)
    found = []
    for turn, slow_s in enumerate([0.1, 0.3, 0.3, 0.3, 0.05, 0.05, 0.05]):
        reports = [report(0.1, 30, turn), report(slow_s, 30, turn)]
        found.append((fast.of(reports, 3.0 * turn), slow.of(reports, 3.0 * turn)))
    assert found == [(30, 30), *[(30, 10)] * 3, *[(15, 30)] * 3]
