"""The time of a local step: the median, and what does not count."""

import time

import pytest
import torch

from kvps.torch.local_steps import pace
from kvps.torch.local_steps.pace import STEPS_LEAST, STEPS_MAX, StepTimer


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
