"""What a step costs whose gradient is sparse, beside one whose gradient is dense.

    kvps-launch -n 2 -s 2 -- python benchmarks/sparse_steps.py [--front-end optimizer] [--rows 1000000]

A table of words is trained by plain SGD, each worker on other words in each step: with
``Embedding(sparse=True)``, and without. ``optimizer`` is a DistributedOptimizer that updates on the
workers, ``servers`` one whose servers do, ``trainer`` a Trainer. Printed are medians of rank 0, of a step
with its backward pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import kvps
import kvps.torch

FRONT_ENDS = ("optimizer", "servers", "trainer")


def main() -> None:
    """Measure both kinds of step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--front-end", choices=FRONT_ENDS, default=FRONT_ENDS[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table")
    parser.add_argument("--width", type=int, default=64, help="elements of a row")
    parser.add_argument("--words", type=int, default=10_000, help="words that a worker uses in a step")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    found = {is_sparse: median_ms(given, is_sparse) for is_sparse in (False, True)}
    if kvps.create("dist_sync").rank == 0:
        print(
            f"{given.front_end}, {given.words} of {given.rows} x {given.width}: dense "
            f"{found[False]:.1f} ms, sparse {found[True]:.1f} ms, {found[False] / found[True]:.1f} x"
        )


def median_ms(given: argparse.Namespace, is_sparse: bool) -> float:
    """Return what a step takes."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(given.rows, given.width, sparse=is_sparse)
    step, rank = stepping(given.front_end, table)
    torch.manual_seed(1 + rank)
    times = []
    for _ in range(given.steps + 3):
        words = torch.randint(given.rows, (given.words,))
        table.zero_grad()
        begin = time.perf_counter()
        table(words).square().mean().backward()
        step()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[3:])


def stepping(front_end: str, table: torch.nn.Module) -> tuple[Callable[[], object], int]:
    """Return what makes a step, and the rank."""
    kv = kvps.create("dist_sync", timeout=600)
    if front_end == "trainer":
        trainer = kvps.Trainer(table, "sgd", {"lr": 0.1}, kv)
        return lambda: trainer.step(1), kv.rank
    sgd = torch.optim.SGD(table.parameters(), lr=0.1)
    optimizer = kvps.torch.DistributedOptimizer(
        sgd, table, kv, update_on_kvstore=front_end == "servers", op="sum"
    )
    return optimizer.step, kv.rank


if __name__ == "__main__":
    main()
