"""Train a network of which each worker holds a few layers at a time; the rest is on the servers.

    kvps-launch -n 2 -s 2 -- python examples/sharded_mlp.py            # the model lives on the servers
    kvps-launch -n 2 -s 2 -- python examples/sharded_mlp.py --whole    # every worker holds all of it
    python examples/sharded_mlp.py                                     # one process

It learns to tell handwritten digits apart. Both ways print about the same losses, and how much the own memory of
rank 0 grew at most while it trained: by less than the model, or with ``--whole`` by several times the model. The growth
includes activations and buffers of messages. It does not include pages of the servers' shared memory, which the worker
reads in place: ``top`` and ``ps`` count these pages as memory of the worker, too.

Add ``--max-restarts 2`` to kvps-launch: a worker that is killed is started again, and goes on where the others are.
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import Progress
from sklearn.datasets import load_digits

import kvps
import kvps.torch

STEPS, BATCH, LR, WIDTH, DEPTH = 25, 128, 0.05, 1536, 12


class Block(torch.nn.Module):
    """Two layers and a way around them: 4.7 million parameters, 18 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.wide = torch.nn.Linear(WIDTH, WIDTH)
        self.narrow = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.narrow(self.wide(self.norm(x)).relu()) / DEPTH
        return y


def build(depth: int) -> torch.nn.Sequential:
    """Return a model whose blocks are elements of a Sequential."""
    blocks = [Block() for _ in range(depth)]
    return torch.nn.Sequential(torch.nn.Linear(64, WIDTH), *blocks, torch.nn.Linear(WIDTH, 10))


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of 64 numbers, and their labels."""
    digits = load_digits()
    return torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


def own_mib() -> float:
    """Return the resident memory that this process may write to; it can only read that of the servers."""
    kib, is_own = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, second, *_ = line.split()
        if not first.endswith(":"):  # the head of a mapping: addresses, permissions
            is_own = "w" in second
        elif first == "Rss:" and is_own:
            kib += int(second)
    return kib / 1024


class Growth(threading.Thread):
    """The most by which this process's own memory has grown, looked at every 50 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.begun, self.mib = own_mib(), 0.0
        self._is_over = threading.Event()

    def run(self) -> None:
        """Look until the training is over."""
        while not self._is_over.wait(0.05):
            self.mib = max(self.mib, own_mib() - self.begun)

    def end(self) -> float:
        """Return the growth in MiB."""
        self._is_over.set()
        self.join()
        return self.mib


def use_torch() -> None:
    """Train a layer, so that what torch loads when it is first used counts for neither way."""
    layer = torch.nn.Linear(64, WIDTH)
    optimizer = torch.optim.SGD(layer.parameters(), lr=LR)
    F.cross_entropy(layer(torch.ones(BATCH, 64)), torch.zeros(BATCH).long()).backward()
    optimizer.step()


def main(arguments: list[str] | None = None) -> int:
    """Train, print the result; return the exit code."""
    parser = argparse.ArgumentParser(description="Train a model that lives on the servers.")
    parser.add_argument("--whole", action="store_true", help="hold the whole model here instead")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loss")
    parser.add_argument("--depth", type=int, default=DEPTH, help="how many blocks")
    flags = parser.parse_args(arguments)

    images, labels = load()
    kv = kvps.create("dist_sync", average=True)
    use_torch()
    growth = Growth()
    growth.start()
    torch.manual_seed(0)  # rank 0's first weights count, and are made on rank 0 only
    with torch.device("cpu" if flags.whole else "meta"):
        model = build(flags.depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, flags.steps)
    if flags.whole:
        optimizer = kvps.torch.DistributedOptimizer(optimizer, model, kv, update_on_kvstore=True)
    else:
        kvps.torch.shard(model, kv, optimizer=optimizer)

    order = torch.Generator().manual_seed(1)  # the same on every rank; each takes its part
    losses: list[float] = []
    with Progress(disable=kv.rank != 0 or not sys.stdout.isatty()) as bar:
        for _ in bar.track(range(flags.steps), description="train"):
            rows = torch.randint(len(labels), (BATCH,), generator=order)[kv.rank :: kv.num_workers]
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    grown_mib = growth.end()
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    if kv.rank == 0:
        size = sum(one.numel() * one.element_size() for one in model.parameters()) / (1 << 20)
        how = "all of it here" if flags.whole else "some blocks here"
        print(f"model of {size:.0f} MiB, {how}: own memory grew by {grown_mib:.0f} MiB")
        print(f"loss {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}, accuracy {accuracy:.3f}")
        if flags.plot:
            from digits import plot  # draws by matplotlib, if it is there

            plot({"loss": losses}, flags.plot, "A sharded model")
    return 0 if accuracy > 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
