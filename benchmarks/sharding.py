"""Measures what a worker holds, and how long a step takes, of a model whose weights live on the servers.

    .venv/bin/python benchmarks/sharding.py

Twelve blocks of 32 MiB, SGD with momentum: ``shard`` is kvps.torch.shard, ``store`` and ``here`` are
DistributedOptimizer with the optimizer on the servers and in the worker. Each is a job of one worker and one
server over TCP, where the memory is the worker's own; in shared memory the pages of the servers that it has
read count, too. Linux.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import kvps.torch

BLOCKS, WIDTH, BATCH = 12, 2048, 32
WAYS = ("shard", "store", "here")


class Block(torch.nn.Module):
    """Two layers of 16 MiB, and a way past them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH, bias=False),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        y: torch.Tensor = x + 0.1 * self.layers(x)
        return y


def peak_mib() -> float:
    """Return the largest resident memory that this process has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("/proc/self/status does not tell VmHWM; this needs Linux")


def main() -> None:
    """Start a job for each way, or train one way and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", nargs="?", choices=WAYS, help="in a job that runs; without it, all in turns")
    parser.add_argument("--steps", type=int, default=10)
    flags = parser.parse_args()
    if flags.way is None:
        launch = (sys.executable, "-m", "kvps.cli.launch", "-n", "1", "-s", "1", "--", sys.executable)
        for way in WAYS:
            argv = [*launch, __file__, way, "--steps", str(flags.steps)]
            subprocess.run(argv, check=True, env=os.environ | {"KVPS_TRANSPORT": "tcp"})
        return
    torch.manual_seed(0)
    kv = kvps.create("dist_sync", average=True)  # with all that a session needs
    before = peak_mib()
    with torch.device("meta" if flags.way == "shard" else "cpu"):
        model = torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if flags.way == "shard":
        step = kvps.torch.shard(model, kv, optimizer=sgd).step
    else:
        on_store = flags.way == "store"
        wrapped = kvps.torch.DistributedOptimizer(sgd, model, kv, update_on_kvstore=on_store)

        def step() -> None:
            wrapped.step()
            wrapped.zero_grad()

    times: list[float] = []
    for _ in range(flags.steps):
        begin = time.perf_counter()
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        step()
        times.append(time.perf_counter() - begin)
    print(
        f"{flags.way}: {BLOCKS} blocks of 32 MiB, memory grew by {peak_mib() - before:.0f} MiB, a step took "
        f"{statistics.median(times[1:]):.2f} s (median)"
    )


if __name__ == "__main__":
    main()
