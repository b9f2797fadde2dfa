"""What copies of servers (``--replicas 1``) cost a job: pushes a second, and processor time of the servers.

    python -m benchmarks.copies [--modes async,ssp,sync] [--size 100000] [--pushes 300] [--workers 2] ...

Workers and two servers exchange eight arrays, as processes of their own, without copies and with them in
turns. ``pushpull`` waits for values in each step; ``push`` does not, and all pushes are waited for at the
end. Printed are the medians of the turns: pushes of a worker in a second, milliseconds of processor time of
both servers for each, and the load of the machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.recovery import LIMIT_S, server_pid, until

WAYS = ("pushpull", "push")
TICKS = os.sysconf("SC_CLK_TCK")
TRAIN = """
import os, sys, time
import torch
import kvps
folder, mode, way, size, pushes = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
kv = kvps.create(f"dist_{mode}", **({"staleness": 4} if mode == "ssp" else {}))
names = [f"w{at}" for at in range(8)]
weights, gradients = [[torch.ones(size) for _ in names] for _ in range(2)]
kv.init(names, weights)
kv.set_optimizer("sgd", learning_rate=1e-6, momentum=0.9)
def train(count):
    for _ in range(count):
        if way == "push":
            kv.push(names, gradients)
        else:
            kv.pushpull(names, gradients, out=weights)
    kv.pull(names, out=weights)
    kv.barrier()
def meet(mark, after):
    if kv.rank == 0:
        open(f"{folder}/{mark}", "w").close()
    while not os.path.exists(f"{folder}/{after}"):
        time.sleep(0.01)
train(20)
meet("warm", "go")
began = time.perf_counter()
train(pushes)
if kv.rank == 0:
    open(f"{folder}/took", "w").write(str(time.perf_counter() - began))
meet("done", "end")
"""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", default="async,ssp,sync")
    parser.add_argument("--size", type=int, default=100_000, help="elements of each of 8 keys")
    parser.add_argument("--pushes", type=int, default=300)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parsed = parser.parse_args()
    for mode in parsed.modes.split(","):
        for way in WAYS:
            found: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
            for _ in range(parsed.turns):
                for replicas, runs in found.items():
                    runs.append(_run(parsed.workers, replicas, mode, way, parsed.size, parsed.pushes))
            rates, costs = [
                [statistics.median([run[at] for run in runs]) for runs in found.values()] for at in (0, 1)
            ]
            print(
                f"{mode} {way}: {rates[0]:.0f} pushes/s without copies, {rates[1]:.0f} with "
                f"({rates[0] / rates[1]:.2f} times the time); servers {costs[0]:.2f} and {costs[1]:.2f} ms "
                f"for each ({costs[1] / costs[0]:.2f} times); load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    return 0


def _run(workers: int, replicas: int, mode: str, way: str, size: int, pushes: int) -> tuple[float, float]:
    """Return a worker's pushes in a second, and the milliseconds of processor time of servers for each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        words = [
            "-n",
            str(workers),
            "-s",
            "2",
            "--replicas",
            str(replicas),
            "--log-level",
            "info",
            "--",
            sys.executable,
        ]
        script = [folder / "train.py", folder, mode, way, str(size), str(pushes)]
        with (folder / "log").open("wb") as log:
            argv = [sys.executable, "-m", "kvps.cli.launch", *words, *script]
            job = subprocess.Popen(argv, stdout=log, stderr=log)
            try:
                until((folder / "warm").exists, "step")
                level = "is level: 2 of 2 copies"
                until(lambda: (folder / "log").read_text().count(level) >= 2 * replicas, "copy")
                pids = [server_pid(job.pid, rank) for rank in range(2)]
                before = sum(map(_ticks, pids))
                (folder / "go").touch()
                until((folder / "done").exists, "end of the training")
                ticks = sum(map(_ticks, pids)) - before
                (folder / "end").touch()
                job.wait(LIMIT_S)
            finally:
                job.send_signal(signal.SIGTERM)
                job.wait()
        took_s = float((folder / "took").read_text())
    return pushes / took_s, 1e3 * ticks / TICKS / pushes


def _ticks(pid: int) -> int:
    """Return the processor time of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


if __name__ == "__main__":
    sys.exit(main())
