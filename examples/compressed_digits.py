"""What compression costs: the digits by every codec, beside a run that does not compress.

    python examples/compressed_digits.py

Two workers train the ConvNet of digits.py again and again, from the same weights, on the same batches. First
what they push is compressed, then also what they pull. The table says after how many epochs each run has
reached the accuracy that is asked for, and how many bytes a worker sends and gets in a step. Scheduler,
servers and workers are threads of this process and talk over loopback sockets.

Plain SGD: what a codec leaves out comes some steps later, and momentum would count it again and again. Every
run but that of 1bit has the same learning rate: 1bit pushes +1 or -1 for each element, however small its
gradient is.

So there is no worker to kill.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from digits import ConvNet, accuracy, load, plot
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

import kvps
from kvps.compression.policy import rules_of
from kvps.compression.spec import size
from kvps.dtypes import Spec

WORKERS, SERVERS, EPOCHS, BATCH, LR = 2, 2, 12, 32, 0.5
SMALL = 2000
"""Bytes below which a parameter travels as it is: the biases."""
STEPS = {"type": "2bit", "threshold": 0.02}
"""How steps of the weights come back where a gradient's codec is too coarse: by +-0.02 learning rates."""


@dataclass(frozen=True, eq=False)
class Run:
    """One training."""

    codec: str
    there: dict[str, Any]
    back: Any = None
    """``pull``, in the run that compresses both ways."""
    lr: float = LR

    def params(self, both: bool) -> dict[str, Any]:
        """Return the Trainer's ``compression_params``."""
        return {"type": self.codec, **self.there, "pull": self.back if both else False, "min_bytes": SMALL}


NONE = Run("none", {})
RUNS = [
    Run("fp16", {}, True),
    Run("bf16", {}, True),
    Run("int8", {}, True),
    Run("2bit", {"threshold": 0.5}, STEPS),
    Run("1bit", {"threshold": 0.0}, STEPS, lr=0.3),
    Run("topk", {"ratio": 0.01}, True),
    Run("randomk", {"ratio": 0.1}, True),
]


@dataclass
class Result:
    """What came of a run."""

    curve: list[float]
    """The accuracy behind each epoch."""
    pushed: int
    pulled: int


def train(
    rank: int,
    model: torch.nn.Module,
    params: dict[str, Any],
    lr: float,
    epochs: int,
    data: TensorDataset,
    look: Callable[[torch.nn.Module], float],
) -> list[float]:
    """Train as one worker; return what rank 0 sees behind each epoch."""
    kv = kvps.create("dist_sync")
    model = copy.deepcopy(model)
    sampler = kvps.data_sampler(data, kv)
    loader = DataLoader(data, BATCH, sampler=sampler)
    trainer = kvps.Trainer(model, "sgd", {"lr": lr}, kv, compression_params=params)
    curve = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        trainer.set_learning_rate(lr * (1 - epoch / epochs))
        for images, labels in loader:
            model.zero_grad()
            # A sum: gradients, and so the thresholds, are of the size that they are for a batch.
            F.cross_entropy(model(images), labels, reduction="sum").backward()
            trainer.step(len(labels) * kv.num_workers)
        if rank == 0:
            curve.append(look(model))
    return curve


def octets(model: torch.nn.Module, params: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of elements that a worker pushes, and pulls, in a step."""
    rules = rules_of(params)
    pushed = pulled = 0
    for name, param in model.named_parameters():
        setting = rules.setting_of(name, Spec("float32", tuple(param.shape)))
        code, back = (None, None) if setting is None else (setting.code, setting.back)
        pushed += param.nbytes if code is None else size(code, param.numel())
        pulled += param.nbytes if back is None else size(back, param.numel())
    return pushed, pulled


def table(results: dict[tuple[Run, bool], Result], goal: float) -> Table:
    """Put the runs side by side."""
    made = Table(title=f"{WORKERS} workers, SGD, batches of {WORKERS * BATCH}")
    made.add_column("codec")
    made.add_column("pull")
    for title in ("rate", f"epochs to {goal:g}", "accuracy", "pushed kB", "pulled kB"):
        made.add_column(title, justify="right")
    for (run, both), one in results.items():
        epochs = next((n for n, seen in enumerate(one.curve, 1) if seen >= goal), None)
        made.add_row(
            " ".join([run.codec, *map(str, run.there.values())]),
            ("as it is" if not both else "2bit 0.02" if run.back is STEPS else "the same"),
            f"{run.lr:g}",
            "-" if epochs is None else str(epochs),
            f"{one.curve[-1]:.4f}",
            f"{one.pushed / 1000:.1f}",
            f"{one.pulled / 1000:.1f}",
        )
    return made


def main(arguments: list[str] | None = None) -> int:
    """Train by each codec; return the exit code."""
    parser = argparse.ArgumentParser(description="Digits by every codec of compression.")
    names = [run.codec for run in RUNS]
    parser.add_argument("--codecs", nargs="*", default=names, choices=names, metavar="CODEC")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the accuracy after each epoch")
    parser.add_argument("--min-accuracy", type=float, default=0.97, help="exit 1 below this")
    flags = parser.parse_args(arguments)

    console = Console()
    torch.set_num_threads(1)  # each worker is a thread already
    torch.manual_seed(3)
    model = ConvNet()
    data, unseen = load()
    chosen = [run for run in RUNS if run.codec in flags.codecs]
    plan = [(NONE, False), *((run, both) for run in chosen for both in (False, True))]
    results: dict[tuple[Run, bool], Result] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(plan) * flags.epochs)
        for run, both in plan:
            title = run.codec + (", both ways" if both else "")
            bar.update(task, description=title)

            def look(trained: torch.nn.Module) -> float:
                bar.advance(task)
                return accuracy(trained, unseen)

            with kvps.LocalCluster(WORKERS, SERVERS) as cluster:
                given = (model, run.params(both), run.lr, flags.epochs, data, look)
                curve = cluster.run(train, *given)[0]
            results[run, both] = Result(curve, *octets(model, run.params(both)))
            if not console.is_terminal:
                print(f"{title}: {curve[-1]:.4f}", flush=True)
    console.print(table(results, flags.min_accuracy))
    console.print(
        f"Measured: accuracy on {len(unseen)} unseen images. A kB is 1000 bytes of elements, of one worker "
        "in one step; it follows from the codec. The rate is the first learning rate; it falls to 0."
    )
    for run in chosen:
        if run.lr != LR:
            console.print(f"{run.codec} has a learning rate of its own, {run.lr:g}; others {LR:g}.")
    if flags.plot:
        curves = {
            run.codec + (", both ways" if both else ""): one.curve for (run, both), one in results.items()
        }
        plot(curves, flags.plot, "Compressed", ylabel="test accuracy", xlabel="epoch")
    least = min(one.curve[-1] for one in results.values())
    if least < flags.min_accuracy:
        print(f"one of them is below {flags.min_accuracy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
