"""Features of torch.distributed over the backend "kvps", with real processes: the same as with gloo."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import torch_models_worker, torch_worker
from tests.integration.processes import ROOT, Process, Processes, made

WORKER = ROOT / "tests" / "integration" / "torch_worker.py"
MODELS = WORKER.with_name("torch_models_worker.py")
LIMIT_S = 240.0


def run(processes: Processes, cases: list[str], worker: Path = WORKER) -> Process:
    processes.env["TORCHINDUCTOR_CACHE_DIR"] = str(processes.folder / "inductor")
    flags = ("-n", 2, "-s", 1, "--", sys.executable, worker)
    launched = processes.kvps("launch", *flags, *cases)
    launched.wait(LIMIT_S)
    return launched


def demand(process: Process, case: str) -> None:
    passed = re.findall(rf"^\[worker \d\] {case} passed", process.out, re.MULTILINE)
    assert len(passed) == 2, process


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    for processes in made(tmp_path_factory.mktemp("torch")):
        yield run(processes, list(torch_worker.CASES))


@pytest.mark.parametrize("case", torch_worker.CASES)
def test_two_ranks(ran: Process, case: str) -> None:
    demand(ran, case)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    for processes in made(tmp_path_factory.mktemp("slow")):
        yield run(processes, list(torch_worker.SLOW))


@pytest.mark.thorough
@pytest.mark.parametrize("case", torch_worker.SLOW)
def test_two_ranks_and_what_takes_seconds(slow: Process, case: str) -> None:
    demand(slow, case)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    for processes in made(tmp_path_factory.mktemp("models")):
        yield run(processes, list(torch_models_worker.CASES), MODELS)


@pytest.mark.thorough
@pytest.mark.parametrize("case", torch_models_worker.CASES)
def test_two_ranks_train_the_same_as_with_gloo(models: Process, case: str) -> None:
    demand(models, case)
