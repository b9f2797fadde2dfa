"""The scheduler ends while a job runs: pushes and pulls go on, and a restart picks all up."""

import logging
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from tests.faults.jobs import Job
from tests.integration.processes import Process, Processes, free_port, until

log = logging.getLogger(__name__)
STEPS = 30
ROUNDS = 90
GAP_MAX_S = 5.0
"""Longest pause between two rounds without a scheduler; a busy machine has its own, too."""


class Watched:
    """A job whose scheduler is started again, with the state that it left."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.lives: list[Process] = []
        self.members: list[Process] = []

    def start_scheduler(self) -> Process:
        """Start the scheduler, or its next life."""
        flags = (
            *("--workers", 2, "--servers", 2, "--bind", self.endpoint),
            *("--state", self.job.folder / "state", "--log-level", "info"),
        )
        process = self.job.processes.kvps("scheduler", *flags, **self.job.env)
        process.expect("at tcp://")
        self.lives.append(process)
        return process

    def start_members(self, mode: str, steps: int, *flags: object) -> None:
        """Start two servers and two workers."""
        command = self.job.command(mode, steps, *flags)
        place = ("--scheduler", self.endpoint, "--rank")
        for rank in range(2):
            kvps = self.job.processes.kvps
            self.members.append(kvps("server", *place, rank, **self.job.env))
            self.members.append(kvps("worker", *place, rank, "--", *command, **self.job.env))

    def run(self, limit_s: float) -> None:
        """Start the scheduler again whenever it was killed, until the job is over."""

        def is_over() -> bool:
            if self.lives[-1].popen.poll() == -signal.SIGKILL:
                self.start_scheduler()
            return self.lives[-1].popen.poll() is not None

        until(is_over, f"end of the job of {self.lives} {self.members}", limit_s)

    def check(self) -> None:
        """All went well, and each push was counted once."""
        assert [item.wait() for item in [self.lives[-1], *self.members]] == [0] * 5, self.members
        outs = [member.out for member in self.members]
        assert sum("each push counted once" in out for out in outs) == 2, self.members


KILLED = [
    # while the job forms
    *("hearing-Hello:2", "saving:1", "saved:2", "said-Welcome:1", "said-View:2"),
    # at barriers: one has come, all have come, one of them was told
    *("saved:1", "hearing-Barrier:3", "saying-Released:2", "said-Released:1", "hearing-Beat:2"),
    # while it ends
    *("hearing-Leave:1", "said-Left:1"),
]
"""In the order in which they can be reached; the last ones end the job."""


FEW = ["saved:4", "said-View:1", "saying-Released:2", "said-Released:1"]
"""Those of every day: nobody, some, or one half of those that wait have been told."""


def play(processes: Processes, mode: str, moments: list[str]) -> None:
    """Run a job whose scheduler is killed at each of ``moments``."""
    job = Job(processes, [f"scheduler/{moment}:kill" for moment in moments])
    watched = Watched(job)
    watched.start_scheduler()
    watched.start_members(mode, STEPS)
    watched.run(60.0 + 5.0 * len(moments))
    watched.check()
    assert [item.place for item in job.reached()] == list(range(len(moments))), job.reached()


@pytest.mark.spec("R23", "R34")
def test_a_scheduler_that_is_killed(processes: Processes) -> None:
    """Nobody passes a barrier too early or waits at it for ever, and no push is lost."""
    play(processes, "sync", FEW)


@pytest.mark.slow
@pytest.mark.spec("R23", "R34")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_scheduler_that_is_killed_at_each_of_its_steps(processes: Processes, mode: str) -> None:
    play(processes, mode, KILLED)


def test_pushes_and_pulls_go_on_without_a_scheduler(processes: Processes) -> None:
    job = Job(processes)
    watched = Watched(job)
    watched.start_scheduler()
    watched.start_members("sync", ROUNDS, "--no-barrier")
    until(lambda: len(job.rounds(0)) >= ROUNDS // 6, "rounds", 60.0)
    watched.lives[0].signal(signal.SIGKILL)
    watched.lives[0].wait()
    begun = len(job.rounds(0))
    until(lambda: len(job.rounds(0)) >= begun + ROUNDS // 2, "rounds without a scheduler", 60.0)
    ended = len(job.rounds(0))
    watched.start_scheduler()
    watched.run(60.0)  # past the barrier at the end
    watched.check()
    gaps = [after - before for before, after in pairwise(job.rounds(0))]
    usual, alone = max(gaps[5 : begun - 1]), max(gaps[begun - 1 : ended])
    log.info("longest pause between rounds: %.3f s, without a scheduler %.3f s", usual, alone)
    assert alone <= max(GAP_MAX_S, 3 * usual)


def test_two_schedulers_cannot_have_one_state(processes: Processes, tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = processes.scheduler(1, 1, "--state", state)
    flags = ("--workers", 1, "--servers", 1, "--bind", "tcp://127.0.0.1:0", "--state", state)
    second = processes.kvps("scheduler", *flags)
    assert second.wait() == 78
    assert f"{state} is in use by process {first.process.pid}" in second.err
    assert "Traceback" not in second.err
    first.process.signal(signal.SIGKILL)
    first.process.wait()
    third = processes.kvps("scheduler", *flags, "--log-level", "info")
    third.expect("at tcp://")
    third.signal(signal.SIGTERM)
    assert third.wait() == 0
    assert list(state.iterdir()) == []
