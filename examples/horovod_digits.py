"""Train a ConvNet on handwritten digits as Horovod's scripts do: broadcasts, and an optimizer that averages.

    python examples/horovod_digits.py                                     # one process
    kvps-launch -n 2 -s 2 -- python examples/horovod_digits.py            # 2 workers, 2 servers
    kvps-launch -n 2 -s 2 -- python examples/horovod_digits.py --update-on-kvstore

The model, the optimizer, the scheduler and the loop are plain PyTorch. Five lines make them those of a
cluster, and each has its line in a script for Horovod: the store (``hvd.init()``), two broadcasts, the
DistributedOptimizer, and the mean at the end, for which each worker tests its share of the unseen images.
With --update-on-kvstore Adam runs on the servers. Only rank 0 prints and saves.

With --update-on-kvstore, and ``--max-restarts 2`` of kvps-launch, a worker that is killed is started again, and goes on
where the others are. With Adam on each worker it cannot: only the others have the weights, and the job ends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import kvps.torch

EPOCHS, BATCH, LR = 12, 64, 5e-3


class ConvNet(torch.nn.Sequential):
    """Two convolutions, two layers: 70,000 parameters."""

    def __init__(self) -> None:
        super().__init__(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 4 * 4, 128),
            torch.nn.ReLU(),
            torch.nn.Linear(128, 10),
        )


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return four fifths of the images to train with, and the rest to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(order) * 4 // 5
    train, test = order[:cut], order[cut:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, epochs: int
) -> Iterator[float]:
    """Train ``model``; yield the loss of this worker's part of each step."""
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1 / epochs, max(1, epochs - 1))
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()  # each gradient leaves as soon as it is there
            optimizer.step()
            yield loss.item()
        schedule.step()


@torch.no_grad()
def accuracy(model: torch.nn.Module, data: TensorDataset, rank: int, workers: int) -> float:
    """Return the share of ``data`` that ``model`` gets right; each worker tests a part of it."""
    images, labels = (one[rank::workers] for one in data.tensors)
    hits = (model(images).argmax(1) == labels).float().mean().item()
    share: float = kvps.torch.average(hits, weight=len(labels))
    return share


def show(losses: Iterable[float], steps: int, per_epoch: int) -> list[float]:
    """Collect ``losses``, and show how they fall: a bar in a terminal, else a line per epoch."""
    seen: list[float] = []
    columns = (TextColumn("epoch {task.fields[epoch]}"), BarColumn(), TimeRemainingColumn())
    loss_now = TextColumn("loss {task.fields[loss]:.4f}")
    is_terminal = sys.stdout.isatty()
    with Progress(*columns, loss_now, disable=not is_terminal) as bar:
        task = bar.add_task("train", total=steps, epoch=1, loss=0.0)
        for loss in losses:
            seen.append(loss)
            epoch, at_end = (len(seen) - 1) // per_epoch + 1, len(seen) % per_epoch == 0
            mean = sum(seen[-per_epoch:]) / len(seen[-per_epoch:])
            bar.update(task, advance=1, epoch=epoch, loss=mean)
            if at_end and not is_terminal:
                print(f"epoch {epoch:2}  loss {mean:.4f}", flush=True)
    return seen


def main(arguments: list[str] | None = None) -> int:
    """Train, test, save; return the exit code."""
    parser = argparse.ArgumentParser(description="Train a ConvNet as a script for Horovod does.")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--update-on-kvstore", action="store_true", help="Adam on the servers")
    parser.add_argument("--save", type=Path, metavar="FILE.safetensors", help="write the weights")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loss")
    parser.add_argument("--min-accuracy", type=float, default=0.97, help="exit 1 below this")
    flags = parser.parse_args(arguments)

    kv = kvps.create("dist_sync", average=True)
    torch.manual_seed(kv.rank)  # the first weights differ: those of rank 0 count
    model = ConvNet()
    adam = torch.optim.Adam(model.parameters(), lr=LR)
    kvps.torch.broadcast_parameters(model.state_dict())
    kvps.torch.broadcast_optimizer_state(adam)
    optimizer = kvps.torch.DistributedOptimizer(adam, model, kv, update_on_kvstore=flags.update_on_kvstore)
    data, unseen = load()
    sampler = DistributedSampler(data, kv.num_workers, kv.rank)
    loader = DataLoader(data, max(1, BATCH // kv.num_workers), sampler=sampler)
    losses = train(model, optimizer, loader, flags.epochs)
    if kv.rank == 0:
        where = "on the servers" if flags.update_on_kvstore else "on each worker"
        print(f"{kv.num_workers} workers, Adam {where}, {len(data)} images to train with")
        seen = show(losses, flags.epochs * len(loader), len(loader))
    else:
        for _ in losses:
            pass

    result = accuracy(model, unseen, kv.rank, kv.num_workers)
    if kv.rank != 0:
        return 0
    print(f"test accuracy {result:.4f}")
    if flags.save:
        save_file(model.state_dict(), flags.save)
        print(f"weights in {flags.save}")
    if flags.plot:
        from digits import plot  # draws by matplotlib, if it is there

        plot({"loss": seen}, flags.plot, "Digits as with Horovod")
    if result < flags.min_accuracy:
        print(f"that is below {flags.min_accuracy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
