"""Train a network on handwritten digits with Accelerate: over the backend "kvps", or with Adam on the servers.

    kvps-launch -n 2 -s 2 -- python examples/accelerate_digits.py             # DDP over the backend "kvps"
    kvps-launch -n 2 -s 2 -- python examples/accelerate_digits.py --servers   # Adam on the servers

The process group is there before the Accelerator, which would refuse the backend on a CPU. It needs the package
accelerate.

If a worker is killed, the job ends: the process group, which this library needs, has lost a member.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import kvps.torch
from kvps.platforms.accelerate import without_ddp

EPOCHS, BATCH, LR = 12, 64, 5e-3


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return four fifths of the images to train with, and the rest to test with."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(order) * 4 // 5
    train, test = order[:cut], order[cut:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def main(arguments: list[str] | None = None) -> int:
    """Train and test; return the exit code."""
    parser = argparse.ArgumentParser(description="Train a network with Accelerate.")
    parser.add_argument("--servers", action="store_true", help="run Adam on the servers")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="exit 1 below this")
    flags = parser.parse_args(arguments)

    dist.init_process_group("kvps")
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )
    data, unseen = load()
    loader = DataLoader(data, max(1, BATCH // accelerator.num_processes), shuffle=True)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    if flags.servers:
        without_ddp(accelerator)
        optimizer = kvps.torch.DistributedOptimizer(optimizer, model, update_on_kvstore=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(flags.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"epoch {epoch + 1:2}  loss {mean:.4f}")

    images, labels = [one.to(accelerator.device) for one in unseen.tensors]
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    accelerator.print(f"test accuracy {accuracy:.4f}")
    accelerator.end_training()
    if accuracy < flags.min_accuracy:
        print(f"that is below {flags.min_accuracy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
