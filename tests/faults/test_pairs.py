"""Two processes of one training run are killed at once, again and again, and both started again at once.

As an engine does it (docker, Kubernetes, systemd): whatever ends is started again the moment it has ended,
unless it says by 78 that this cannot help. So the next process of a seat is there before anybody knows
that the last one is lost; and if the scheduler was one of the two, before it knows anybody at all.
Whoever the two are, the run goes on, and its end is bit by bit that of a run which nothing befell.
"""

import itertools
import logging
import os
import random
import signal
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

import kvps
from tests.faults import exact
from tests.faults.test_soak import MORE_STEPS, PAUSE_S, SCRIPT, SEED, SERVERS, WORKERS, Run
from tests.integration.processes import Processes, has_checkpoint, until

log = logging.getLogger(__name__)
PAIRS = int(os.environ.get("KVPS_PAIRS", "50"))
HEALED_MAX_S = 90.0
"""Most of it on a busy machine: 12 s of silence, a return to a cut, and the start of two processes."""
NEVER_AGAIN = 78


class Engine(Run):
    """A run whose processes are started again by what supervises them."""

    def __init__(self, processes: Processes, folder: Path, pause_s: float, env: dict[str, str]) -> None:
        processes.env.update(env)
        self.restarts: list[str] = []
        """Who was started again, and had not been killed here."""
        super().__init__(processes, folder, pause_s)

    def kill_all(self, *names: str) -> None:
        """Kill some processes at once, and start them again as soon as they have ended."""
        for name in names:
            self.kill(name)
        for name in names:
            self.start(name)

    def tend(self) -> None:
        """Start again what ended by itself, and may be."""
        for name, process in self.members.items():
            code = process.popen.poll()
            if code:
                assert code != NEVER_AGAIN, f"{name} ended with 78: {process}"
                log.info("%s ended with %d", name, code)
                self.restarts.append(f"{name}: {code}")
                self.start(name)

    def wait_for(self, step: int, limit_s: float) -> None:
        """Wait until every rank has done ``step`` steps; meanwhile tend them."""

        def is_there() -> bool:
            self.tend()
            return self.steps >= step

        until(is_there, f"step {step} of all ranks; they are {self.members}", limit_s)


def play(processes: Processes, pairs: list[tuple[str, str]], env: dict[str, str]) -> tuple[int, str]:
    """Kill these pairs, one after another; return when the run then ended, and with what."""
    dice = random.Random(SEED)
    run = Engine(processes, processes.folder / "harmed", PAUSE_S, env)
    run.wait_for(5, HEALED_MAX_S)
    # Without a cut to return to, what a server held is gone.
    run.members["scheduler"].expect(r"checkpoint \d+ is complete", HEALED_MAX_S)
    took: dict[str, list[float]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        run.wait_for(run.steps + dice.randrange(1, 20), HEALED_MAX_S)
        before = max(run.step(rank) for rank in range(WORKERS))
        began = time.monotonic()
        run.kill_all(*pair)
        run.wait_for(before + 3, HEALED_MAX_S)
        roles = " and ".join(sorted(name.split()[0] for name in pair))
        took[roles].append(time.monotonic() - began)
        log.info("pair %d: %s, healed in %.2f s", number, " and ".join(pair), took[roles][-1])
    limit = max(run.step(rank) for rank in range(WORKERS)) + MORE_STEPS
    harmed = run.end(limit)
    for roles, times in sorted(took.items()):
        figures = len(times), statistics.median(times), max(times)
        log.info("%s: %d times, healed in %.2f s (median), %.2f s at most", roles, *figures)
    log.info("started again besides: %s", run.restarts)
    return limit, harmed


def kill_one(processes: Processes, pattern: str) -> None:
    """Kill the process with this command line, and wait until another one was started."""
    before = processes.pids(pattern)
    os.kill(before[0], signal.SIGKILL)  # the oldest: a kvps-worker has forked its reaper
    until(lambda: set(processes.pids(pattern)) - set(before), f"another {pattern}", HEALED_MAX_S)


def launched(processes: Processes, limit: int) -> str:
    """Kill what kvps-launch started, each before the last one is back; return what it ends with."""
    folder = processes.folder / "launched"
    folder.mkdir()
    (folder / "limit").write_text(str(limit))
    cuts = folder / "checkpoints"
    flags = (
        *("-n", WORKERS, "-s", SERVERS, "--max-restarts", 5),
        *("--checkpoint-dir", cuts, "--checkpoint-every", 0.3),
    )
    launch = processes.kvps("launch", *flags, "--", sys.executable, SCRIPT, folder, PAUSE_S)
    until(lambda: has_checkpoint(cuts), "checkpoint", HEALED_MAX_S)
    for name in ("server 0", "worker 0", "server 1", "worker 1"):
        role, rank = name.split()
        kill_one(processes, rf"kvps\.cli\.{role} .*--rank {rank} ")
    assert launch.wait(HEALED_MAX_S) == 0, launch
    return (folder / "end").read_text()


def unharmed(folder: Path, limit: int) -> str:
    """Return what a run in this process ends with, which nothing befalls."""
    folder.mkdir()
    (folder / "limit").write_text(str(limit))
    with kvps.LocalCluster(WORKERS, SERVERS) as cluster:
        cluster.run(lambda rank: exact.main(folder, 0.0))
    return (folder / "end").read_text()


@pytest.mark.timeout(600)
def test_pairs_that_are_killed_at_once(processes: Processes) -> None:
    """A few of every day, with a silence that is shorter."""
    pairs = [("scheduler", "worker 1"), ("server 0", "worker 0")]
    limit, end = play(processes, pairs, {"KVPS_SILENCE_MAX": "5"})
    assert unharmed(processes.folder / "unharmed", limit) == end


@pytest.mark.slow
@pytest.mark.timeout(600 + 90 * PAIRS)
def test_many_pairs_that_are_killed_at_once(processes: Processes) -> None:
    dice = random.Random(SEED)
    names = ["scheduler", "server 0", "server 1", "worker 0", "worker 1"]
    all_pairs = list(itertools.combinations(names, 2))
    dice.shuffle(all_pairs)
    pairs = [*all_pairs, *(dice.choice(all_pairs) for _ in range(PAIRS))][:PAIRS]
    limit, end = play(processes, pairs, {})
    assert Run(processes, processes.folder / "unharmed", 0.0).end(limit, 120 + limit) == end


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_of_a_launch_are_killed_one_after_another(processes: Processes) -> None:
    """Each before the last one is back; kvps-launch starts all of them again."""
    end = launched(processes, 100)
    assert unharmed(processes.folder / "unharmed", 100) == end
