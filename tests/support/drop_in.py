"""Ranks of the drop-in interfaces: workers of a LocalCluster, between ``init()`` and ``shutdown()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import kvps
import kvps.horovod as hvd

Run = Callable[[Callable[[int], Any]], list[Any]]


def ranks(count: int) -> Iterator[Run]:
    """A function that runs work on each rank, and returns the results by rank; after an error, in a new cluster."""
    clusters: list[kvps.LocalCluster] = []

    def end(error: BaseException | None = None) -> None:
        while clusters:
            clusters.pop().__exit__(type(error) if error else None, error, None)

    def run(work: Callable[[int], Any]) -> list[Any]:
        def each(rank: int) -> Any:
            hvd.init(process_sets="dynamic")
            try:
                return work(rank)
            finally:
                hvd.shutdown()

        if not clusters:
            clusters.append(kvps.LocalCluster(workers=count, servers=2).__enter__())
        try:
            return clusters[0].run(each)
        except BaseException as error:
            end(error)
            raise

    try:
        yield run
    finally:
        end()


def given(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return what ``rank`` has: small whole numbers, so that sums and products are exact in every type."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def check_collectives(rank: int, dtype: torch.dtype, *shape: int) -> None:
    """Compare each collective with what follows from the tensors of all ranks."""
    size = hvd.size()
    every = [given(one, dtype, *shape) for one in range(size)]
    mine = every[rank].clone()
    whole = torch.stack([one.to(torch.float64) for one in every])
    _check_reductions(mine, whole)
    equal(mine, every[rank])
    for root in range(size):
        equal(hvd.broadcast(mine, root), every[root])
        place = mine.clone()
        assert hvd.broadcast_(place, root) is place
        equal(place, every[root])
    if not shape or shape[0] < size:
        return
    uneven = [given(one, dtype, one + 1, *shape[1:]) for one in range(size)]
    equal(hvd.allgather(uneven[rank]), torch.cat(uneven))
    rows = [shape[0] // size + (one < shape[0] % size) for one in range(size)]
    equal(hvd.reducescatter(mine, op=hvd.Sum), whole.sum(0).to(dtype).split(rows)[rank])
    splits = torch.tensor([shape[0] - size + 1, *[1] * (size - 1)])
    found, received = hvd.alltoall(mine, splits)
    equal(found, torch.cat([one.split(splits.tolist())[rank] for one in every]))
    assert received.tolist() == [int(splits[rank])] * size


def _check_reductions(mine: torch.Tensor, whole: torch.Tensor) -> None:
    dtype = mine.dtype
    for op, wanted in (
        (hvd.Sum, whole.sum(0)),
        (hvd.Min, whole.amin(0)),
        (hvd.Max, whole.amax(0)),
        (hvd.Product, whole.prod(0)),
    ):
        equal(hvd.allreduce(mine, op=op), wanted.to(dtype))
    mean = hvd.allreduce(mine)
    torch.testing.assert_close(mean, (whole.sum(0) / len(whole)).to(dtype))
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    equal(scaled, whole.sum(0).to(dtype))
    place = mine.clone()
    assert hvd.allreduce_(place, op=hvd.Sum) is place
    equal(place, whole.sum(0).to(dtype))
