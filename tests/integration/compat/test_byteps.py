"""``import kvps.compat.byteps as bps``: push_pull and what is built on it, against what one process computes."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvps.compat.byteps as bps
import kvps.compat.horovod as hvd
from kvps.compat.byteps.cross_barrier import CrossBarrier
from tests.support.drop_in import Run

SEEDED = threading.Lock()
"""Held while weights are drawn: ranks are threads, and share torch's generator."""


def net(seed: int = 0) -> torch.nn.Module:
    with SEEDED:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * rank + step))


def mean_grads(passes: int = 1) -> list[torch.Tensor]:
    """Return the means over two ranks of the gradients of ``passes`` batches."""
    models = [net(), net()]
    for rank, model in enumerate(models):
        for step in range(passes):
            model(batch(rank, step)).square()[:, 0].sum().backward()
    pairs = zip(*[list(item.parameters()) for item in models], strict=True)
    return [(param.grad + other.grad) / 2 for param, other in pairs]


def test_push_pull(two: Run) -> None:
    def work(rank: int) -> None:
        bps.declare("hits")
        x = torch.tensor([1.0, 2.0]) * (rank + 1)
        assert bps.push_pull(x, average=False, name="hits").tolist() == [3.0, 6.0]
        assert bps.push_pull(x, name="hits", compression=bps.Compression.fp16).tolist() == [1.5, 3.0]
        assert x.tolist() == [rank + 1.0, 2.0 * (rank + 1)]
        assert bps.push_pull_inplace(x, name="hits") is x
        assert x.tolist() == [1.5, 3.0]
        handles = [bps.push_pull_async(torch.full((2,), rank), False, f"a{n}") for n in range(5)]
        assert all(bps.synchronize(item).tolist() == [1, 1] for item in reversed(handles))
        handle = bps.push_pull_async_inplace(x, average=False, name="x", version=1, priority=-3)
        bps.synchronize(handle)
        assert x.tolist() == [3.0, 6.0]
        bps.synchronize(bps.byteps_push_pull(x, name="x"))
        assert x.tolist() == [3.0, 6.0]
        with pytest.raises(ValueError, match="has been cleared"):
            bps.poll(handle)
        y = torch.ones(2, requires_grad=True)
        bps.push_pull(y, average=False, name="y").sum().backward()
        assert y.grad is not None
        assert y.grad.tolist() == [2.0, 2.0]
        assert (bps.rank(), bps.size(), bps.local_rank(), bps.local_size()) == (rank, 2, rank, 2)

    two(work)


def test_several_of_one_name_are_under_way(two: Run) -> None:
    def work(rank: int) -> None:
        order = range(5) if rank else [0, 2, 1, 4, 3]  # other names may come between
        handles = {}
        for number in order:
            handles[number] = bps.push_pull_async(
                torch.tensor([number * (rank + 1.0)]), name=f"n{number % 2}"
            )
        found = sorted(float(bps.synchronize(handle)) for handle in handles.values())
        assert found == [0.0, 1.5, 3.0, 4.5, 6.0]
        tensor = torch.ones(3)
        last = [bps.byteps_push_pull(tensor, average=False, name="again") for _ in range(20)][-1]
        bps.synchronize(last)
        assert bps.push_pull(torch.ones(1), average=False, name="again").tolist() == [2.0]

    two(work)


def test_wrong_calls(two: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> None:
        with pytest.raises(AssertionError, match="needs a name"):
            bps.push_pull(torch.ones(1))
        with pytest.raises(ValueError, match=r"give a torch.nn.Module, got str"):
            bps.parallel.DistributedDataParallel("x")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="give a name"):
            bps.declare("")
        with pytest.raises(hvd.HorovodInternalError, match=r"shapes differ: rank 0 has float32\[1\]"):
            bps.push_pull(torch.ones(1 + rank), name="x")
        with pytest.raises(hvd.HorovodInternalError, match="reductions differ"):
            bps.push_pull(torch.ones(1), average=rank == 0, name="x")
        bps.suspend()
        with pytest.raises(ValueError, match="has not been initialized"):
            bps.declare("x")
        bps.resume(2, 1)
        with pytest.raises(ValueError, match="the job has 2 workers"):
            bps.resume(3, 1)
        assert bps.push_pull(torch.ones(1), average=False, name="x").tolist() == [2.0]

    two(work)
    monkeypatch.setenv("BYTEPS_ENABLE_ASYNC", "1")
    with pytest.raises(NotImplementedError, match="kvstore='dist_async'"):
        bps.init()


