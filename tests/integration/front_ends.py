"""The front ends of the sweep behind one interface, and one process that trains on all ranks' batches as the reference.

A feature (tests/integration/front_end_worker.py) is a training loop over a :class:`Training`. Each front end runs the loop on
every rank with the rank's own batches. :class:`Alone` runs the same loop on all batches, with the mean of the ranks'
gradients, in rank order, so that results can be equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kvps
import kvps.torch

Loss = Callable[[nn.Module, int], torch.Tensor | None]
"""The loss of a model on the batch of a rank; None if the rank has run out of batches."""
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
"""Takes what torch.optim takes as ``params``."""


class Training:
    """A model that a loop trains: every method is what a script would do by hand."""

    on_servers: ClassVar[bool] = False
    """Whether servers run the optimizer, whose results may differ in the last bit."""
    joins: ClassVar[bool] = False
    """Whether ranks may have different numbers of batches."""
    scales: ClassVar[bool] = True
    """Whether a GradScaler skips the same steps on all ranks."""

    def __init__(
        self, model: nn.Module, make: MakeOptimizer, rank: int, size: int, passes: int = 1, **more: Any
    ) -> None:
        self.model = model
        self.net = model
        """The module whose forward pass is called."""
        self.rank, self.size, self.passes = rank, size, passes
        self.more = more
        """Further arguments of the front end."""
        self.optimizer = make(model.parameters())
        """The torch optimizer that schedulers and hooks are given."""
        self.start()

    def start(self) -> None:
        """Wrap the model or the optimizer."""

    def backward(self, loss: Loss) -> torch.Tensor:
        """Make a backward pass of this rank's loss; return the loss."""
        found = loss(self.net, self.rank)
        assert found is not None
        found.backward()
        return found.detach()

    def join(self) -> None:
        """Let other ranks go on, whose batches last longer."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        self.optimizer.step()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Make backward passes of a step that is not over."""
        yield

    def set_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def close(self) -> None:
        """End what :meth:`start` began."""


class Alone(Training):
    """The reference: one process with all ranks' batches."""

    joins = True

    def start(self) -> None:
        self._sums: list[dict[nn.Parameter, torch.Tensor]] = [{} for _ in range(self.size)]

    def backward(self, loss: Loss) -> torch.Tensor:
        params = [param for param in self.model.parameters() if param.requires_grad]
        result, contributors = torch.zeros(()), 0
        for rank, sums in enumerate(self._sums):
            for param in params:
                param.grad = None
            found = loss(self.net, rank)
            if found is None:
                continue
            contributors += 1
            result = found.detach() if rank == self.rank else result
            found.backward()
            for param in params:
                if param.grad is not None:
                    sums[param] = sums[param] + param.grad if param in sums else param.grad.clone()
        for param in params:
            parts = [sums[param] for sums in self._sums if param in sums]
            param.grad = None if not parts else _total(parts) / contributors
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for sums in self._sums:
            sums.clear()


