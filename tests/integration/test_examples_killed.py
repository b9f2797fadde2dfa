"""Each example that trains goes on when any worker or any server is killed, or says in its first lines why not."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.processes import ROOT, Process, Processes, has_checkpoint, until

GOES_ON = {
    "digits.py": "--epochs 25 --min-accuracy 0.9",
    "gluon_digits.py": "--epochs 15 --min-accuracy 0.9",
    "gpt.py": "--update-on-kvstore --steps 60 --batch-size 8 --max-loss 9",
    "gpt_local_steps.py": "--steps 150 --sync-every 12 --batch-size 8 --max-loss 9",
    "horovod_digits.py": "--update-on-kvstore --epochs 15 --min-accuracy 0.9",
    "linear_numpy.py": "--rounds 3000",
    "metrics.py": "--epochs 20",
    "recommender.py": "--worker --seconds 8",
    "sharded_mlp.py": "--steps 150 --depth 1",
    "word_vectors.py": "--seconds 8 --min-gain -1",
}
"""Examples whose killed worker is replaced alone, and flags for a run of some seconds."""
BEGINS_AGAIN = {"ddp_digits.py": "--epochs 8 --min-accuracy 0.5"}
"""Examples whose workers all begin again."""
REFUSED = {
    "click_model.py": "",
    "horovod_digits.py": "--epochs 15",
    "gpt.py": "--steps 60 --batch-size 8 --max-loss 9",
}
"""Examples whose replacement lacks what the other workers have."""
ELSEWHERE = {
    *("async_vs_sync.py", "compressed_digits.py"),  # threads of one process
    "rollouts.py",  # it kills a reader itself
    "serve_table.py",  # its workers are threads of one process
    "ray_digits.py",  # Ray starts its workers: --kill
    *("accelerate_digits.py", "lightning_digits.py", "transformers_gpt.py"),  # as ddp_digits.py
}
"""Examples that no launcher of kvps starts, or that need further packages."""


def launch(processes: Processes, example: str, flags: str) -> tuple[Process, Path]:
    """Start an example under supervision; return when it has trained for a moment."""
    processes.may_fork = False
    cuts = processes.folder / "cuts"
    command = (sys.executable, ROOT / "examples" / example, *flags.split())
    kept = ("--checkpoint-dir", cuts, "--checkpoint-every", "0.5")
    launched = processes.kvps("launch", "-n", 2, "-s", 2, "--max-restarts", 3, *kept, "--", *command)
    until(lambda: has_checkpoint(cuts), "checkpoint", 120.0)
    return launched, cuts


def kill(processes: Processes, pattern: str, rank: int) -> None:
    """Kill the newest process of a rank whose command line matches."""
    of_rank = [
        pid
        for pid in processes.pids(pattern)
        if f"KVPS_RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    os.kill(of_rank[-1], signal.SIGKILL)


def kill_worker(processes: Processes, example: str, rank: int) -> None:
    kill(processes, rf"^{sys.executable} \S*examples/{example}", rank)


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("example", GOES_ON)
@pytest.mark.parametrize("whom", ["worker 0", "worker 1", "server 1"])
def test_an_example_goes_on(processes: Processes, example: str, whom: str) -> None:
    launched, _ = launch(processes, example, GOES_ON[example])
    role, rank = whom.split()
    if role == "worker":
        kill_worker(processes, example, int(rank))
    else:
        os.kill(processes.pids(rf"cli\.server .*--rank {rank}\b")[-1], signal.SIGKILL)
    code = launched.wait(240.0)
    if example == "recommender.py":  # it learns too little in this time for its exit code
        assert "hidden items among the first 10" in launched.out, launched
    else:
        assert code == 0, launched


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("example", BEGINS_AGAIN)
def test_an_example_begins_again(processes: Processes, example: str) -> None:
    launched, _ = launch(processes, example, BEGINS_AGAIN[example])
    kill_worker(processes, example, 1)
    assert launched.wait(240.0) == 0, launched


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("example", REFUSED)
def test_an_example_says_why_it_cannot_go_on(processes: Processes, example: str) -> None:
    launched, _ = launch(processes, example, REFUSED[example])
    kill_worker(processes, example, 1)
    assert launched.wait(240.0) == 78, launched
    assert launched.err.count("this worker replaces a lost worker") == 1, launched


def test_every_example_is_killed_or_says_why_not() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert scripts == {*GOES_ON, *BEGINS_AGAIN, *REFUSED, *ELSEWHERE}
    for name in scripts:
        head = (ROOT / "examples" / name).read_text(encoding="utf-8").split('"""')[1]
        assert "is killed" in head or "no worker to kill" in head, name
