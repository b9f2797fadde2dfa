"""Train a ConvNet on handwritten digits as gluon's scripts do: a batch over several devices, and a Trainer.

    python examples/gluon_digits.py                                       # one process
    kvps-launch -n 2 -s 2 -- python examples/gluon_digits.py              # 2 workers, 2 servers
    kvps-launch -n 2 -s 2 -- python examples/gluon_digits.py --overlap
    python examples/gluon_digits.py --devices cuda:0,cuda:1

Each worker cuts its batch for its devices. The losses of all devices go backward together, and their gradients
are added up where the model is; the Trainer adds up the workers', divides by the number of examples, and
has the servers update the weights. The CPU, which is the default, counts as two devices here.

With --overlap gradients leave while backward is still running. The Trainer has to know then of how many
examples they are before backward begins. Only rank 0 prints, tests and saves.

Add ``--max-restarts 2`` to kvps-launch: a worker that is killed is started again, and goes on where the others are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch.func import functional_call
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
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(order) * 4 // 5
    train, test = order[:cut], order[cut:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def loss_there(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of one slice, computed on the device where the slice is.

    A parameter's copy there is part of the computation, so its gradient finds back to the parameter.
    """
    copies = {name: one.to(images.device) for name, one in model.named_parameters()}
    return F.cross_entropy(functional_call(model, copies, images), labels, reduction="sum")


def train(
    kv: kvps.KVStoreBase,
    model: torch.nn.Module,
    data: TensorDataset,
    devices: list[str],
    epochs: int,
    overlap: bool,
) -> Iterator[tuple[int, float]]:
    """Train ``model``; yield the epoch of each step, and the loss of this worker's part of it."""
    sampler = kvps.data_sampler(data, kv)
    loader = DataLoader(data, max(1, BATCH // kv.num_workers), sampler=sampler)
    trainer = kvps.Trainer(model, "adam", {"learning_rate": LR}, kvstore=kv, overlap=overlap)
    start = trainer.resume()  # 0, or the step at which a replacement goes on
    for epoch, batches in kvps.epochs_from(loader, start, epochs):
        trainer.set_learning_rate(LR * (1 - epoch / epochs))
        for images, labels in batches:
            model.zero_grad()
            image_slices = kvps.split_and_load(images, devices, even_split=False)
            label_slices = kvps.split_and_load(labels, devices, even_split=False)
            losses = [loss_there(model, x, y) for x, y in zip(image_slices, label_slices, strict=True)]
            size = len(labels) * kv.num_workers
            trainer.batch_size = size  # with overlap gradients are scaled before they leave
            torch.autograd.backward(losses)
            trainer.step(size)
            yield epoch, sum(loss.item() for loss in losses) / len(labels)


@torch.no_grad()
def accuracy(model: torch.nn.Module, data: TensorDataset, device: str) -> float:
    """Return the share of ``data`` that ``model`` gets right."""
    images, labels = data.tensors
    return (model(images.to(device)).argmax(1).cpu() == labels).float().mean().item()


def show(losses: Iterable[tuple[int, float]], per_epoch: int, epochs: int) -> list[float]:
    """Collect ``losses``, and show how they fall: a bar in a terminal, else a line per epoch."""
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


def main(arguments: list[str] | None = None) -> int:
    """Train, test, save; return the exit code."""
    parser = argparse.ArgumentParser(description="Train a ConvNet as a gluon script does.")
    parser.add_argument("--store", default="dist_sync", help="any store of kvps.create")
    parser.add_argument("--devices", default="cpu,cpu", help="of each worker, with commas between")
    parser.add_argument("--overlap", action="store_true", help="push while backward is running")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--save", type=Path, metavar="FILE.safetensors", help="write the weights")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loss")
    parser.add_argument("--min-accuracy", type=float, default=0.97, help="exit 1 below this")
    flags = parser.parse_args(arguments)

    kv = kvps.create(flags.store)
    devices = flags.devices.split(",")
    torch.manual_seed(kv.rank)  # the first weights differ: those of rank 0 count
    model = ConvNet().to(devices[0])
    data, unseen = load()
    losses = train(kv, model, data, devices, flags.epochs, flags.overlap)
    if kv.rank != 0:
        for _ in losses:
            pass
        return 0

    print(f"{kv.type}: {kv.num_workers} workers, each with {', '.join(devices)}")
    share = -(-len(data) // kv.num_workers)
    per_epoch = -(-share // max(1, BATCH // kv.num_workers))
    seen = show(losses, per_epoch, flags.epochs)
    result = accuracy(model, unseen, devices[0])
    print(f"test accuracy {result:.4f}")
    if flags.save:
        save_file(model.state_dict(), flags.save)
        print(f"weights in {flags.save}")
    if flags.plot:
        from digits import plot  # draws by matplotlib, if it is there

        plot({"loss": seen}, flags.plot, "Digits as with gluon")
    if result < flags.min_accuracy:
        print(f"that is below {flags.min_accuracy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
