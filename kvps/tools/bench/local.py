"""One trial of one system on this machine: its processes and their environments.

Every system gets one thread per process and ports of its own. kvps runs under ``kvps-launch`` as
for a user; the workers of gloo are started here.
"""

from __future__ import annotations

import socket
import sys

from kvps import config
from kvps.errors import KvpsError
from kvps.launchers.reaper import Reaper
from kvps.tools.bench.figures import Case, TrialTimes, slowest
from kvps.tools.bench.processes import Group
from kvps.tools.bench.systems import System

LOOPBACK = "127.0.0.1"
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
KVPS_WORKER = "kvps.tools.bench.worker"
GLOO_WORKER = "kvps.tools.bench.gloo"


def measure(system: System, case: Case, rounds: int, reaper: Reaper) -> TrialTimes:
    """Run a system once.

    Raises:
        KvpsError: if it fails, or one of its workers says nothing.
    """
    start = _start_kvps if system.kind == "kvps" else _start_gloo
    with Group(reaper) as group:
        start(group, system, case, rounds)
        return trial_of(group.wait(), case.workers, system.name)


def trial_of(workers: list[list[float]], expected: int, name: str) -> TrialTimes:
    """Return the trial that has these times of its workers.

    Raises:
        KvpsError: if there are too few.
    """
    if len(workers) != expected:
        raise KvpsError(
            f"{name}: {len(workers)} of {expected} workers reported the times of their rounds; "
            "run this system alone with --systems, and check which other processes use memory"
        )
    return TrialTimes(slowest(workers))


def worker_flags(system: System, case: Case, rounds: int) -> list[str]:
    """Return the configuration of a worker."""
    return [system.how, case.workload, system.rule, str(rounds)]


def module(name: str, python: str = sys.executable) -> list[str]:
    """Return the start of a command that runs a module, even where this folder has a file of that name."""
    return [python, "-P", "-m", name]


def _start_kvps(group: Group, system: System, case: Case, rounds: int) -> None:
    sizes = ["-n", str(case.workers), "-s", str(case.servers), "--"]
    worker = [*module(KVPS_WORKER), *worker_flags(system, case, rounds)]
    env = config.environment({**THREADS, **system.env}, {})
    argv = [*module("kvps.cli.launch"), *sizes, *worker]
    group.start("kvps-launch", argv, env, is_measured=True)


def _start_gloo(group: Group, system: System, case: Case, rounds: int) -> None:
    argv = [*module(GLOO_WORKER), *worker_flags(system, case, rounds)]
    port = free_port()
    for rank in range(case.workers):
        env = gloo_environment(rank, case.workers, LOOPBACK, port)
        group.start(f"gloo worker {rank}", argv, env, is_measured=True)


def gloo_environment(rank: int, workers: int, master: str, port: int) -> dict[str, str]:
    """Return the environment of a worker of gloo."""
    place = {"RANK": rank, "WORLD_SIZE": workers, "MASTER_ADDR": master, "MASTER_PORT": port}
    return config.environment({**THREADS, **{name: str(setting) for name, setting in place.items()}}, {})


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port: int = free.getsockname()[1]
        return port
