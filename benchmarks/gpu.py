"""Measures the way of ResNet-50's gradients from a GPU to the servers and back.

    .venv/bin/python benchmarks/gpu.py [WORKERS] [SERVERS]        1 2

In turns, ten rounds each, the time until the new values are on the GPU:

  staged      pushpull of GPU tensors, which come and go through page-locked memory on their own stream
  pageable    the same by hand: .cpu(), pushpull, .copy_()
  4 on device 4 values per key, added up on the GPU (dist_sync_device)
  4 on CPU    4 values per key, each copied and added up on the CPU (dist_sync)

All workers use the first GPU. Needs CUDA.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import kvps
from kvps.bench.workloads import shapes_of

ROUNDS = 10
PER_KEY = 4


def main() -> None:
    """Start the cluster, or be a worker of it."""
    if not torch.cuda.is_available():
        raise SystemExit("this machine has no CUDA device; nothing was measured")
    if sys.argv[1:] == ["worker"]:
        work()
        return
    workers, servers = [*sys.argv[1:], *("1", "2")[len(sys.argv) - 1 :]]
    cluster = ["-m", "kvps.cli.launch", "-n", workers, "-s", servers, "--"]
    raise SystemExit(
        subprocess.call([sys.executable, *cluster, sys.executable, __file__, "worker"])
    )


def work() -> None:
    """Measure as one worker; rank 0 prints."""
    shapes = shapes_of("resnet50")
    keys = [f"k{index}" for index in range(len(shapes))]
    gradients = [[torch.empty(one, device="cuda") for one in shapes] for _ in range(PER_KEY)]
    out = [torch.empty(one, device="cuda") for one in shapes]
    stores = {name: kvps.create(name) for name in ("dist_sync", "dist_sync_device")}
    for kv in stores.values():
        kv.init(keys, [torch.zeros(one) for one in shapes])
    plain, on_device = stores["dist_sync"], stores["dist_sync_device"]
    every = [list(values) for values in zip(*gradients, strict=True)]

    def pageable() -> None:
        found = plain.pushpull(keys, [one.cpu() for one in gradients[0]])
        for target, value in zip(out, found, strict=True):
            target.copy_(value)

    ways: dict[str, Callable[[], object]] = {
        "staged": lambda: plain.pushpull(keys, gradients[0], out=out),
        "pageable": pageable,
        "4 on device": lambda: on_device.pushpull(keys, every, out=out),
        "4 on CPU": lambda: plain.pushpull(keys, every, out=out),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 2):  # the first two warm up
        for name, way in ways.items():
            for values in gradients:
                for one in values:
                    one.normal_()
            torch.cuda.synchronize()
            plain.barrier()
            begin = time.perf_counter()
            way()
            torch.cuda.synchronize()
            if number >= 2:
                times[name].append(1e3 * (time.perf_counter() - begin))
            check(plain, every if name.startswith("4") else [[one] for one in gradients[0]], out)
    if plain.rank == 0:
        lines = [
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kvps {kvps.__version__}"
        ]
        for name, found in times.items():
            middle, low, high = statistics.median(found), min(found), max(found)
            lines.append(f"{name:12} {middle:8.1f} ms ({low:.1f} to {high:.1f})")
        sys.stdout.write("\n".join([*lines, ""]))


def check(kv: kvps.KVStore, given: list[list[torch.Tensor]], out: list[torch.Tensor]) -> None:
    """Demand that one worker's values came back as their sum."""
    if kv.num_workers == 1:
        for values, found in zip(given, out, strict=True):
            torch.testing.assert_close(found, torch.stack(values).sum(0))


if __name__ == "__main__":
    main()