def test_broadcasts_and_the_optimizer(two: Run) -> None:
    def work(rank: int) -> torch.nn.Module:
        model = net(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
        wrapped = bps.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=2)
        bps.broadcast_parameters(model.state_dict(), root_rank=0)
        bps.broadcast_optimizer_state(wrapped, root_rank=0)
        assert wrapped.param_groups[0]["lr"] == 0.1
        for step in range(2):
            model(batch(rank, step)).square()[:, 0].sum().backward()
        wrapped.synchronize()
        assert bps.broadcast_object({"rank": rank}, 1) == {"rank": 1}
        return model

    for model in two(work):
        for first, wanted in zip(model.parameters(), mean_grads(passes=2), strict=True):
            torch.testing.assert_close(first.grad, wanted)


@pytest.mark.parametrize("compression", [bps.Compression.none, bps.Compression.fp16])
def test_a_module_whose_gradients_are_means(two: Run, compression: Any) -> None:
    def work(rank: int) -> torch.nn.Module:
        model = bps.parallel.DistributedDataParallel(net(rank), compression=compression)
        with model.no_sync():
            model(batch(rank, 0)).square()[:, 0].sum().backward()
        model(batch(rank, 1)).square()[:, 0].sum().backward()
        return model.module

    found = two(work)
    atol = 1e-5 if compression is bps.Compression.none else 5e-2
    for model in found:
        for first, wanted in zip(model.parameters(), mean_grads(passes=2), strict=True):
            torch.testing.assert_close(first.grad, wanted, rtol=0, atol=atol)


def test_a_pass_averages_after_a_pass_that_failed(two: Run) -> None:
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("the scale")

    class Heads(torch.nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(1))
            self.heads = torch.nn.ParameterList([torch.ones(1), torch.ones(1)])
            self.reached = [rank]

        def forward(self) -> torch.Tensor:
            scale = self.scale.exp()  # backward comes here last
            return scale * sum(self.heads[index] for index in self.reached)

    def work(rank: int) -> list[float]:
        model = bps.parallel.DistributedDataParallel(Heads(rank))
        handle = model.module.scale.register_hook(fail)
        model.module.reached = [0, 1]
        with pytest.raises(RuntimeError, match="the scale"):
            model().sum().backward()
        handle.remove()
        model.zero_grad()
        model.module.reached = [rank]
        model().sum().backward()
        return [param.grad.item() for param in model.module.heads]  # type: ignore[union-attr]

    assert two(work) == [[0.5, 0.5]] * 2


def test_a_module_sends_its_buffers_and_parameters_that_one_rank_has_not_reached(two: Run) -> None:
    def work(rank: int) -> list[list[float]]:
        heads = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])

        class Heads(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.heads = heads
                self.register_buffer("seen", torch.tensor([float(rank)]))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return heads[rank](x)

        model = bps.parallel.DistributedDataParallel(Heads())
        model.module.seen.fill_(rank + 5.0)
        model(torch.ones(1, 1)).sum().backward()
        assert model.module.seen.tolist() == [5.0]
        return [head.weight.grad.flatten().tolist() for head in heads]  # type: ignore[union-attr]

    assert two(work) == [[[0.5], [0.5]]] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_cross_barrier_overlaps_the_forward_pass(
    two: Run, make: Callable[..., torch.optim.Optimizer]
) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        model = net(rank)
        optimizer = CrossBarrier(model, make(model.parameters(), lr=0.1), model.named_parameters(), 3)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step)).square()[:, 0].sum().backward()
            optimizer.step()
        optimizer.close()  # completes the last update
        return [param.detach() for param in model.parameters()]

    first, second = two(work)
    for item, other in zip(first, second, strict=True):
        torch.testing.assert_close(item, other)


def test_shutdown_completes_what_was_begun(two: Run) -> None:
    leaving = threading.Event()

    def work(rank: int) -> list[list[float]]:
        tensors = [torch.full((2,), rank + 1.0) for _ in range(20)]
        for number, tensor in enumerate(tensors):
            if rank == 0 and number == 10:
                assert leaving.wait(30.0)
            bps.push_pull_async_inplace(tensor, average=False, name=f"last{number % 4}")
        if rank == 1:
            leaving.set()
        bps.shutdown()
        bps.init()
        return [tensor.tolist() for tensor in tensors]

    assert two(work) == [[[3.0, 3.0]] * 20] * 2
