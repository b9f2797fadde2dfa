"""Batch scripts of ``kvps-launch --dry-run=sbatch`` under a real Slurm: to the end, queued again, cancelled."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.integration.engines import Batch, Slurm, program
from tests.integration.processes import Processes, has_checkpoint, until
from tests.integration.test_launch import CONTINUED

pytestmark = pytest.mark.thorough
RANKS = """
import os, torch, kvps
kv = kvps.create("dist_sync")
assert (kv.rank, kv.num_workers) == (int(os.environ["SLURM_PROCID"]), 4), kv.rank
kv.init("w", torch.zeros(3))
assert kv.pushpull("w", torch.full((3,), float(10**kv.rank))).tolist() == [1111.0] * 3
os.write(1, b"right\\n")
"""
SIZES = ("-n", 2, "-s", 2)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    made = Slurm(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()


def submitted(processes: Processes, slurm: Slurm, *flags: object, options: Sequence[str] = ()) -> Batch:
    """Print the script of a job that trains from its newest checkpoint on, and submit it."""
    script, folder = processes.script(CONTINUED), processes.folder / "cuts"
    flags = (*SIZES, "--nodes", 2, "--checkpoint-dir", folder, *flags)
    dry = processes.kvps("launch", "--dry-run=sbatch", *flags, "--", sys.executable, script, folder)
    assert dry.wait() == 0, dry
    return slurm.batch(processes, dry.out, processes.folder, *options)


def bits(out: str) -> set[str]:
    return {line.partition("bits")[2] for line in out.splitlines() if "bits" in line}


@pytest.fixture
def expected(processes: Processes) -> set[str]:
    """The weights of the same job on one machine, without an interruption."""
    script = processes.script(CONTINUED)
    here = processes.kvps("launch", *SIZES, "--", sys.executable, script, processes.folder / "none")
    assert here.wait(60.0) == 0, here
    return bits(here.out)


def test_slurm_job_runs_to_the_end(processes: Processes, slurm: Slurm, expected: set[str]) -> None:
    job = submitted(processes, slurm)
    assert job.wait() == "COMPLETED", job.out
    assert bits(job.out) == expected
    assert job.out.count("bits") == 2


def test_slurm_job_continues_after_the_operator_has_queued_it_again(
    processes: Processes, slurm: Slurm, expected: set[str]
) -> None:
    job = submitted(processes, slurm, "--checkpoint-every", 0.3, "--max-restarts", 1)
    job.expect("step 100 ")
    until(lambda: has_checkpoint(processes.folder / "cuts"), "checkpoint")
    job.requeue()
    assert job.wait() == "COMPLETED", job.out
    assert bits(job.out) == expected, job.out
    begins = [line.partition("begins at ")[2] for line in job.out.splitlines() if "begins" in line]
    assert int(begins[-1]) > 0, job.out


def test_a_signal_before_the_time_limit_takes_a_checkpoint_and_queues_it_again(
    processes: Processes, slurm: Slurm, expected: set[str]
) -> None:
    job = submitted(processes, slurm)
    job.expect("step 100 ")
    job.signal_shell()
    job.expect("checkpoint 1 is written; ending the job")
    assert job.wait() == "COMPLETED", job.out
    assert bits(job.out) == expected, job.out
    begins = [line.partition("begins at ")[2] for line in job.out.splitlines() if "begins" in line]
    assert int(begins[-1]) >= 100, "the last checkpoint is newer than the signal"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_time_limit_queues_it_again(processes: Processes, slurm: Slurm, expected: set[str]) -> None:
    flags = ("--grace", 5, "--env", "STEP_S=0.3")
    job = submitted(processes, slurm, *flags, options=["--time=2"])
    assert job.wait(600.0) == "COMPLETED", job.out
    assert bits(job.out) == expected, job.out
    assert "checkpoint 1 is written; ending the job" in job.out


def test_scancel_leaves_nothing(processes: Processes, slurm: Slurm) -> None:
    job = submitted(processes, slurm, "--max-restarts", 1)
    job.expect("step 10 ")
    job.cancel()
    assert job.wait() == "CANCELLED", job.out
    until(lambda: not processes.running(), "end of all processes")
    assert not list(Path(processes.temp).iterdir())
    assert job.state == "CANCELLED", "it is not queued again"


def test_plain_srun_gives_ranks(processes: Processes, slurm: Slurm) -> None:
    cluster = processes.scheduler(4, 1)
    cluster.server()
    env = slurm.env | {"KVPS_SCHEDULER": cluster.endpoint, "STORE": "dist_sync"}
    words = (program("srun"), "--nodes=2", "--ntasks=4", "--quiet", sys.executable)
    started = processes.start("srun", *words, processes.script(RANKS), **env)
    assert started.wait(90.0) == 0, started
    assert started.out.count("right") == 4, started
