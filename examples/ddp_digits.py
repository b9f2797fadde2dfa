"""Train a ConvNet on handwritten digits with DistributedDataParallel: a stock script, one word changed.

    kvps-launch -n 2 -s 2 -- python examples/ddp_digits.py                  # over the servers
    kvps-launch -n 2 -s 2 -- python examples/ddp_digits.py --backend gloo   # between the workers
    python examples/ddp_digits.py                                           # one process

Everything here is torch's own: the process group, DistributedDataParallel, DistributedSampler. The word
is the backend's name, and ``import kvps.torch`` makes it known. Only rank 0 prints, tests and saves.

If a worker is killed, all end, as in any process group. With ``--max-restarts 2`` of kvps-launch all begin again, from the
first step: the script saves no file on its way.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import kvps.torch  # noqa: F401  # makes the backend "kvps" known

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


def train(model: DistributedDataParallel, loader: DataLoader, epochs: int) -> Iterator[float]:
    """Train ``model``; yield the loss of each step, as a mean over all ranks."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1 / epochs, max(1, epochs - 1))
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            mean = loss.detach()
            dist.all_reduce(mean)
            yield mean.item() / dist.get_world_size()
        schedule.step()


@torch.no_grad()
def accuracy(model: torch.nn.Module, data: TensorDataset) -> float:
    """Return the share of ``data`` that ``model`` gets right."""
    images, labels = data.tensors
    return (model(images).argmax(1) == labels).float().mean().item()


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
    parser = argparse.ArgumentParser(description="Train a ConvNet with DistributedDataParallel.")
    parser.add_argument("--backend", default="kvps", choices=("kvps", "gloo"))
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--save", type=Path, metavar="FILE.safetensors", help="write the weights")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loss")
    parser.add_argument("--min-accuracy", type=float, default=0.97, help="exit 1 below this")
    flags = parser.parse_args(arguments)

    dist.init_process_group(flags.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # the first weights differ: those of rank 0 count
    model = DistributedDataParallel(ConvNet())
    data, unseen = load()
    loader = DataLoader(data, max(1, BATCH // ranks), sampler=DistributedSampler(data))
    losses = train(model, loader, flags.epochs)
    if rank == 0:
        print(f"{flags.backend}: {ranks} ranks, {len(data)} images to train with")
        seen = show(losses, flags.epochs * len(loader), len(loader))
    else:
        for _ in losses:
            pass
    trained = model.module
    del model  # if it outlives the group, it frees gloo's threads while it holds the interpreter's lock: they may hang
    dist.destroy_process_group()
    if rank != 0:
        return 0

    result = accuracy(trained, unseen)
    print(f"test accuracy {result:.4f}")
    if flags.save:
        save_file(trained.state_dict(), flags.save)
        print(f"weights in {flags.save}")
    if flags.plot:
        from digits import plot  # draws by matplotlib, if it is there

        plot({"loss": seen}, flags.plot, "Digits with DistributedDataParallel")
    if result < flags.min_accuracy:
        print(f"that is below {flags.min_accuracy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
