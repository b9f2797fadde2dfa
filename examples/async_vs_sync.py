"""What one slow worker costs: the same training with dist_sync, dist_ssp and dist_async.

    python examples/async_vs_sync.py

Three workers train the ConvNet of digits.py for the same time, and one of them sleeps in every
step. dist_sync waits for it in every round; dist_async never waits, and puts up with gradients of
older weights; dist_ssp waits only where it would get too far ahead. Scheduler, servers and workers
are threads of this process and talk over loopback sockets.

So there is no worker to kill.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import ConvNet, accuracy, load
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

import kvps

WORKERS, SERVERS, BATCH, LR = 3, 2, 16, 1e-3
STORES = ("dist_sync", "dist_ssp", "dist_async")
LOOK_EVERY_S = 0.25


@dataclass
class Result:
    """What one worker did."""

    steps: int = 0
    seconds: float = 0.0
    curve: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, test accuracy), of rank 0 only."""


def work(
    rank: int, store: str, seconds: float, delay: float, data: TensorDataset, unseen: TensorDataset
) -> Result:
    """Train for ``seconds``; the last worker sleeps for ``delay`` seconds in each step."""
    kv = kvps.create(store)
    model = ConvNet()
    trainer = kvps.Trainer(model, "adam", {"lr": LR}, kvstore=kv)
    loader = DataLoader(data, BATCH, sampler=kvps.data_sampler(data, kv))
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # as long as time lasts
    result = Result()
    kv.barrier()
    start = look_at = time.perf_counter()
    for images, labels in batches:
        if rank == WORKERS - 1:
            time.sleep(delay)
        model.zero_grad()
        F.cross_entropy(model(images), labels, reduction="sum").backward()
        trainer.step(BATCH * WORKERS)
        result.steps += 1
        now = time.perf_counter()
        result.seconds = now - start
        is_over = result.seconds >= seconds
        if rank == 0 and (now >= look_at or is_over):
            result.curve.append((result.seconds, accuracy(model, unseen)))
            look_at += LOOK_EVERY_S
        if is_over:
            break
    kvps.shutdown()  # the others go on without this worker, and do not wait for it
    return result


def table(results: dict[str, list[Result]], delay: float) -> Table:
    """Put the stores side by side."""
    made = Table(title=f"{WORKERS} workers, one of them slowed by {delay * 1000:.0f} ms a step")
    made.add_column("store")
    for title in ("samples/s", "test accuracy", "steps of each worker"):
        made.add_column(title, justify="right")
    for store, ranks in results.items():
        steps = [one.steps for one in ranks]
        rate = sum(steps) * BATCH / max(one.seconds for one in ranks)
        made.add_row(store, f"{rate:,.0f}", f"{ranks[0].curve[-1][1]:.4f}", " / ".join(map(str, steps)))
    return made


def plot(results: dict[str, list[Result]], path: Path) -> str:
    """Draw test accuracy over time, if matplotlib is there; return what became of it."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "no picture: matplotlib is not installed (pip install 'kvps[examples]')"
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for store, ranks in results.items():
        axes.plot(*zip(*ranks[0].curve, strict=True), label=store, marker=".")
    axes.set(xlabel="seconds", ylabel="test accuracy", title="One of three workers is slow")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"picture in {path}"


def main(arguments: list[str] | None = None) -> int:
    """Train with each store; return the exit code."""
    parser = argparse.ArgumentParser(description="One slowed worker, three kinds of store.")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each store")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds the slow one sleeps")
    parser.add_argument("--plot", type=Path, default=Path("async_vs_sync.png"), metavar="FILE.png")
    flags = parser.parse_args(arguments)

    console = Console()
    torch.set_num_threads(1)  # each worker is a thread already
    data, unseen = load()
    results = {}
    for store in STORES:
        console.print(f"{store}: {flags.seconds:g} s ...")
        torch.manual_seed(0)
        with kvps.LocalCluster(WORKERS, SERVERS) as cluster:
            results[store] = cluster.run(work, store, flags.seconds, flags.delay, data, unseen)
    console.print(table(results, flags.delay))
    console.print(
        f"Measured: all workers' samples by the time until the last one stopped, and rank 0's "
        f"accuracy on {len(unseen)} unseen images when its {flags.seconds:g} s were over."
    )
    console.print(plot(results, flags.plot))
    return 0


if __name__ == "__main__":
    sys.exit(main())
