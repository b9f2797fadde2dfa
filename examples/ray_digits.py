"""Train a ConvNet on handwritten digits with Ray Train: the servers are actors of Ray beside the workers.

    python examples/ray_digits.py                  # a Ray of its own, on this machine
    python examples/ray_digits.py --kill           # worker 1 is killed at half time: Ray replaces it alone
    RAY_ADDRESS=auto python examples/ray_digits.py --workers 4 --servers 2

It needs ``pip install 'kvps[ray,examples]'``. Batches depend on the step and the rank alone, so a replacement continues
at the step that ``kv.resume`` names, and the weights at the end are the same with and without ``--kill``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

import ray
import torch
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits

import kvps.platforms.ray
from kvps.torch import DistributedOptimizer

EPOCHS, BATCH, LR = 12, 64, 5e-3


def net() -> torch.nn.Module:
    """Return two convolutions and two layers: 70,000 parameters."""
    return torch.nn.Sequential(
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


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return images, their labels, and a random order: its last fifth is to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    return images, labels, torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))


def train(settings: dict[str, object]) -> float:
    """Train as one worker; return the share of unseen images that the model gets right."""
    torch.manual_seed(0)
    model = net()
    adam = torch.optim.Adam(model.parameters(), lr=LR)
    optimizer = DistributedOptimizer(adam, model, "dist_sync", update_on_kvstore=True)
    kv = optimizer.kvstore
    images, labels, order = load()
    seen, unseen = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    per_epoch = len(seen) // BATCH
    steps = int(settings["epochs"]) * per_epoch
    begin = kv.resume([name for name, _ in model.named_parameters()])
    if begin:
        print(f"worker {kv.rank} continues at step {begin} of {steps}", flush=True)
    for step in range(begin, steps):
        if settings["kill"] and (kv.rank, begin, step) == (1, 0, steps // 2):
            os.kill(os.getpid(), signal.SIGKILL)
        epoch, at = divmod(step, per_epoch)
        shuffled = seen[torch.randperm(len(seen), generator=torch.Generator().manual_seed(1 + epoch))]
        part = shuffled[at * BATCH : (at + 1) * BATCH][kv.rank :: kv.num_workers]
        optimizer.zero_grad()
        F.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
    with torch.no_grad():
        return (model(images[unseen]).argmax(1) == labels[unseen]).float().mean().item()


def main(arguments: list[str] | None = None) -> int:
    """Train by Ray; return the exit code."""
    parser = argparse.ArgumentParser(description="Train a ConvNet on handwritten digits with Ray.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--kill", action="store_true", help="kill worker 1 at half time")
    parser.add_argument("--storage", type=Path, help="Ray's storage path (a temporary folder)")
    parser.add_argument("--min-accuracy", type=float, default=0.97, help="exit 1 below this")
    flags = parser.parse_args(arguments)

    if "RAY_ADDRESS" not in os.environ:
        cpus = flags.workers + flags.servers
        ray.init(num_cpus=cpus, include_dashboard=False)
    with tempfile.TemporaryDirectory() as temporary:
        result = TorchTrainer(
            train,
            train_loop_config={"epochs": flags.epochs, "kill": flags.kill},
            torch_config=kvps.platforms.ray.KvpsConfig(servers=flags.servers, checkpoint_every=60),
            scaling_config=ScalingConfig(num_workers=flags.workers),
            run_config=RunConfig(
                storage_path=str(flags.storage or temporary), failure_config=FailureConfig(max_failures=2)
            ),
        ).fit()
    accuracy = result.return_value
    print(f"{flags.workers} workers, {flags.servers} servers: test accuracy {accuracy:.4f}")
    if accuracy < flags.min_accuracy:
        print(f"that is below {flags.min_accuracy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
