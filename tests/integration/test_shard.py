"""A sharded model over a cluster: any number of workers gives the weights of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

import kvps
from kvps.torch import shard

Weights = dict[str, torch.Tensor]
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


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.wide = torch.nn.Linear(8, 16)
        self.narrow = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.narrow(self.wide(self.norm(x)).tanh())
        return y


class Net(torch.nn.Module):
    """Three layers between two that are in no list, and a parameter that is the model's own."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.begin = torch.nn.Linear(6, 8)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(3)])
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.end = torch.nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x) * self.scale
        for layer in self.layers:
            if self.how == "plain":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
        y: torch.Tensor = self.end(x)
        return y


def net(seed: int = 0, how: str = "plain") -> Net:
    model = Net(how)
    draw(model, seed)
    return model


def draw(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.3, generator=generator)


def loss_of(model: torch.nn.Module, rows: slice) -> torch.Tensor:
    return cross_entropy(model(INPUTS[rows]), LABELS[rows])


def part(rank: int, workers: int) -> slice:
    """The part of the batch that one worker takes."""
    return slice(rank * 24 // workers, (rank + 1) * 24 // workers)


def run(workers: int, work: Callable[..., Any], *arguments: Any, servers: int = 2) -> list[Any]:
    with kvps.LocalCluster(workers, servers) as cluster:
        return cluster.run(work, *arguments)


def assert_all(results: list[Weights], expected: Weights) -> None:
    for result in results:
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-6)
            assert torch.equal(result[name], results[0][name]), "to the bit"


def copied(model: torch.nn.Module) -> Weights:
    return {name: one.clone() for name, one in model.state_dict().items()}


def train_alone(model: torch.nn.Module, make: Maker, passes: int = 1, steps: int = STEPS) -> Weights:
    """One process, on the whole batch of each step, under a scheduler."""
    optimizer = make([one for one in model.parameters() if one.requires_grad])
    scheduler = StepLR(optimizer, 2, 0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        (passes * loss_of(model, slice(24))).backward()
        optimizer.step()
        scheduler.step()
    return copied(model)


def is_away(module: torch.nn.Module) -> bool:
    return all(bool(one.isnan().all()) for one in module.parameters())


# --- any number of workers --------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["plain", "checkpointed", "reentrant"])
def test_workers_give_the_weights_of_one_process(name: str, workers: int, how: str) -> None:
    def work(rank: int) -> Weights:
        model = net(seed=rank, how=how)  # rank 0's weights count
        optimizer = OPTIMIZERS[name](model.parameters())
        sharded = shard(model, optimizer=optimizer)
        assert is_away(model)
        scheduler = StepLR(optimizer, 2, 0.5)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, part(rank, workers)).backward()
            assert is_away(model), "all are freed behind backward"
            assert all(one.grad is None for one in model.parameters())
            optimizer.step()
            scheduler.step()
        assert not optimizer.state
        assert sharded.steps == STEPS
        return copied(model)

    assert_all(run(workers, work), train_alone(net(how=how), OPTIMIZERS[name]))
