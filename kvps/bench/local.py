"""One trial of one system on this machine: which processes it has, and what they are told.

Every system gets one thread per process and ports of its own. kvps runs under ``kvps-launch`` as
for a user; the workers of the others are started here.
"""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import kvps
from kvps import config
from kvps.bench.processes import Group, Leash
from kvps.bench.report.figures import Case, Trial, slowest
from kvps.bench.systems import System
from kvps.errors import KvpsError

LOOPBACK = "127.0.0.1"
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
KVPS_WORKER = "kvps.bench.worker"
GLOO_WORKER = "kvps.bench.peers.gloo"


def measure(
    system: System, case: Case, rounds: int, interpreters: Mapping[str, str], leash: Leash
) -> Trial:
    """Run a system once.

    Raises:
        KvpsError: if it fails, or one of its workers says nothing.
    """
    with Group(leash) as group, tempfile.TemporaryDirectory(prefix="kvps-bench-") as folder:
        if system.kind == "kvps":
            _start_kvps(group, system, case, rounds)
        elif system.kind == "gloo":
            _start_gloo(group, system, case, rounds)
        else:
            (Path(folder) / "kvps").symlink_to(Path(kvps.__file__).parent)
            start = _start_mxnet if system.kind == "mxnet" else _start_ray
            start(group, system, case, rounds, interpreters[system.kind], folder)
        return trial_of(group.wait(), 1 if system.kind == "ray" else case.workers, system.name)


def trial_of(workers: list[list[float]], expected: int, name: str) -> Trial:
    """Return the trial of which these are the workers' times.

    Raises:
        KvpsError: if there are too few.
    """
    if len(workers) != expected:
        raise KvpsError(
            f"{name}: {len(workers)} of {expected} workers said how long their rounds took; run "
            "it by itself with --systems, and look for what else uses this machine's memory"
        )
    return Trial(slowest(workers))


def worker_flags(system: System, case: Case, rounds: int) -> list[str]:
    """Return what a worker is told."""
    return [system.how, case.workload, system.rule, str(rounds)]


def module(name: str, python: str = sys.executable) -> list[str]:
    """Return the start of a command that runs a module, not one of this folder's that is so called."""
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
    return config.environment({**THREADS, **{name: str(one) for name, one in place.items()}}, {})


def _start_mxnet(
    group: Group, system: System, case: Case, rounds: int, python: str, folder: str
) -> None:
    env = _foreign_environment(folder)
    env |= {"DMLC_PS_ROOT_URI": LOOPBACK, "DMLC_PS_ROOT_PORT": str(free_port())}
    env |= {"DMLC_NODE_HOST": LOOPBACK, "DMLC_NUM_WORKER": str(case.workers)}
    env |= {"DMLC_NUM_SERVER": str(case.servers)}
    serve = [python, "-c", "import mxnet"]  # which does not return while there is a job
    group.start("mxnet scheduler", serve, {**env, "DMLC_ROLE": "scheduler"}, cwd=folder)
    for rank in range(case.servers):
        group.start(f"mxnet server {rank}", serve, {**env, "DMLC_ROLE": "server"}, cwd=folder)
    argv = [python, "-m", "kvps.bench.peers.mxnet", *worker_flags(system, case, rounds)]
    for rank in range(case.workers):
        env_of_worker = {**env, "DMLC_ROLE": "worker"}
        group.start(f"mxnet worker {rank}", argv, env_of_worker, cwd=folder, is_measured=True)


def _start_ray(
    group: Group, system: System, case: Case, rounds: int, python: str, folder: str
) -> None:
    words = [case.workload, str(rounds), str(case.workers), str(case.servers)]
    argv = [python, "-m", "kvps.bench.peers.ray", *words]
    env = _foreign_environment(folder)
    group.start("ray driver", argv, env, cwd=folder, is_measured=True)


def _foreign_environment(folder: str) -> dict[str, str]:
    """Return the environment of an interpreter that has no kvps.

    In ``folder`` is a link to our package and nothing else: with PYTHONPATH on site-packages, a
    peer would find our numpy too.
    """
    return config.environment({**THREADS, "PYTHONPATH": folder}, {})


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port: int = free.getsockname()[1]
        return port
