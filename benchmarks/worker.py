"""One worker under measurement: times rounds of one workload and prints one line of JSON.

Run by ``benchmarks/run.py``: under kvps-launch with ``kvps`` as system, by itself with ``gloo``.
New random gradients each round; the result is checked outside the timing.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from workloads import WORKLOADS

BUCKET_BYTES = 25 << 20
"""What torch's DistributedDataParallel sums in one call by default."""
WARM_UP = 3


def main() -> None:
    """Measure: worker.py SYSTEM WORKLOAD OPTIMIZER ROUNDS."""
    system, workload, optimizer, rounds = sys.argv[1:5]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes = WORKLOADS[workload]
    gradients = [torch.empty(shape) for shape in shapes]
    if system == "kvps":
        step, check, finish, rank = _kvps(gradients, optimizer)
    else:
        step, check, finish, rank = _gloo(gradients)
    times_ms = []
    for number in range(WARM_UP + int(rounds)):
        generator = torch.Generator().manual_seed(1000 * number + rank)
        for gradient in gradients:
            gradient.normal_(generator=generator)
        begin = time.perf_counter()
        result = step()
        times_ms.append(1e3 * (time.perf_counter() - begin))
        if optimizer == "none":
            check(result, number)
    finish()
    measured = times_ms[WARM_UP:]
    print(
        "RESULT "
        + json.dumps(
            {
                "rank": rank,
                "median_ms": statistics.median(measured),
                "min_ms": min(measured),
                "max_ms": max(measured),
            }
        ),
        flush=True,
    )


Step = Callable[[], list[torch.Tensor]]
Check = Callable[[list[torch.Tensor], int], None]


def _expected(shapes: list[torch.Size], number: int, workers: int) -> torch.Tensor:
    """The sum of all workers' first arrays in round ``number``."""
    total = torch.zeros(shapes[0])
    for rank in range(workers):
        generator = torch.Generator().manual_seed(1000 * number + rank)
        total += torch.empty(shapes[0]).normal_(generator=generator)
    return total


def _kvps(
    gradients: list[torch.Tensor], optimizer: str
) -> tuple[Step, Check, Callable[[], None], int]:
    import kvps

    kv = kvps.create("dist_sync")
    keys = list(range(len(gradients)))
    if optimizer != "none":
        kv.set_optimizer(optimizer, lr=0.01, momentum=0.9)
    kv.init(keys, [torch.zeros_like(one) for one in gradients])
    outs = [torch.empty_like(one) for one in gradients]

    def check(result: list[torch.Tensor], number: int) -> None:
        expected = _expected([one.shape for one in gradients], number, kv.num_workers)
        torch.testing.assert_close(result[0], expected)

    return lambda: kv.pushpull(keys, gradients, out=outs), check, kv.close, kv.rank


def _gloo(gradients: list[torch.Tensor]) -> tuple[Step, Check, Callable[[], None], int]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    buckets: list[list[torch.Tensor]] = [[]]
    for gradient in gradients:
        if sum(one.nbytes for one in buckets[-1]) >= BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(gradient)

    def step() -> list[torch.Tensor]:
        for bucket in buckets:
            row = torch.cat([one.view(-1) for one in bucket])
            dist.all_reduce(row)
            parts = torch.split(row, [one.numel() for one in bucket])
            for one, part in zip(bucket, parts, strict=True):
                one.view(-1).copy_(part)
        return gradients

    def check(result: list[torch.Tensor], number: int) -> None:
        expected = _expected([one.shape for one in gradients], number, dist.get_world_size())
        torch.testing.assert_close(result[0], expected)

    return step, check, dist.destroy_process_group, dist.get_rank()


if __name__ == "__main__":
    main()
