"""The time of a push and pull in an allreduce store, with its own part beside gloo's.

kvps-launch -n 2 -s 0 -- python benchmarks/allreduce.py [WORKLOAD ...]        resnet50 small
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

import kvps
from kvps.tools.bench.workloads import shapes_of

ROUNDS, WARM_UP = 30, 3


def main(workloads: list[str]) -> None:
    """Measure each workload on every rank; rank 0 prints."""
    torch.set_num_threads(1)
    for workload in workloads:
        with kvps.create("allreduce") as kv:
            shapes = shapes_of(workload)
            keys = [str(number) for number in range(len(shapes))]
            gradients = [torch.ones(shape) for shape in shapes]
            outs = [torch.empty(shape) for shape in shapes]
            kv.init(keys, gradients)
            times_ms, called_ms = [], []
            for _ in range(WARM_UP + ROUNDS):
                kv.barrier()
                began = time.perf_counter()
                kv.push(keys, gradients)
                called_ms.append(1e3 * (time.perf_counter() - began))
                kv.pull(keys, out=outs)
                times_ms.append(1e3 * (time.perf_counter() - began))
            assert all(bool((out == kv.num_workers).all()) for out in outs)
            if kv.rank == 0:
                whole, pushed = (statistics.median(item[WARM_UP:]) for item in (times_ms, called_ms))
                print(f"{workload}: {whole:.2f} ms a push and pull; push returns after {pushed:.2f} ms")


if __name__ == "__main__":
    main(sys.argv[1:] or ["resnet50", "small"])
