"""The training of ``kvps demo``: a small network learns to tell two spirals apart.

Each worker runs this script, as it would any other. The optimizer is on the servers: a replacement goes on at
the step of the others. A key of its own counts what the servers apply, and lies on both of them.
"""

from __future__ import annotations

import math
import sys
import time

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import kvps

LR, WORKERS = 3.0, 2
PARTS = 2000
"""Elements of each number that is counted: more than a server gets of one key."""
PAUSE_S = 0.005
"""Seconds between two steps: a small network trains too fast to look at."""


def spirals(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 128 points on two spirals, (128, 2), and the spiral of each, (128, 1)."""
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (128, 1), generator=draw).float()
    turn = 3 * torch.rand(128, 1, generator=draw).sqrt()
    angle = math.pi * (turn + label)
    return turn * torch.cat([angle.cos(), angle.sin()], 1), label


def network() -> torch.nn.Module:
    """Return a network with two hidden layers, the same each time."""
    torch.manual_seed(1)
    layers = (
        torch.nn.Linear(2, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 1),
    )
    return torch.nn.Sequential(*layers)


def gradients(model: torch.nn.Module, seed: int) -> list[torch.Tensor]:
    """Return the gradient of each parameter, for the points of ``seed``."""
    x, y = spirals(seed)
    loss = binary_cross_entropy_with_logits(model(x), y)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def count_of(step: int, rank: int) -> torch.Tensor:
    """Return what a worker pushes to be counted, (WORKERS, 2, PARTS): in its row 1, and the step plus 1."""
    count = torch.zeros(WORKERS, 2, PARTS, dtype=torch.float64)
    count[rank, 0], count[rank, 1] = 1, step + 1
    return count


def is_exact(counted: torch.Tensor, steps: int) -> bool:
    """Whether each step of each worker was applied once, on all servers."""
    expected = torch.zeros_like(counted)
    for step in range(steps):
        for rank in range(WORKERS):
            expected -= LR / WORKERS * count_of(step, rank)
    return torch.equal(counted, expected)


def main(steps: int) -> None:
    """Train as a worker of the job that this process belongs to."""
    torch.set_num_threads(1)
    model = network()
    counted = torch.zeros(WORKERS, 2, PARTS, dtype=torch.float64)
    names = ["counted", *[name for name, _ in model.named_parameters()]]
    weights = [counted, *[parameter.detach() for parameter in model.parameters()]]
    kv = kvps.create("dist_sync", average=True, bigarray_bound=PARTS)
    kv.set_optimizer("sgd", lr=LR)
    kv.init(names, weights)
    start = kv.resume(names)  # 0, or the step at which a replacement goes on
    kv.pull(names, out=weights)
    for step in range(start, steps):
        pushed = [count_of(step, kv.rank), *gradients(model, step * WORKERS + kv.rank)]
        kv.pushpull(names, pushed, out=weights)
        if kv.rank == 0:
            print(f"step {step + 1} {time.monotonic()}", flush=True)
        time.sleep(PAUSE_S)
    if kv.rank == 0:
        x, y = spirals(-1)
        right = ((model(x) > 0) == (y > 0)).float().mean().item()
        print(f"end {right} {int(is_exact(counted, steps))}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
