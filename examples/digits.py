"""Train a ConvNet on handwritten digits, alone or on a cluster: the script is the same.

    python examples/digits.py                                       # one process
    kvps-launch -n 2 -s 2 -- python examples/digits.py              # 2 workers, 2 servers

The data are scikit-learn's 1,797 real images of 8 x 8 pixels. Three lines make a PyTorch script
one for a cluster: the store, the sampler that gives each worker its share of the images, and the
Trainer that stands where ``optimizer.step()`` stood. Only rank 0 prints, tests and saves.

Add ``--max-restarts 2`` to kvps-launch: a worker that is killed is started again, and goes on where the others are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

import kvps

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
    # load_digits() reads the same file, but its import takes nearly as long as that of torch.
    path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    digits = torch.from_numpy(np.loadtxt(str(path), delimiter=","))
    images = digits[:, :64].float().view(-1, 1, 8, 8) / 16
    labels = digits[:, 64].long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(order) * 4 // 5
    train, test = order[:cut], order[cut:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train(
    kv: kvps.KVStoreBase, model: torch.nn.Module, data: TensorDataset, epochs: int, batch: int, lr: float
) -> Iterator[tuple[int, float]]:
    """Train ``model``; yield the epoch of each step, and the loss of this worker's part of it."""
    sampler = kvps.data_sampler(data, kv)
    loader = DataLoader(data, max(1, batch // kv.num_workers), sampler=sampler)
    trainer = kvps.Trainer(model, "adam", {"lr": lr}, kvstore=kv)
    start = trainer.resume()  # 0, or the step at which a replacement goes on
    for epoch, batches in kvps.epochs_from(loader, start, epochs):
        trainer.set_learning_rate(lr * (1 - epoch / epochs))
        for images, labels in batches:
            model.zero_grad()
            # A sum, not a mean: the Trainer adds up the workers and divides by the whole batch.
            loss = F.cross_entropy(model(images), labels, reduction="sum")
            loss.backward()
            trainer.step(len(labels) * kv.num_workers)
            yield epoch, loss.item() / len(labels)


@torch.no_grad()
def accuracy(model: torch.nn.Module, data: TensorDataset) -> float:
    """Return the share of ``data`` that ``model`` gets right."""
    images, labels = data.tensors
    return (model(images).argmax(1) == labels).float().mean().item()


def show(losses: Iterable[tuple[int, float]], per_epoch: int, epochs: int) -> list[float]:
    """Collect ``losses`` and show how they fall: a bar in a terminal, else a line per epoch."""
    seen: list[float] = []
    columns = (TextColumn("epoch {task.fields[epoch]}"), BarColumn(), TimeRemainingColumn())
    loss_now = TextColumn("loss {task.fields[loss]:.4f}")
    is_terminal = sys.stdout.isatty()
    with Progress(*columns, loss_now, disable=not is_terminal) as bar:
        task = bar.add_task("train", total=epochs * per_epoch, epoch=1, loss=0.0)
        for epoch, steps in groupby(losses, key=itemgetter(0)):
            for count, (_, loss) in enumerate(steps, 1):
                seen.append(loss)
                mean = sum(seen[-count:]) / count
                bar.update(task, completed=epoch * per_epoch + count, epoch=epoch + 1, loss=mean)
            if not is_terminal:
                print(f"epoch {epoch + 1:2}  loss {mean:.4f}", flush=True)
    return seen


def plot(
    curves: dict[str, list[float]],
    path: Path,
    title: str = "Handwritten digits",
    *,
    ylabel: str = "loss",
    xlabel: str = "step",
) -> None:
    """Draw learning curves, by label, if matplotlib is there; the other examples call this, too."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no picture: matplotlib is not installed (pip install 'kvps[examples]')")
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for label, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, label=label)
    if ylabel == "loss":
        axes.set_yscale("log")
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if len(curves) > 1:
        axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"learning curve in {path}")


def main(arguments: list[str] | None = None) -> int:
    """Train, test, save; return the exit code."""
    parser = argparse.ArgumentParser(description="Train a ConvNet on handwritten digits.")
    parser.add_argument("--store", default="dist_sync", help="any store of kvps.create")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--batch-size", type=int, default=BATCH, help="of all workers together")
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--save", type=Path, metavar="FILE.safetensors", help="write the weights")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loss")
    parser.add_argument("--min-accuracy", type=float, default=0.97, help="exit 1 below this")
    flags = parser.parse_args(arguments)

    kv = kvps.create(flags.store)
    torch.manual_seed(kv.rank)  # the first weights differ: those of rank 0 count
    model = ConvNet()
    data, unseen = load()
    losses = train(kv, model, data, flags.epochs, flags.batch_size, flags.lr)
    if kv.rank != 0:
        for _ in losses:
            pass
        return 0

    workers = "1 worker" if kv.num_workers == 1 else f"{kv.num_workers} workers"
    print(f"{kv.type}: {workers}, {len(data)} images to train with, {len(unseen)} to test with")
    share = -(-len(data) // kv.num_workers)
    per_epoch = -(-share // max(1, flags.batch_size // kv.num_workers))
    seen = show(losses, per_epoch, flags.epochs)
    result = accuracy(model, unseen)
    print(f"test accuracy {result:.4f}")
    if flags.save:
        save_file(model.state_dict(), flags.save)
        print(f"weights in {flags.save}")
    if flags.plot:
        plot({"loss": seen}, flags.plot)
    if result < flags.min_accuracy:
        print(f"that is below {flags.min_accuracy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
