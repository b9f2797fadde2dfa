"""A worker ends, stops or fails at each named moment, and every push is counted once.

``onehot.py`` is the oracle. Several moments are tried in one job, one after another: what goes
wrong at one of them shows in the step that follows it.
"""

import logging
import random

import pytest

from tests.faults.jobs import Job
from tests.integration.processes import Processes

log = logging.getLogger(__name__)
"""``--log-cli-level=info`` shows how long each healing took."""
IN_PART = "said-Push:1:kill0.05"
MOMENTS = [
    # making the values; the first of all, because a value is loaded once
    *("said-Load@server-1:1", "said-Open@server-1:1", "hearing-Declared@server-0:1"),
    # joining
    *("saying-Hello@scheduler:1", "said-Hello@scheduler:1", "hearing-Welcome@scheduler:1"),
    *("heard-View:1", "said-Hello@server-1:1", "heard-Welcome@server-0:1"),
    # agreeing on what there is
    *("said-Optimize@server-1:1", "said-Declare@server-0:1", "at-initialized:1"),
    *("heard-Pulled:1", "at-resumed:1"),
    # pushing: some parts are there, none, or all; acknowledged, or not
    *(IN_PART, "said-Push@server-1:1:kill0.05", "said-Push@server-0:2:kill0.05"),
    *("saying-Push@server-0:1", "said-Push@server-0:1", "said-Push@server-1:1"),
    *("said-Push:2", "said-Push:6:kill0.05", "hearing-Ack@server-0:1", "heard-Ack@server-1:1"),
    *("hearing-Ack:3", "at-pushed:1", "at-pushpulled:1"),
    # pulling
    *("said-Pull@server-1:1", "hearing-Pulled@server-0:5", "heard-Pulled@server-1:6"),
    "at-pulled:1",
    # at a barrier
    *("said-Barrier:1", "hearing-Released:1", "heard-Released:1", "at-passed:1"),
]
LAST = ["at-trained:1", "said-Barrier:1", "at-ended:1"]
"""Moments at the end, when all steps are done."""
PER_JOB = 7
SAMPLE = 3
STEPS_PER_MOMENT = 9
HEALED_MAX_S = 15.0
"""5 s are promised; a machine that does other things, too, may take longer."""


def points(rank: int, moments: list[str], action: str = "kill") -> list[str]:
    """Return the failpoints of one worker: each life of it ends at the next of ``moments``."""
    return [
        f"worker-{rank}/{moment}" + (f":{action}" if moment.count(":") == 1 else "") for moment in moments
    ]


def jobs() -> list[list[str]]:
    """All moments, over as many jobs as it takes; rank 0 and 1 in turns."""
    cut = [MOMENTS[at : at + PER_JOB] for at in range(0, len(MOMENTS), PER_JOB)]
    return [points(place % 2, item) for place, item in enumerate([*cut, LAST])]


def sample(seed: int) -> list[str]:
    """A few of them, for every day: a push of which one server has its part, and others."""
    others = [item for item in MOMENTS[1:] if item != IN_PART]
    return sorted([IN_PART, *random.Random(seed).sample(others, SAMPLE)], key=MOMENTS.index)


def play(processes: Processes, mode: str, points: list[str]) -> Job:
    """Run a job in which all of ``points`` are reached; every push must have been counted once."""
    job = Job(processes, points)
    launched = job.launch(mode, STEPS_PER_MOMENT * len(points))
    code = launched.wait(60.0 + 8.0 * len(points))
    told = f"{points} of which were reached: {job.reached()}: {launched}"
    assert code == 0, told
    assert launched.out.count("each push counted once") >= 2, told
    assert [item.place for item in job.reached()] == list(range(len(points))), told
    return job


def check_healed(job: Job) -> None:
    """Each time the worker was soon at work again."""
    took = job.healed()
    for point, seconds in took.items():
        log.info("%s: healed in %.2f s", point, seconds)
    assert not {point for point, seconds in took.items() if seconds > HEALED_MAX_S}, took


@pytest.mark.spec("R22", "R51")
@pytest.mark.parametrize(
    ("mode", "rank"), [("sync", 1), pytest.param("async", 0, marks=pytest.mark.thorough)]
)
def test_pushes_count_once_if_workers_are_killed(processes: Processes, mode: str, rank: int) -> None:
    check_healed(play(processes, mode, points(rank, sample(rank))))


@pytest.mark.slow
@pytest.mark.spec("R22", "R51")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("points", jobs(), ids=lambda points: points[0].partition(":")[0])
def test_pushes_count_once_whenever_workers_are_killed(
    processes: Processes, mode: str, points: list[str]
) -> None:
    check_healed(play(processes, mode, points))


STOPPED = ["said-Push@server-0:2:stop1.5", "hearing-Released:2:stop0.5", "heard-Pulled:4:stop2.5"]


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_pushes_count_once_if_workers_stand_still_or_fail(processes: Processes, mode: str) -> None:
    """A worker that is stopped is not lost: the kvps-worker that started it speaks for it."""
    stopped = [f"worker-{place % 2}/{item}" for place, item in enumerate(STOPPED)]
    play(processes, mode, [*stopped, *points(1, ["hearing-Ack:3", "said-Pull:1"], "raise")])
