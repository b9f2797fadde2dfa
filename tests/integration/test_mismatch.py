"""Ranks of a process group that make different calls: each is told, soon, and the group can be created again."""

import re
import sys
from collections.abc import Iterator

import pytest

from tests.integration import mismatch_worker
from tests.integration.processes import ROOT, Process, Processes, made

WORKER = ROOT / "tests" / "integration" / "mismatch_worker.py"
EVERYDAY = (
    "other_reduction",
    "other_order",
    "other_broadcast_shape",
    "refused_at_one_rank",
    "refused_in_init",
    "the_same",
)
LIMIT_S = 90.0
TOLD_MAX_S = 10.0
"""It takes about 0.3 s; this machine may be busy. A group's timeout is 30 minutes."""


def run(processes: Processes, *cases: str) -> Process:
    flags = ("-n", 3, "-s", 2, "--", sys.executable, WORKER)
    launched = processes.kvps("launch", *flags, *cases)
    assert launched.wait(LIMIT_S) == 0, launched
    return launched


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    for processes in made(tmp_path_factory.mktemp("mismatch")):
        yield run(processes, *EVERYDAY)


def told(process: Process, case: str) -> dict[int, str]:
    """Return what each rank was told."""
    pattern = rf"^\[worker (\d)\] {case} ([0-9.]+) s (.*)$"
    found = re.findall(pattern, process.out, re.MULTILINE)
    assert sorted(rank for rank, _, _ in found) == ["0", "1", "2"], process
    assert all(float(seconds) < TOLD_MAX_S for _, seconds, _ in found), process
    return {int(rank): text for rank, _, text in found}


def test_ranks_are_told_both_reductions(ran: Process) -> None:
    for text in told(ran, "other_reduction").values():
        assert "Mismatch: The ranks of group '0' made different calls. Number 2 is " in text
        assert "all_reduce(AVG) of float32[4] on rank" in text
        assert "all_reduce(SUM) of float32[4] on rank 1." in text


def test_ranks_are_told_which_operation_comes_first(ran: Process) -> None:
    for text in told(ran, "other_order").values():
        assert "broadcast(src=0) of float32[4] on rank 1." in text


def test_the_root_of_a_broadcast_is_told(ran: Process) -> None:
    for text in told(ran, "other_broadcast_shape").values():
        assert "broadcast(src=0) of float32[5] on rank 1." in text


def test_a_refusal_at_one_rank_reaches_every_rank(ran: Process) -> None:
    texts = told(ran, "refused_at_one_rank")
    assert texts.pop(1).startswith("ConfigError: ReduceOp.AVG needs numbers")
    for text in texts.values():
        assert "a call that was refused (ReduceOp.AVG needs numbers" in text


def test_a_rank_that_is_refused_in_init_is_told_of_by_the_others(ran: Process) -> None:
    texts = told(ran, "refused_in_init")
    assert texts.pop(1).startswith("ConfigError: the backend 'kvps' has no pg_options")
    for text in texts.values():
        assert text.startswith("ConfigError: rank 1 was refused: the backend 'kvps' has no")


def test_a_group_can_be_created_again(ran: Process) -> None:
    assert set(told(ran, "the_same").values()) == {"nothing was told"}


@pytest.mark.thorough
def test_every_mismatch_is_told_to_every_rank(processes: Processes) -> None:
    cases = [name for name in mismatch_worker.CASES if name not in EVERYDAY]
    launched = run(processes, *cases)
    for case in cases:
        for text in told(launched, case).values():
            assert "Mismatch" in text, launched
