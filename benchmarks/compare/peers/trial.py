"""One trial of MXNet or Ray on this machine: its processes and their environments."""

from __future__ import annotations

import tempfile
from pathlib import Path

import benchmarks
import kvps
from kvps import config
from kvps.launchers.reaper import Reaper
from kvps.tools.bench.figures import Case, TrialTimes
from kvps.tools.bench.local import LOOPBACK, THREADS, Group, free_port, trial_of, worker_flags
from kvps.tools.bench.systems import System


def measure(system: System, case: Case, rounds: int, python: str, reaper: Reaper) -> TrialTimes:
    """Run a system once, in its own interpreter ``python``.

    Raises:
        KvpsError: if it fails, or one of its workers says nothing.
    """
    start = _start_mxnet if system.kind == "mxnet" else _start_ray
    with Group(reaper) as group, tempfile.TemporaryDirectory(prefix="kvps-bench-") as folder:
        for package in (kvps, benchmarks):
            assert package.__file__ is not None
            (Path(folder) / package.__name__).symlink_to(Path(package.__file__).parent)
        start(group, system, case, rounds, python, folder)
        return trial_of(group.wait(), 1 if system.kind == "ray" else case.workers, system.name)


def _start_mxnet(group: Group, system: System, case: Case, rounds: int, python: str, folder: str) -> None:
    env = _foreign_environment(folder)
    env |= {"DMLC_PS_ROOT_URI": LOOPBACK, "DMLC_PS_ROOT_PORT": str(free_port())}
    env |= {"DMLC_NODE_HOST": LOOPBACK, "DMLC_NUM_WORKER": str(case.workers)}
    env |= {"DMLC_NUM_SERVER": str(case.servers)}
    serve = [python, "-c", "import mxnet"]  # which does not return while there is a job
    group.start("mxnet scheduler", serve, {**env, "DMLC_ROLE": "scheduler"}, cwd=folder)
    for rank in range(case.servers):
        group.start(f"mxnet server {rank}", serve, {**env, "DMLC_ROLE": "server"}, cwd=folder)
    argv = [python, "-m", "benchmarks.compare.peers.mxnet", *worker_flags(system, case, rounds)]
    for rank in range(case.workers):
        env_of_worker = {**env, "DMLC_ROLE": "worker"}
        group.start(f"mxnet worker {rank}", argv, env_of_worker, cwd=folder, is_measured=True)


def _start_ray(group: Group, system: System, case: Case, rounds: int, python: str, folder: str) -> None:
    words = [case.workload, str(rounds), str(case.workers), str(case.servers)]
    argv = [python, "-m", "benchmarks.compare.peers.ray", *words]
    env = _foreign_environment(folder)
    group.start("ray driver", argv, env, cwd=folder, is_measured=True)


def _foreign_environment(folder: str) -> dict[str, str]:
    """Return the environment of an interpreter that has no kvps.

    In ``folder`` are links to our two packages and nothing else: with PYTHONPATH on site-packages, a
    peer would find our numpy too.
    """
    return config.environment({**THREADS, "PYTHONPATH": folder}, {})