def _total(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for other in parts[1:]:
        total = total + other
    return total.coalesce() if total.is_sparse else total


class Optimizer(Training):
    """``kvps.torch.DistributedOptimizer``; the classes below add one argument each."""

    joins = True
    store: ClassVar[str] = "dist_sync"
    options: ClassVar[dict[str, Any]] = {}

    def start(self) -> None:
        self.optimizer = kvps.torch.DistributedOptimizer(
            self.optimizer,
            self.model,
            self.store,
            backward_passes_per_step=self.passes,
            **self.options,
            **self.more,
        )

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        with self.optimizer.no_sync():  # type: ignore[attr-defined]
            yield

    def join(self) -> None:
        self.optimizer.join()  # type: ignore[attr-defined]

    def close(self) -> None:
        self.optimizer.close()  # type: ignore[attr-defined]


class OptimizerOnServers(Optimizer):
    on_servers = True
    options: ClassVar[dict[str, Any]] = {"update_on_kvstore": True}


class OptimizerOverForward(Optimizer):
    options: ClassVar[dict[str, Any]] = {"overlap_forward": True}


class OptimizerFindsUnused(Optimizer):
    joins = False
    options: ClassVar[dict[str, Any]] = {"find_unused": True}


class OptimizerOverAllreduce(Optimizer):
    joins = False
    store = "allreduce"


class Trainer(Training):
    """``kvps.Trainer`` over a torch optimizer; the classes below change where and when it sums."""

    joins = True
    options: ClassVar[dict[str, Any]] = {"update_on_kvstore": False}

    def start(self) -> None:
        self.trainer = kvps.Trainer(
            self.model, self.optimizer, kvstore="dist_sync", **self.options, **self.more
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)

    def step(self) -> None:
        self.trainer.step(self.size)

    def join(self) -> None:
        self.trainer.join()

    def close(self) -> None:
        getattr(self.trainer, "close", lambda: None)()


class TrainerOverlaps(Trainer):
    options: ClassVar[dict[str, Any]] = {"update_on_kvstore": False, "overlap": True}


class TrainerOnServers(Trainer):
    on_servers = True
    options: ClassVar[dict[str, Any]] = {"update_on_kvstore": True}


class TrainerOnServersOverlaps(Trainer):
    on_servers = True
    options: ClassVar[dict[str, Any]] = {"update_on_kvstore": True, "overlap": True}


class Shard(Training):
    """``kvps.torch.shard``: weights lie on the servers."""

    on_servers = True

    def start(self) -> None:
        self.sharded = kvps.torch.shard(
            self.model,
            "dist_sync",
            optimizer=self.optimizer,
            backward_passes_per_step=self.passes,
            **self.more,
        )

    def close(self) -> None:
        self.sharded.close()


class Parallel(Training):
    """DistributedDataParallel over the process group "kvps"."""

    def start(self) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("kvps")
        self.net = DistributedDataParallel(self.model)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        with self.net.no_sync():  # type: ignore[operator]
            yield


class Horovod(Training):
    """``kvps.compat.horovod``, as a script for Horovod uses it."""

    def start(self) -> None:
        import kvps.compat.horovod as hvd

        hvd.init()
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer, self.model.named_parameters(), backward_passes_per_step=self.passes
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)


class BytePS(Training):
    """``kvps.compat.byteps``, as a script for BytePS uses it."""

    def start(self) -> None:
        import kvps.compat.byteps as bps

        bps.init()
        self.optimizer = bps.DistributedOptimizer(
            self.optimizer, self.model.named_parameters(), backward_passes_per_step=self.passes
        )
        bps.broadcast_parameters(self.model.state_dict(), root_rank=0)


class EachStepMerged(Training):
    """DiLoCo that merges at each step by plain SGD: with SGD inside, the mean of weights is a step by the mean gradient."""

    on_servers = True
    scales = False

    def start(self) -> None:
        self.outer = kvps.torch.DiLoCo(self.model, self.optimizer, "sgd", lr=1.0, momentum=0.0, sync_every=1)
        self.outer.__enter__()

    def close(self) -> None:
        self.outer.__exit__(None, None, None)


FRONT_ENDS: dict[str, type[Training]] = {
    "optimizer": Optimizer,
    "optimizer-on-servers": OptimizerOnServers,
    "optimizer-overlap-forward": OptimizerOverForward,
    "optimizer-find-unused": OptimizerFindsUnused,
    "optimizer-allreduce": OptimizerOverAllreduce,
    "trainer": Trainer,
    "trainer-overlap": TrainerOverlaps,
    "trainer-on-servers": TrainerOnServers,
    "trainer-on-servers-overlap": TrainerOnServersOverlaps,
    "shard": Shard,
    "ddp": Parallel,
    "horovod": Horovod,
    "byteps": BytePS,
    "diloco": EachStepMerged,
}
