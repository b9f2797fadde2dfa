"""One rank of a group "kvps" whose ranks make different calls: says how and when it was told.

    kvps-launch -n 3 -s 2 -- python tests/integration/mismatch_worker.py CASE...

Each case begins with a new group. Rank 1 makes another call than ranks 0 and 2.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import kvps
import kvps.torch

warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames some calls

RANKS = 3
CASES: dict[str, Callable[[bool], object]] = {}
"""Name -> the call; it is told whether it is that of rank 1."""


def case(call: Callable[[bool], object]) -> Callable[[bool], object]:
    CASES[call.__name__] = call
    return call


def some(odd: bool, *shape: int) -> torch.Tensor:
    """Return a tensor with one more row at rank 1."""
    return torch.ones(shape[0] + odd, *shape[1:])


@case
def other_shape(odd: bool) -> None:
    dist.all_reduce(some(odd, 4))


@case
def same_size_and_other_shape(odd: bool) -> None:
    dist.all_reduce(torch.ones(2, 2) if odd else torch.ones(4))


@case
def other_type(odd: bool) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if odd else torch.float32))


@case
def other_reduction(odd: bool) -> None:
    dist.all_reduce(torch.ones(4), ReduceOp.SUM if odd else ReduceOp.AVG)


@case
def other_reduction_of_a_swap(odd: bool) -> None:
    dist.all_reduce(torch.ones(4), ReduceOp.MIN if odd else ReduceOp.MAX)


@case
def other_operation(odd: bool) -> None:
    if odd:
        dist.broadcast(torch.ones(4), 1)
    else:
        dist.all_reduce(torch.ones(4))


@case
def other_order(odd: bool) -> None:
    calls = [lambda: dist.all_reduce(torch.ones(4)), lambda: dist.broadcast(torch.ones(4), 0)]
    for call in reversed(calls) if odd else calls:
        call()


@case
def other_order_of_calls_under_way(odd: bool) -> None:
    sizes = (5, 4) if odd else (4, 5)
    works = [dist.all_reduce(torch.ones(size), async_op=True) for size in sizes]
    for work in works:
        assert work is not None
        work.wait()
    while True:  # they have met by their names
        dist.barrier()


@case
def other_broadcast_shape(odd: bool) -> None:
    dist.broadcast(some(odd, 4), 0)
    dist.barrier()  # rank 2 has the values of rank 0


@case
def other_destination(odd: bool) -> None:
    dst = 1 if odd else 0
    room = [torch.ones(4) for _ in range(RANKS)] if dist.get_rank() == dst else None
    dist.gather(torch.ones(4), room, dst=dst)
    dist.barrier()


@case
def other_gather_shape(odd: bool) -> None:
    dist.all_gather([some(odd, 4) for _ in range(RANKS)], some(odd, 4))


@case
def other_scatter_shape(odd: bool) -> None:
    dist.reduce_scatter(some(odd, 4), [some(odd, 4) for _ in range(RANKS)])
    dist.barrier()


@case
def other_parts(odd: bool) -> None:
    dist.all_to_all_single(some(odd, 3), torch.ones(3), [1, 1, 1 + odd])
    dist.barrier()


@case
def other_own_part(odd: bool) -> None:
    dist.all_to_all_single(some(odd, 3), torch.ones(3), [1, 1 + odd, 1])


@case
def refused_at_one_rank(odd: bool) -> None:
    if odd:
        dist.all_reduce(torch.ones(4, dtype=torch.bool), ReduceOp.AVG)
    else:
        dist.all_reduce(torch.ones(4))


@case
def other_message(odd: bool) -> None:
    if odd:
        dist.send(torch.ones(5), 0)
    elif dist.get_rank() == 0:
        dist.recv(torch.ones(4), 1)
    dist.barrier()


@case
def refused_in_init(odd: bool) -> None:
    dist.destroy_process_group()
    try:
        dist.init_process_group("kvps", pg_options=object() if odd else None)
    finally:
        dist.init_process_group("kvps")  # the next attempt of all ranks


@case
def the_same(odd: bool) -> None:
    """No mismatch."""
    dist.all_reduce(torch.ones(4))


def main() -> None:
    for name in sys.argv[1:]:
        dist.init_process_group("kvps")
        dist.barrier()
        began = time.monotonic()
        try:
            CASES[name](dist.get_rank() == 1)
            text = "nothing was told"
        except kvps.KvpsError as error:
            text = f"{type(error).__name__}: {error}"
        sys.stdout.write(f"{name} {time.monotonic() - began:.2f} s {text}\n")
        sys.stdout.flush()
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
