"""How long a job with copies takes from the SIGKILL of a server to its next closed round.

    python -m benchmarks.recovery [--kills 20] [--size 100000]

Two workers and two servers with ``--replicas 1`` train as processes of their own. One server after the other
is killed as soon as both servers have two copies again. Printed are the median, the 99th percentile and the
longest time from the kill until worker 0 has ended the first round that it began after the kill, the load of
the machine, and whether both workers end with the same weights.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.001
LIMIT_S = 120.0
TRAIN = """
import hashlib, os, sys, time
import torch
import kvps
folder, size = sys.argv[1], int(sys.argv[2])
kv = kvps.create("dist_sync")
names = [f"w{at}" for at in range(8)]
kv.init(names, [torch.zeros(size) for _ in names])
kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
weights = [torch.zeros(size) for _ in names]
generator = torch.Generator().manual_seed(kv.rank)
go_on = torch.zeros(1)
kv.init("go on", go_on)
steps = open(f"{folder}/steps.{kv.rank}", "w", buffering=1)
while not go_on.item():
    began = time.time()
    kv.pushpull(names, [torch.randn(size, generator=generator) for _ in names], out=weights)
    steps.write(f"{began} {time.time()}\\n")
    kv.pushpull("go on", torch.tensor([-10.0 * os.path.exists(f"{folder}/end")]), out=go_on)
    time.sleep(0.005)
print("weights", hashlib.sha256(b"".join(each.numpy().tobytes() for each in weights)).hexdigest(), flush=True)
"""


def until(look: Callable[[], object], what: str) -> None:
    """Wait until ``look`` returns something true."""
    limit = time.monotonic() + LIMIT_S
    while not look():
        if time.monotonic() > limit:
            raise SystemExit(f"no {what} in {LIMIT_S:.0f} s")
        time.sleep(POLL_S)


def server_pid(parent: int, rank: int) -> int:
    """Return the process of a server that ``parent`` has started."""
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_text().split("\0")
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) != parent:
                continue
        except (OSError, ValueError, IndexError):
            continue
        if "kvps.cli.server" in words and words[words.index("--rank") + 1] == str(rank):
            return int(folder.name)
    raise SystemExit(f"no process of server {rank}")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--size", type=int, default=100_000, help="elements of each of 8 keys")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        words = [
            "-n",
            "2",
            "-s",
            "2",
            "--replicas",
            "1",
            "--max-restarts",
            str(parsed.kills),
            "--log-level",
            "info",
        ]
        script = [sys.executable, folder / "train.py", folder, str(parsed.size)]
        with (folder / "log").open("wb") as log:
            argv = [sys.executable, "-m", "kvps.cli.launch", *words, "--", *script]
            job = subprocess.Popen(argv, stdout=log, stderr=log)
            try:
                took = [_kill(job.pid, folder, number) for number in range(parsed.kills)]
                (folder / "end").touch()
                code = job.wait(LIMIT_S)
            finally:
                job.send_signal(signal.SIGTERM)
                job.wait()
        weights = set(re.findall(r"weights (\w+)", (folder / "log").read_text()))
    took.sort()
    p50, p99 = took[len(took) // 2], took[int(len(took) * 0.99)]
    print(
        f"{len(took)} kills: p50 {1e3 * p50:.0f} ms, p99 {1e3 * p99:.0f} ms, "
        f"longest {1e3 * took[-1]:.0f} ms; load {os.getloadavg()[0]:.1f}; exit code {code}, "
        f"{'equal' if len(weights) == 1 else 'DIFFERENT'} weights"
    )
    return code


def _kill(job: int, folder: Path, number: int) -> float:
    """Kill a server once all have two copies; return the seconds until the next round has ended."""
    level = 2 + 2 * number
    log, steps = folder / "log", folder / "steps.0"
    until(lambda: log.read_text().count("is level: 2 of 2 copies") >= level and steps.exists(), "copies")
    pid = server_pid(job, number % 2)
    at = time.time()
    os.kill(pid, signal.SIGKILL)

    def ended() -> float:
        rows = [line.split() for line in steps.read_text().splitlines()[-100:]]
        return next((float(row[1]) for row in rows if len(row) == 2 and float(row[0]) > at), 0.0)

    until(ended, "round")
    return ended() - at


if __name__ == "__main__":
    sys.exit(main())
