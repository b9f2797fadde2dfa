"""A small model and its batches, trained by workers of a LocalCluster and by one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import kvps

Weights = list[torch.Tensor]
Maker = Callable[..., torch.optim.Optimizer]

DATA = torch.Generator().manual_seed(1)
INPUTS = torch.randn(24, 6, generator=DATA)
LABELS = torch.randint(3, (24,), generator=DATA)
STEPS = 6
OPTIMIZERS: dict[str, Maker] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


def net(seed: int = 0) -> torch.nn.Sequential:
    """A small model with normalised features; ``seed`` chooses its weights."""
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3), torch.nn.LayerNorm(3)
    )
    draw(model, seed)
    return model


def draw(model: torch.nn.Module, seed: int, std: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=std, generator=generator)


def weights(model: torch.nn.Module) -> Weights:
    return [param.detach().clone() for param in model.parameters()]


def loss_of(model: torch.nn.Module, rows: slice) -> torch.Tensor:
    return cross_entropy(model(INPUTS[rows]), LABELS[rows])


def part(rank: int, workers: int, size: int = 24) -> slice:
    """The part of a batch of ``size`` that a worker takes."""
    return slice(rank * size // workers, (rank + 1) * size // workers)


def run(workers: int, work: Callable[..., Any], *arguments: Any, servers: int = 2) -> list[Any]:
    with kvps.LocalCluster(workers, servers) as cluster:
        return cluster.run(work, *arguments)


def assert_all(results: list[Weights], expected: Weights) -> None:
    """All workers have the expected weights, and the same to the bit."""
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True)), "to the bit"
