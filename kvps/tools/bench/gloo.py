"""One worker of torch.distributed's gloo: sums in buckets, as DistributedDataParallel does.

``copy`` gathers gradients into buckets and copies the sums back, as DDP does by default;
``in-place`` has them in buckets from the start, as DDP with ``gradient_as_bucket_view``. All
buckets of a round are under way at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from kvps.tools.bench import rounds
from kvps.tools.bench.rounds import Row
from kvps.tools.bench.workloads import FLOAT_BYTES, Shapes

BUCKET_BYTES = 25 << 20
"""The bytes that DistributedDataParallel sums in one call by default."""


class Gloo:
    """All-reduces the arrays of one model."""

    def __init__(self, shapes: Shapes, is_in_place: bool) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank: int = dist.get_rank()
        self.workers: int = dist.get_world_size()
        self._is_in_place = is_in_place
        self._parts = buckets_of([math.prod(shape) for shape in shapes])
        self._buckets = [torch.empty(sum(sizes)) for sizes in self._parts]
        self._gradients = [[torch.empty(size) for size in sizes] for sizes in self._parts]
        held = self._buckets if is_in_place else [array for many in self._gradients for array in many]
        self._rows = [array.numpy() for array in held]

    def gradients(self) -> Sequence[Row]:
        """Return the gradients, or the buckets that hold them, as rows."""
        return self._rows

    def ready(self) -> None:
        """Wait for all workers."""
        dist.barrier()

    def step(self) -> None:
        """Sum every bucket over all workers."""
        works = []
        for bucket, gradients in zip(self._buckets, self._gradients, strict=True):
            if not self._is_in_place:
                torch.cat(gradients, out=bucket)
            works.append(dist.all_reduce(bucket, async_op=True))
        for number, work in enumerate(works):
            work.wait()
            if not self._is_in_place:
                sums = torch.split(self._buckets[number], self._parts[number])
                torch._foreach_copy_(self._gradients[number], list(sums))

    def results(self) -> Sequence[Row]:
        """Return the sums, which lie where the gradients were."""
        return self._rows

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def buckets_of(sizes: Sequence[int]) -> list[list[int]]:
    """Return sizes in groups that each end with the array that fills a bucket."""
    buckets: list[list[int]] = [[]]
    for size in sizes:
        if FLOAT_BYTES * sum(buckets[-1]) >= BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(size)
    return buckets


def make(shapes: Shapes, how: str, rule: str) -> rounds.SystemUnderTest:
    """Return a worker; gloo knows sums only."""
    return Gloo(shapes, how == "in-place")


if __name__ == "__main__":
    rounds.main(make, sys.argv[1:])
