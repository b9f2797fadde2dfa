"""Jobs in which every worker waits for another: all are told, and no job that goes on is."""

import re
import sys

import pytest

from tests.integration.processes import ROOT, Process, Processes

WORKER = ROOT / "tests" / "integration" / "standstill_worker.py"
LIMIT_S = 120.0
TOLD_MAX_S = 60.0
"""It takes about 10 s; this machine may be busy. A call's limit is 300 s."""
STANDSTILLS = {
    "barrier": {"push()", "barrier()"},
    "keys": {"push()"},
    "wrapped_on_rank_0": {"the comparison of models", "barrier()"},
    "frozen_later": {"push()", "barrier()"},
    "group": {"push()"},
    "replaced": {"push()", "barrier()"},
}


def launched(processes: Processes, *cases: str) -> dict[str, Process]:
    """Run jobs side by side: they do little but wait."""
    flags = ("-n", 2, "-s", 2, "--max-restarts", 1, "--", sys.executable, WORKER)
    running = {case: processes.kvps("launch", *flags, case) for case in cases}
    for item in running.values():
        assert item.wait(LIMIT_S) == 0, item
    return running


def check_told(job: Process, calls: set[str]) -> None:
    for rank in range(2):
        (said,) = re.findall(rf"^\[worker {rank}\] (.*)$", job.out, re.MULTILINE)
        found = re.match(r"Mismatch after (\d+) s: worker (\d): (.*?) of store ", said)
        assert found is not None, said
        assert float(found[1]) < TOLD_MAX_S
        assert int(found[2]) == rank
        assert all(f" waited in {call} for " in said for call in calls), said
        assert found[3] in calls, said


def test_all_are_told_that_none_can_go_on(processes: Processes) -> None:
    """A thread that has made no call yet goes on later, and its job is not told."""
    jobs = launched(processes, "barrier", "group", "replaced", "helper")
    for case in ("barrier", "group", "replaced"):
        check_told(jobs[case], STANDSTILLS[case])
    assert jobs["helper"].out.count("] well") == 2, jobs["helper"]


@pytest.mark.thorough
def test_standstill_is_reported_in_every_call(processes: Processes) -> None:
    for case, job in launched(processes, *STANDSTILLS).items():
        check_told(job, STANDSTILLS[case])
