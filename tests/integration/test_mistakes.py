"""Ranks that make different calls by mistake."""

import re
import sys

import pytest

from tests.integration.processes import Processes

FRONT_ENDS = (
    "optimizer",
    "optimizer-on-servers",
    "trainer",
    "trainer-on-servers",
    "trainer-on-servers-overlap",
    "shard",
    "diloco",
)
STANDSTILL = "every worker waits, and none can go on: .*make the same calls in the same order"
MISTAKES = {"wrapped_on_rank_0_alone": STANDSTILL, "fewer_steps_on_rank_1": STANDSTILL}
LIMIT_S = 60.0
TOLD_S = 30.0
"""A standstill is told 9 s after the last call on an idle machine."""


@pytest.mark.thorough
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_both_ranks_are_told(processes: Processes, front_end: str, mistake: str) -> None:
    worker = (sys.executable, "-m", "tests.integration.mistake_worker")
    launched = processes.kvps("launch", "-n", 2, "-s", 2, "--", *worker, front_end, mistake, processes.folder)
    launched.wait(LIMIT_S)
    told = re.findall(r"^\[worker \d\] told after (\S+) s: Mismatch: (.*)$", launched.out, re.M)
    assert len(told) == 2, launched
    assert all(float(after) < TOLD_S and re.search(MISTAKES[mistake], text) for after, text in told)
