"""Ranks of the drop-in interfaces: workers of a LocalCluster, between ``init()`` and ``shutdown()``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

import kvps
import kvps.compat.horovod as hvd

Run = Callable[[Callable[[int], Any]], list[Any]]
SEEDED = threading.Lock()
"""Held while weights are drawn: ranks are threads, and share torch's generator."""


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


def net(seed: int = 0) -> torch.nn.Module:
    """Return a model whose first weights depend on nothing but ``seed``."""
    with SEEDED:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def alone(passes: int = 1, factor: float = 1.0, steps: int = 3) -> torch.nn.Module:
    """Return what one process learns from the batches of two ranks."""
    model = net()
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        for item in range(passes):
            for rank in range(2):
                (loss_of(model, batch(rank, step * passes + item)) * factor / 2).backward()
        optimizer.step()
    return model


def close(found: torch.nn.Module, wanted: torch.nn.Module, atol: float = 1e-6) -> None:
    for item, other in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(item, other, rtol=0, atol=atol)


def given(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return what ``rank`` has: small whole numbers, so that sums and products are exact in every type."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def check_collectives(rank: int, dtype: torch.dtype, *shape: int) -> None:
    """Compare each collective with what follows from the tensors of all ranks."""
    size = hvd.size()
    every = [given(item, dtype, *shape) for item in range(size)]
    mine = every[rank].clone()
    whole = torch.stack([item.to(torch.float64) for item in every])
    _check_reductions(mine, whole)
    equal(mine, every[rank])
    for root in range(size):
        equal(hvd.broadcast(mine, root), every[root])
        place = mine.clone()
        assert hvd.broadcast_(place, root) is place
        equal(place, every[root])
    if not shape or shape[0] < size:
        return
    uneven = [given(item, dtype, item + 1, *shape[1:]) for item in range(size)]
    equal(hvd.allgather(uneven[rank]), torch.cat(uneven))
    rows = [shape[0] // size + (item < shape[0] % size) for item in range(size)]
    equal(hvd.reducescatter(mine, op=hvd.Sum), whole.sum(0).to(dtype).split(rows)[rank])
    splits = torch.tensor([shape[0] - size + 1, *[1] * (size - 1)])
    found, received = hvd.alltoall(mine, splits)
    equal(found, torch.cat([item.split(splits.tolist())[rank] for item in every]))
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
