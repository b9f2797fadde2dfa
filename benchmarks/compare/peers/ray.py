"""Ray's parameter-server pattern: server and worker actors, gradients through the object store.

A driver, in Ray's own interpreter, starts all actors on this machine and measures: it alone knows
when a round begins and ends. There is no optimizer; the servers sum.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from kvps.tools.bench import rounds
from kvps.tools.bench.rounds import WARM_UP, Row, Truth
from kvps.tools.bench.workloads import Shapes, numbers, payload_bytes, shapes_of

STORE_BYTES_MIN = 1 << 30


class RayServer:
    """Sums one part of all numbers."""

    def sum(self, *parts: Row) -> Row:
        """Return the sum of one part of every worker."""
        total: Row = np.add(parts[0], parts[1]) if len(parts) > 1 else parts[0].copy()
        for part in parts[2:]:
            total += part
        return total


class RayWorker:
    """Has gradients, and takes sums."""

    def __init__(self, shapes: Shapes, rank: int, workers: int, cuts: Sequence[int]) -> None:
        self._rank = rank
        self._cuts = list(itertools.pairwise(cuts))
        self._gradients = np.empty(numbers(shapes), np.float32)
        self._out = np.empty_like(self._gradients)
        self._truth = Truth(workers, "sum")

    def write(self, number: int) -> None:
        """Write the gradients of a round."""
        rounds.spread(rounds.noise(number, self._rank), [self._gradients])

    def push(self) -> Any:
        """Return one part for each server."""
        parts = tuple(self._gradients[low:high] for low, high in self._cuts)
        return parts if len(parts) > 1 else parts[0]

    def pull(self, *sums: Row) -> None:
        """Take the sums."""
        for (low, high), item in zip(self._cuts, sums, strict=True):
            self._out[low:high] = item

    def check(self, number: int) -> None:
        """Compare every number."""
        where = f"round {number} of rank {self._rank}"
        rounds.demand(self._truth.after(number), [self._out], where)


def main(workload: str, rounds_count: int, workers: int, servers: int) -> None:
    """Measure, and print one line for all workers."""
    shapes = shapes_of(workload)
    ray.init(
        num_cpus=workers + servers,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=max(STORE_BYTES_MIN, 6 * workers * payload_bytes(shapes)),
    )
    cuts = [numbers(shapes) * cut // servers for cut in range(servers + 1)]
    server_actor, worker_actor = ray.remote(RayServer), ray.remote(RayWorker)
    serving = [server_actor.remote() for _ in range(servers)]
    working = [worker_actor.remote(shapes, rank, workers, cuts) for rank in range(workers)]
    times_ms = []
    for number in range(WARM_UP + rounds_count):
        ray.get([item.write.remote(number) for item in working])
        began = time.perf_counter()
        pushed = [item.push.options(num_returns=servers).remote() for item in working]
        parts = [item if servers > 1 else [item] for item in pushed]  # per worker, per server
        sums = [
            server.sum.remote(*(of_worker[place] for of_worker in parts))
            for place, server in enumerate(serving)
        ]
        ray.get([item.pull.remote(*sums) for item in working])
        times_ms.append(1e3 * (time.perf_counter() - began))
        ray.get([item.check.remote(number) for item in working])
    rounds.report(0, times_ms[WARM_UP:])
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
