"""A training script that loses a worker: one process kills itself once, at a named moment, and is started again.

    kvps-launch -n 2 -s 2 --max-restarts 1 -- python tests/integration/replacement_worker.py FRONT RANK MOMENT FOLDER

It makes the collective calls of a usual script: a learning rate for each epoch, a barrier, a checkpoint where there is
a place for it. Each rank prints its weights at the end; ``resume`` behind FOLDER lets it ask where to begin, and
with ``loader`` it reads its batches from there by a DataLoader, and prints which examples these were.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import kvps
import kvps.compat.mx as mx
import kvps.torch

EPOCHS, STEPS = 4, 3
LR = 0.1
EPOCH = 2
"""In which a worker dies."""
MOMENTS = (
    *("start", "init", "epoch", "step", "pushed"),
    *("evaluation", "barrier", "checkpoint", "checkpointed"),
)
Die = Callable[[str, int], None]


class Front:
    """A model with the front end that trains it."""

    def __init__(self, name: str) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.name = name
        self.scheduler: Any = None
        parameters = self.model.parameters()
        self.scaler: Any = None
        kind = "dist_async" if name.endswith("async") else "dist_sync"
        kv: Any = kvps.create(kind, timeout=300.0)
        with torch.no_grad():
            for index, param in enumerate(self.model.parameters()):
                param.copy_(torch.linspace(-1.0, 1.0 + index, param.numel()).view(param.shape))
        if name.startswith("trainer"):
            numbers = {"lr": LR, "momentum": 0.9}
            overlap = name.endswith("overlap")
            self.front: Any = kvps.Trainer(self.model, "sgd", numbers, kv, overlap=overlap)
        elif name == "gluon":
            numbers = {"learning_rate": LR, "momentum": 0.9}
            self.front = mx.gluon.Trainer(self.model, "sgd", numbers, kv)
        elif name == "kvstore":
            self.names = [name for name, _ in self.model.named_parameters()]
            self.values = [item.detach() for item in self.model.parameters()]
            kv.init(self.names, self.values)
            kv.set_optimizer("sgd", lr=LR, momentum=0.9)
            self.front = kv
        elif name == "diloco":
            self.inner: Any = torch.optim.SGD(parameters, lr=LR)
            self.front = kvps.torch.DiLoCo(self.model, self.inner, sync_every=STEPS, on_worker_lost="wait")
            self.front.__enter__()
            kv = self.front.stores[0]
        else:
            sgd = torch.optim.SGD(parameters, lr=LR, momentum=0.9)
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(sgd, lambda epoch: 1 / (1 + epoch))
            if name.endswith("scaler"):
                self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            if name == "shard":
                self.front = kvps.torch.shard(self.model, optimizer=sgd)
                kv = self.front.kvstore
            else:
                self.front = kvps.torch.DistributedOptimizer(
                    sgd,
                    self.model,
                    update_on_kvstore=name != "optimizer-here",
                    overlap_forward=name.endswith("forward"),
                )
                kv = self.front.kvstore
        self.kv: Any = kv

    def begin_epoch(self, epoch: int) -> None:
        """Set the learning rate of an epoch."""
        if self.name == "diloco":
            self.inner.param_groups[0]["lr"] = LR / (1 + epoch)
        elif self.scheduler is None:
            self.front.set_learning_rate(LR / (1 + epoch))

    def end_epoch(self) -> None:
        """Let a scheduler go on."""
        if self.scheduler is not None:
            self.scheduler.step()
        if self.name == "diloco":
            self.front.average()

    def close(self) -> None:
        """Close the front end, or its store."""
        if self.name == "diloco":
            self.front.__exit__(None, None, None)
        elif self.name in ("gluon", "kvstore") or self.name.startswith("trainer"):
            self.kv.close()
        else:
            self.front.close()

    def step(self, loss: torch.Tensor) -> None:
        """Make a step."""
        if self.name == "diloco":
            self.inner.zero_grad()
            loss.backward()
            self.inner.step()
        elif self.name == "kvstore":
            gradients = list(torch.autograd.grad(loss, list(self.model.parameters())))
            self.kv.pushpull(self.names, gradients, out=self.values)
        elif self.scheduler is None:
            self.model.zero_grad()
            self.front.batch_size = 2
            loss.backward()
            self.front.step(2)
        elif self.scaler is not None:
            self.front.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.front)
            self.scaler.update()
        else:
            if self.name != "shard":
                self.front.zero_grad()
            loss.backward()
            self.front.step()

    def resume(self) -> int:
        """Ask where to begin."""
        if self.name != "kvstore":
            return int(self.front.resume())
        start: int = self.kv.resume(self.names)
        self.kv.pull(self.names, out=self.values)
        return start

    def weights(self) -> list[float]:
        """Return all weights."""
        values = self.front.state_dict() if self.name == "shard" else self.model.state_dict()
        return torch.cat([value.detach().flatten() for value in values.values()]).tolist()


def batches(rank: int, epoch: int) -> Iterator[torch.Tensor]:
    """Yield the batches of a rank."""
    for step in range(epoch * STEPS, (epoch + 1) * STEPS):
        yield torch.randn(5, 3, generator=torch.Generator().manual_seed(2 * step + rank))


def train(
    name: str, die: Die = lambda moment, epoch: None, *, resumes: bool = False, saves: bool = False
) -> list[float]:
    """Train with a front end; return the weights."""
    die("start", EPOCH)
    front = Front(name)
    die("init", EPOCH)
    start = front.resume() if resumes else 0
    rank = front.kv.rank
    for _ in range(start // STEPS):
        front.end_epoch()
    for epoch in range(start // STEPS, EPOCHS):
        die("epoch", epoch)
        front.begin_epoch(epoch)
        for step, batch in enumerate(batches(rank, epoch)):
            if epoch * STEPS + step >= start:
                if step == 1:
                    die("step", epoch)
                front.step(front.model(batch).square().mean())
                if step == 1:
                    die("pushed", epoch)
        with torch.no_grad():
            front.model(batch)
            die("evaluation", epoch)
        front.end_epoch()
        die("barrier", epoch)
        front.kv.barrier()
        die("checkpoint", epoch)
        if saves:
            front.kv.checkpoint()
        die("checkpointed", epoch)
    weights = front.weights()
    front.close()
    return weights


def train_by_loader(
    name: str, say: Callable[[str], object], die: Die = lambda moment, epoch: None
) -> list[float]:
    """Train on the batches of a DataLoader, from the step of the others on; return the weights."""
    front = Front(name)
    examples = torch.randn(26, 3, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(torch.arange(len(examples)), examples)
    sampler = kvps.data_sampler(data, front.kv)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    start = front.resume()
    for _ in range(start // len(loader)):
        if front.scheduler is not None:
            front.scheduler.step()
    for epoch, batches in kvps.epochs_from(loader, start, EPOCHS):
        front.begin_epoch(epoch)
        for number, (ids, batch) in enumerate(batches):
            if number == 1:
                die("step", epoch)
            front.step(front.model(batch).square().mean())
            say(f"batch {epoch} {ids.tolist()}")
            if number == 1:
                die("pushed", epoch)
        front.end_epoch()
    weights = front.weights()
    front.close()
    return weights


def main(name: str, rank: str, moment: str, folder: str, *more: str) -> None:
    """Train; die at the moment, unless a process has."""
    mark = Path(folder) / "died"

    def die(at: str, epoch: int) -> None:
        if (at, epoch) == (moment, EPOCH) and os.environ["KVPS_RANK"] in rank and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    saves = "KVPS_CHECKPOINT_DIR" in os.environ
    if "loader" in more:
        weights = train_by_loader(name, lambda text: print(text, flush=True), die)  # noqa: T201
    else:
        weights = train(name, die, resumes="resume" in more, saves=saves)
    sys.stdout.write(f"weights {weights}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
