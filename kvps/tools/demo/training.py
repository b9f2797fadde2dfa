"""The training of ``kvps demo``: a small network learns to tell two spirals apart.

Each worker runs this script, as it would any other. The optimizer is on the servers: a replacement goes on at
the step of the others. At the end worker 0 repeats the training alone, and prints both results.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import kvps

LR, MOMENTUM = 1.0, 0.5
"""Powers of two: their products are exact, so fused operations give the same bits as others."""
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


def alone(steps: int, workers: int) -> torch.nn.Module:
    """Return the network that one process trains without servers, with the points of all workers."""
    model = network()
    weights = [parameter.detach() for parameter in model.parameters()]
    # torch.optim.SGD by hand: its import takes as long as that of torch.
    speeds = [torch.zeros_like(weight) for weight in weights]
    for step in range(steps):
        of_workers = [gradients(model, step * workers + rank) for rank in range(workers)]
        for weight, speed, *parts in zip(weights, speeds, *of_workers, strict=True):
            speed.mul_(MOMENTUM).add_(torch.stack(parts).sum(0) / workers)
            weight.add_(speed, alpha=-LR)
    return model


def digest(model: torch.nn.Module) -> str:
    """Return a digest of all weights, to the bit."""
    weights = b"".join([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
    return hashlib.sha256(weights).hexdigest()[:16]


def main(steps: int) -> None:
    """Train as a worker of the job that this process belongs to."""
    torch.set_num_threads(1)  # the same sums, to the bit, in each process
    model = network()
    names = [name for name, _ in model.named_parameters()]
    weights = [parameter.detach() for parameter in model.parameters()]
    kv = kvps.create("dist_sync", average=True)
    kv.set_optimizer("sgd", lr=LR, momentum=MOMENTUM)
    kv.init(names, weights)
    start = kv.resume(names)  # 0, or the step at which a replacement goes on
    kv.pull(names, out=weights)
    for step in range(start, steps):
        kv.pushpull(names, gradients(model, step * kv.num_workers + kv.rank), out=weights)
        if kv.rank == 0:
            print(f"step {step + 1} {time.monotonic()}", flush=True)
        time.sleep(PAUSE_S)
    if kv.rank == 0:
        x, y = spirals(-1)
        right = ((model(x) > 0) == (y > 0)).float().mean().item()
        print(f"end {right} {digest(model)} {digest(alone(steps, kv.num_workers))}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
