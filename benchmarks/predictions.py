"""How near ``kvps doctor --predict`` comes to steps that are measured on links of a set rate.

    sudo .venv/bin/python -m benchmarks.predictions [--only 0 3 7]

Workers and servers run in network namespaces, each machine behind its own link both ways (root, Linux).
The model waits as an accelerator would (benchmarks/overlap_worker.py), so that two cores carry several
workers: the prediction knows the seconds that it waits, its bytes and gradients, the link, and that all
processes share this machine's cores. Printed is each prediction beside the median step of worker 0. The exit
code is 1 if more than a fifth are off by over 25 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks.compare.networks.layout import bytes_per_s
from benchmarks.compare.networks.namespaces import Namespaces, demand_root
from kvps import config
from kvps.tools.doctor.prediction import WAYS, Job, step_s

FORWARD = 1 / 3
ARRAYS = 20
OFF = 0.25
BY_NAME = {way.name: way for way in WAYS}


class Trial(NamedTuple):
    """One job on links of one rate."""

    rate: str
    way: str
    megabytes: float
    step_s: float
    workers: int
    servers: int
    is_apart: bool


TRIALS = (
    Trial("10mbit", "float32", 2, 0.3, 2, 1, True),
    Trial("10mbit", "int8", 4, 0.3, 3, 3, False),
    Trial("10mbit", "10 local steps", 2, 0.2, 2, 2, True),
    Trial("30mbit", "float32", 4, 2.0, 2, 2, False),
    Trial("100mbit", "float32", 20, 0.5, 3, 1, True),
    Trial("100mbit", "fp16", 20, 0.5, 2, 2, True),
    Trial("100mbit", "10 local steps", 10, 0.2, 4, 2, False),
    Trial("100mbit", "float32, gloo", 20, 0.5, 3, 0, True),
    Trial("300mbit", "float32", 30, 0.5, 2, 2, True),
    Trial("300mbit", "int8", 30, 1.0, 3, 3, False),
    Trial("1gbit", "float32", 20, 0.6, 2, 1, True),
    Trial("1gbit", "float32", 30, 1.5, 3, 3, False),
)


def main() -> int:
    """Measure, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, nargs="+", default=range(len(TRIALS)), help="numbers of trials")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (merges, with local steps)")
    parser.add_argument("--as-worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_worker is not None:
        work(Trial(*json.loads(given.as_worker)), given.steps)
        return 0
    demand_root()
    print("| link | way | MB | computes, s | workers + servers | predicted, s | measured, s | off | load |")
    print("|---|---|---|---|---|---|---|---|---|")
    near = 0
    for number in given.only:
        trial = TRIALS[number]
        expected, seen = predicted(trial), measured(trial, given.steps)
        off = expected / seen - 1
        near += abs(off) <= OFF
        beside = "" if trial.is_apart or not trial.servers else ", beside"
        print(
            f"| {trial.rate} | {trial.way} | {trial.megabytes:g} | {trial.step_s:g} "
            f"| {trial.workers} + {trial.servers}{beside} | {expected:.2f} | {seen:.2f} | {100 * off:+.0f} % "
            f"| {os.getloadavg()[0]:.1f} |",
            flush=True,
        )
    print(f"\n{near} of {len(given.only)} within {100 * OFF:.0f} %")
    return 0 if near >= 0.8 * len(given.only) else 1


def predicted(trial: Trial) -> float:
    """Return the seconds of a step, as ``kvps doctor --predict`` would say."""
    job = Job(
        model_bytes=_numbers(trial) * ARRAYS * 4,
        arrays=ARRAYS,
        step_s=trial.step_s,
        link_bytes_s=bytes_per_s(trial.rate),
        backward=1 - FORWARD,
        is_apart=trial.is_apart,
        shared_cores=os.cpu_count() or 1,
    )
    return step_s(job, BY_NAME[trial.way], trial.workers, trial.servers)


def _numbers(trial: Trial) -> int:
    """Return the numbers of one array."""
    return int(trial.megabytes * 1e6) // 4 // ARRAYS


def measured(trial: Trial, steps: int) -> float:
    """Run the job; return the median of worker 0's steps in seconds."""
    count = 1 + trial.workers + (trial.servers if trial.is_apart else 0)
    running: list[subprocess.Popen[bytes]] = []
    with Namespaces(count, trial.rate) as hosts, tempfile.TemporaryDirectory() as folder:
        scheduler = f"tcp://{hosts.address(0)}:9091"
        place = {"OMP_NUM_THREADS": "1"} | ({"KVPS_SCHEDULER": scheduler} if trial.servers else {})
        env = {**config.environment(place, {}), "PATH": os.environ["PATH"]}

        def start(host: int, *words: str, **more: str) -> None:
            argv = hosts.inside(host, [sys.executable, *words])
            running.append(subprocess.Popen(argv, env={**env, **more}))

        if trial.servers:
            counts = ("--workers", str(trial.workers), "--servers", str(trial.servers))
            start(0, "-m", "kvps.cli.scheduler", *counts, "--bind", scheduler, "--insecure")
        for rank in range(trial.servers):
            host = 1 + rank + (trial.workers if trial.is_apart else 0)
            bind = ("--bind", f"tcp://{hosts.address(host)}:0")
            start(host, "-m", "kvps.cli.server", "--scheduler", scheduler, *bind, "--insecure")
        words = ("-m", "benchmarks.predictions", "--steps", str(steps), "--as-worker", json.dumps(trial))
        for rank in range(trial.workers):
            ring = {"MASTER_ADDR": hosts.address(1), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(trial.workers)}
            ranks |= {"KVPS_RANK": str(rank)} if trial.servers else {}
            start(1 + rank, *words, **ring, **ranks, REPORT=str(Path(folder) / "steps.json"))
        codes = [process.wait() for process in reversed(running)]
        if any(codes):
            raise SystemExit(f"{trial}: the processes ended with {codes}")
        return float(statistics.median(json.loads((Path(folder) / "steps.json").read_text())))


def work(trial: Trial, steps: int) -> None:
    """Train, and let worker 0 report the seconds of its steps."""
    import torch

    import kvps.torch
    from benchmarks.overlap_worker import Layer

    waits = trial.step_s * FORWARD / ARRAYS, trial.step_s * (1 - FORWARD) / ARRAYS
    model: torch.nn.Module = torch.nn.Sequential(*[Layer((_numbers(trial),), *waits) for _ in range(ARRAYS)])
    called, sgd = model, torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer: torch.optim.Optimizer = sgd
    every = BY_NAME[trial.way].every
    codec = {"type": trial.way, "pull": True} if trial.way in ("fp16", "int8", "2bit") else None
    if trial.way == "float32, gloo":
        torch.distributed.init_process_group("gloo")
        called = torch.nn.parallel.DistributedDataParallel(model)
    elif every > 1:
        kvps.torch.DiLoCo(model, sgd, sync_every=every).__enter__()
    else:
        optimizer = kvps.torch.DistributedOptimizer(sgd, model, compression=codec)
    ends: list[float] = []
    for number in range(every * (steps + 2)):
        optimizer.zero_grad()
        called(torch.ones(1, requires_grad=True)).sum().backward()
        optimizer.step()
        if (number + 1) % every == 0:
            ends.append(time.perf_counter())
    if os.environ["RANK"] == "0":
        times = [(after - before) / every for before, after in pairwise(ends[1:])]
        Path(os.environ["REPORT"]).write_text(json.dumps(times))
    if trial.way == "float32, gloo":
        torch.distributed.barrier()


if __name__ == "__main__":
    sys.exit(main())
