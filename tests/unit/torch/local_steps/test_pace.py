"""The steps of a turn by speed: the floor, workers that are unknown, lost, new, or change."""

import math
import time

import pytest
import torch

from kvps.torch.local_steps import pace
from kvps.torch.local_steps.pace import SILENT_TURNS, STEPS_LEAST, STEPS_MAX, DynamicSteps, Report, StepTimer

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


# --- the time of a local step ---------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which a test sets."""
    now = [0.0]
    monkeypatch.setattr(pace, "perf_counter", lambda: now[0])
    return now


def timed(now: list[float], lengths: list[float]) -> StepTimer:
    timer = StepTimer(torch.device("cpu"))
    timer.begin()
    for length in lengths:
        now[0] += length
        timer.end()
    return timer


def test_a_step_that_took_long_moves_no_median(clock: list[float]) -> None:
    timer = timed(clock, [60.0, *[0.25] * 8, 5.0])
    assert timer.median_s(10) == 0.25


def test_the_newest_steps_count_and_at_least_some(clock: list[float]) -> None:
    timer = timed(clock, [1.0] * 20 + [3.0] * STEPS_LEAST)
    assert timer.median_s(STEPS_LEAST) == 3.0
    assert timer.median_s(1) == 3.0
    assert timer.median_s(2 * STEPS_LEAST + 2) == 1.0


def test_steps_are_not_kept_for_ever(clock: list[float]) -> None:
    timer = timed(clock, [1.0] * STEPS_MAX + [2.0] * STEPS_MAX)
    assert timer.median_s(10 * STEPS_MAX) == 2.0


def test_a_merge_between_two_steps_does_not_count(clock: list[float]) -> None:
    timer = timed(clock, [1.0])
    for _ in range(3):
        clock[0] += 50.0
        timer.begin()
        clock[0] += 1.0
        timer.end()
    assert timer.median_s(4) == 1.0


def test_before_the_first_step_nothing_is_known() -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.end()
    assert timer.median_s(1) == 0.0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_is_timed_and_not_the_host() -> None:
    """Enqueuing takes far less time than computing."""
    device = torch.device("cuda")
    timer = StepTimer(device)
    torch.cuda.synchronize()
    began = time.perf_counter()
    timer.begin()
    for _ in range(10):
        torch.cuda._sleep(20_000_000)
        timer.end()
    enqueued_s = time.perf_counter() - began
    assert timer.median_s(10) > 2 * enqueued_s / 10
