"""The time of a step with KVPS_AUTOTUNE=1 beside that of the defaults, in turns.

    python benchmarks/autotune.py [--places shm tcp] [--turns 3] [--workload resnet50]
    sudo python benchmarks/autotune.py --places 100mbit 1gbit 10gbit

A place is shared memory, loopback sockets (``tcp``), or the rate of a link: then each host has a worker and a server, and
is a network namespace behind a link of that rate (root, Linux). A step is one ``Trainer.step()`` with the update on
the servers, without computing, so its time is all communication.

Each turn starts a cluster for each of the two, and the next turn starts them in the other order. For each the table has the
median step of every turn, and at last the median of the ratios of a turn. ``--env`` sets variables for both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve()
BURSTS = {"gbit": "2m", "mbit": "256k"}
"""Bytes of a burst, by the unit of the rate: a full link needs more where it is fast."""


def main() -> None:
    """Measure every place, or be a worker of one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--places", nargs="+", default=["shm", "tcp"], help="shm, tcp, or a rate")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=25, help="steps of a turn; the first 3 do not count"
    )
    parser.add_argument("--workload", default="resnet50", help="as in kvps bench")
    parser.add_argument("--count", type=int, default=2, help="workers, and as many servers")
    parser.add_argument("--env", nargs="*", default=[], help="NAME=VALUE for both")
    parser.add_argument("--as-worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_worker:
        work(given)
        return
    for place in given.places:
        measure(given, place)


def measure(given: argparse.Namespace, place: str) -> None:
    """Print the figures of one place."""
    found: dict[str, list[dict[str, Any]]] = {"0": [], "1": []}
    for turn in range(given.turns):
        for tuned in ("0", "1") if turn % 2 == 0 else ("1", "0"):
            one = run(given, place, tuned)
            found[tuned].append(one)
            if one["line"]:
                print(f"  {one['line']}", flush=True)
    medians = {tuned: [one["ms"] for one in each] for tuned, each in found.items()}
    ratios = [new / old for old, new in zip(medians["0"], medians["1"], strict=True)]
    begun = [median(one["created_s"] for one in found[tuned]) for tuned in ("0", "1")]
    cpu = [median(one["cpu_ms"] for one in found[tuned]) for tuned in ("0", "1")]
    print(
        f"{place:>8} {given.workload}: defaults {_shown(medians['0'])} ms, autotuned {_shown(medians['1'])} ms, "
        f"ratios {' '.join(f'{ratio:.2f}' for ratio in sorted(ratios))}, median {median(ratios):.2f}; rank "
        f"0's processor {cpu[0]:.1f} ms of a step, and {cpu[1]:.1f} ms; the "
        f"Trainer took {begun[0]:.1f} s, and {begun[1]:.1f} s",
        flush=True,
    )


def _shown(times_ms: list[float]) -> str:
    return " ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" for ms in times_ms)


def run(given: argparse.Namespace, place: str, tuned: str) -> dict[str, Any]:
    """Run one cluster; return what rank 0 measured."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "KVPS_AUTOTUNE": tuned}
    env |= dict(one.split("=", 1) for one in given.env)
    words = [sys.executable, str(HERE), "--as-worker", "--workload", given.workload]
    words += ["--steps", str(given.steps), "--count", str(given.count)]
    if place != "shm":
        env["KVPS_TRANSPORT"] = "tcp"
    if place in ("shm", "tcp"):
        launch = [sys.executable, "-m", "kvps.cli.launch", "-n", str(given.count), "--", *words]
        done = subprocess.run(launch, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{place}: exit code {done.returncode}\n{done.stderr}")
        return _read(done.stdout + done.stderr)
    return _run_on_links(given, place, words, env)


def _run_on_links(
    given: argparse.Namespace, rate: str, words: list[str], env: dict[str, str]
) -> dict[str, Any]:
    from benchmarks.compare.networks import namespaces

    namespaces.BURST = BURSTS["gbit" if rate.endswith("gbit") else "mbit"]
    with ExitStack() as opened:
        hosts = opened.enter_context(namespaces.Namespaces(given.count, rate))
        scheduler = f"tcp://{hosts.address(0)}:9091"
        env = {**env, "KVPS_SCHEDULER": scheduler, "KVPS_INSECURE": "1"}

        def start(host: int, *argv: str, **more: Any) -> subprocess.Popen[str]:
            return subprocess.Popen(hosts.inside(host, list(argv)), env=env, text=True, **more)

        cli = (sys.executable, "-m", "kvps.cli.scheduler", "--bind", scheduler)
        counts = ("--workers", str(given.count), "--servers", str(given.count))
        others = [start(0, *cli, *counts)]
        for host in range(given.count):
            bind = f"tcp://{hosts.address(host)}:0"
            others.append(start(host, sys.executable, "-m", "kvps.cli.server", "--bind", bind))
        workers = [
            start(host, *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for host in range(given.count)
        ]
        said = [one.communicate()[0] for one in workers]
        codes = [one.returncode for one in workers]
        if any(codes):
            for one in others:
                one.terminate()
        for one in others:
            one.wait()
    if any(codes):
        raise SystemExit(f"{rate}: exit codes {codes}\n{''.join(said)}")
    return _read("\n".join(said))


def _read(said: str) -> dict[str, Any]:
    """Return the figures of rank 0, and its line of log."""
    lines = said.splitlines()
    (record,) = [line for line in lines if '"ms"' in line]
    found: dict[str, Any] = json.loads(record[record.index("{") :])
    logged = [line[line.index("KVPS_AUTOTUNE") :] for line in lines if "KVPS_AUTOTUNE:" in line]
    return {**found, "line": logged[0] if logged else ""}


def work(given: argparse.Namespace) -> None:
    """Make steps; rank 0 prints what they took."""
    import torch

    import kvps
    from kvps.bench.workloads import shapes_of

    shapes = shapes_of(given.workload)
    params = {
        f"{place}": torch.nn.Parameter(torch.zeros(shape)) for place, shape in enumerate(shapes)
    }
    begun_at = time.perf_counter()
    kv = kvps.create("dist_sync")  # the cluster is complete
    begun_at = time.perf_counter()
    trainer = kvps.Trainer(params, "sgd", {"lr": 1e-6}, kvstore="dist_sync")
    created_s = time.perf_counter() - begun_at
    gradients = [torch.randn_like(param) * 1e-3 for param in params.values()]
    times: list[float] = []
    cpu_at = time.process_time()
    for _ in range(given.steps):
        for param, gradient in zip(params.values(), gradients, strict=True):
            param.grad = gradient
        step_at = time.perf_counter()
        trainer.step(given.count)
        times.append(time.perf_counter() - step_at)
    cpu_ms = (time.process_time() - cpu_at) * 1e3 / given.steps
    if kv.rank == 0:
        found = {"ms": median(times[3:]) * 1e3, "cpu_ms": cpu_ms, "created_s": created_s}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
