"""Goodput of a job whose workers come and go: the steps that it made, of those at its usual pace.

    python -m benchmarks.goodput [--seconds 150] [--every 20] [--step 0.1]

A job of 3:6 workers trains with ``on_worker_lost="shrink"`` for ``--seconds`` from its first step on. Every
``--every`` seconds a worker is added, or an added one is killed, in turns. Printed are the steps of worker 0,
the median time between two of them, the goodput (steps times that median, divided by the time that they
took), the longest steps, and the load of the machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

LIMIT_S, START_MAX_S = 60.0, 240.0
TRAIN = """
import os, sys, time
import torch
import kvps
log, step_s = sys.argv[1], float(sys.argv[2])
kv = kvps.create("dist_sync", on_worker_lost="shrink", average=True)
weight, gradient = torch.zeros(200_000), torch.randn(200_000)
kv.init("w", weight)
kv.set_optimizer("sgd", lr=0.01)
kv.resume(["w"])
kv.pull("w", out=weight)
with open(f"{log}.{kv.rank}", "a", buffering=1) as steps:
    while not os.path.exists(f"{log}.end"):
        time.sleep(step_s)
        kv.pushpull("w", gradient, out=weight)
        print(time.time(), file=steps)
"""


def seat_of(output: Path) -> list[str]:
    """Return the flags by which a worker joins, as the launcher prints them."""
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        if found := re.search(r"kvps-worker (--scheduler .*?) -- ", output.read_text()):
            return shlex.split(found[1])
        time.sleep(0.1)
    raise SystemExit(f"the launcher said nothing of workers to add in {LIMIT_S:.0f} s:\n{output.read_text()}")


def await_step(folder: Path) -> None:
    """Wait for the first step of worker 0."""
    limit = time.monotonic() + START_MAX_S
    while not ((steps := folder / "steps.0").exists() and steps.read_text()):
        if time.monotonic() > limit:
            raise SystemExit(f"no step in {START_MAX_S:.0f} s:\n{(folder / 'launch').read_text()}")
        time.sleep(0.1)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two changes")
    parser.add_argument("--step", type=float, default=0.1, help="seconds that a step computes")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = [sys.executable, "-c", TRAIN, str(folder / "steps"), str(parsed.step)]
        launch = [
            sys.executable,
            "-m",
            "kvps.cli.launch",
            "-n",
            "3:6",
            "-s",
            "2",
            "--log-level",
            "info",
            "--",
        ]
        added: list[subprocess.Popen[bytes]] = []
        counts = {"added": 0, "killed": 0}
        with (folder / "launch").open("wb") as output:
            job = subprocess.Popen([*launch, *train], stdout=output, stderr=output)
            seat = seat_of(folder / "launch")
            await_step(folder)
            until = time.time() + parsed.seconds
            while (rest := until - time.time()) > parsed.every:
                time.sleep(min(parsed.every, rest))
                if len(added) > counts["killed"]:
                    os.killpg(added[counts["killed"]].pid, signal.SIGKILL)
                    counts["killed"] += 1
                    continue
                worker = [sys.executable, "-m", "kvps.cli.worker", *seat, "--", *train]
                added.append(subprocess.Popen(worker, stdout=output, stderr=output, start_new_session=True))
                counts["added"] += 1
            time.sleep(max(0.0, until - time.time()))
            (folder / "steps.end").touch()
            code = job.wait()
            for process in added:
                process.wait()
        ends = [float(line) for line in (folder / "steps.0").read_text().splitlines()]
    gaps = [after - before for before, after in pairwise(ends)]
    median_s = statistics.median(gaps)
    goodput = len(gaps) * median_s / (ends[-1] - ends[0])
    longest = ", ".join([f"{gap:.2f}" for gap in sorted(gaps)[-4:]])
    print(
        f"{len(ends)} steps, median {1e3 * median_s:.0f} ms; {counts['added']} workers added, "
        f"{counts['killed']} killed; goodput {goodput:.3f}; longest {longest} s; "
        f"load {os.getloadavg()[0]:.1f}; exit code {code}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
