"""Log the numbers of a store for an experiment tracker: a CSV file, and TensorBoard if it is installed.

    python examples/metrics.py --csv run.csv                                     # one process
    kvps-launch -n 2 -s 2 -- python examples/metrics.py --csv run.csv --tensorboard runs --plot run.png
    tensorboard --logdir runs

``kv.metrics()`` returns a flat dict, so that any tracker takes it in one line, for example ``wandb.log(numbers)`` or
``mlflow.log_metrics(numbers, step)``. Only rank 0 writes. The training is that of digits.py.

Add ``--max-restarts 2`` to kvps-launch: a worker that is killed is started again, and goes on where the others are.
"""

from __future__ import annotations

import argparse
import csv
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from digits import BATCH, LR, ConvNet, accuracy, load, plot, train
from rich.progress import Progress

import kvps

EVERY = 10
"""Steps between two rows."""


def main(arguments: list[str] | None = None) -> int:
    """Train, and log; return the exit code."""
    parser = argparse.ArgumentParser(description="Log the numbers of a store while it trains.")
    parser.add_argument("--store", default="dist_sync", help="any store of kvps.create")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--csv", type=Path, metavar="FILE.csv", help="write a row each 10 steps")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="write events for TensorBoard")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loss")
    flags = parser.parse_args(arguments)

    kv = kvps.create(flags.store)
    torch.manual_seed(kv.rank)
    model = ConvNet()
    data, unseen = load()
    seen: list[float] = []
    with ExitStack() as stack:
        writers = []
        if kv.rank == 0 and flags.csv:
            writers.append(CsvWriter(stack.enter_context(flags.csv.open("w", newline=""))))
        if kv.rank == 0 and flags.tensorboard:
            writers.append(TensorBoardWriter(flags.tensorboard, stack))
        bar = stack.enter_context(Progress(disable=kv.rank != 0 or not sys.stdout.isatty()))
        task = bar.add_task("train", total=None)
        for _, loss in train(kv, model, data, flags.epochs, BATCH, LR):
            seen.append(loss)
            bar.advance(task)
            if len(seen) % EVERY == 0 and writers:
                numbers = {"loss": loss, **kv.metrics()}
                for writer in writers:
                    writer.write(len(seen), numbers)
    if kv.rank != 0:
        return 0
    numbers = kv.metrics()
    print(f"{len(seen)} steps, test accuracy {accuracy(model, unseen):.3f}")
    print(f"sent {numbers['sent_bytes'] / 1e6:.1f} MB, received {numbers['received_bytes'] / 1e6:.1f} MB")
    waits_ms = 1000 * numbers["pull_wait_p50_s"], 1000 * numbers["pull_wait_p99_s"]
    print(
        f"waited for weights: {waits_ms[0]:.2f} ms in the median, {waits_ms[1]:.2f} ms at the 99th percentile"
    )
    if flags.plot:
        plot({"loss": seen}, flags.plot)
    return 0


class CsvWriter:
    """Writes a row for each step that is logged; the first row has the names."""

    def __init__(self, file: Any) -> None:
        self._rows = csv.writer(file)
        self._has_head = False

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Write one row."""
        if not self._has_head:
            self._rows.writerow(["step", *numbers])
            self._has_head = True
        self._rows.writerow([step, *numbers.values()])


class TensorBoardWriter:
    """Writes one scalar for each number, if the package tensorboard is there."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            print("no events: tensorboard is not installed (pip install tensorboard)")
            return
        self._writer = stack.enter_context(SummaryWriter(folder))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Write all numbers of one step."""
        if self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(f"kvps/{name}", number, step)


if __name__ == "__main__":
    sys.exit(main())
