"""Rows of sparse gradients that were used and whose mean is 0: an optimizer with momenta updates them all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvps
from kvps.torch import DistributedOptimizer

STEPS = 6


def table() -> torch.nn.Embedding:
    made = torch.nn.Embedding(40, 4, sparse=True)
    with torch.no_grad():
        made.weight.normal_(generator=torch.Generator().manual_seed(0))
    return made


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(model.parameters()), lr=0.1)


class OfTrainer:
    def __init__(self, trainer: kvps.Trainer, model: torch.nn.Module, workers: int) -> None:
        self.trainer, self.model, self.workers = trainer, model, workers

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def step(self) -> None:
        self.trainer.step(self.workers)


def front_end(name: str, model: torch.nn.Module, store: str, workers: int) -> Any:
    what, _, option = name.partition(" ")
    if what == "optimizer":
        more: dict[str, Any] = {option: True} if option else {}
        return DistributedOptimizer(adam(model), model, store, **more)
    is_on_store = what == "servers"
    trainer = kvps.Trainer(
        model,
        "adam" if is_on_store else adam(model),  # Adam of the servers is SparseAdam for rows
        {"lr": 0.1} if is_on_store else None,
        store,
        update_on_kvstore=is_on_store,
        overlap=bool(option),
    )
    return OfTrainer(trainer, model, workers)


def loss_of(model: torch.nn.Module, rank: int, step: int, workers: int) -> torch.Tensor:
    """Row 1 has a gradient of 0 from the third step on; in row 2 those of two workers cancel."""
    x = model(torch.tensor([1, 2, 5 + rank + step]))
    first = x[0].sum() * (step < 2)
    sign = -1.0 if step >= 2 and rank == 1 else 1.0
    loss: torch.Tensor = first + sign * x[1].sum() + x[2].square().sum()
    return loss / workers


def train(model: torch.nn.Module, optimizer: Any, ranks: list[int], workers: int) -> torch.Tensor:
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            loss = loss_of(model, rank, step, workers)
            (loss * workers if len(ranks) < workers else loss).backward()
        optimizer.step()
    found: torch.Tensor = model.state_dict()["weight"].clone()
    return found


HERE = [*("optimizer", "optimizer overlap_forward", "optimizer find_unused"), *("workers", "workers overlap")]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("name", "store"),
    [
        *((name, "dist_sync") for name in (*HERE, "servers", "servers overlap")),
        *((name, "allreduce") for name in ("optimizer", "workers", "workers overlap")),
    ],
)
def test_a_used_row_with_a_mean_of_0_is_updated(name: str, store: str, workers: int) -> None:
    def work(rank: int) -> torch.Tensor:
        model = table()
        return train(model, front_end(name, model, store, workers), [rank], workers)

    model = table()
    expected = train(model, adam(model), list(range(workers)), workers)
    with kvps.LocalCluster(workers, 2) as cluster:
        results = cluster.run(work)
    for found in results:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(found, results[0])
        if workers == 1 and not name.startswith("servers"):
            assert torch.equal(found, expected), "to the bit"


@pytest.mark.parametrize("name", ["optimizer", "optimizer find_unused", "workers overlap"])
def test_a_second_sparse_gradient_before_the_step_is_refused(name: str) -> None:
    with kvps.LocalCluster():
        model = table()
        optimizer = front_end(name, model, "dist_sync", 1)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, 0, 0, 1).backward()
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 0, 0, 1).backward()
        second = loss_of(model, 0, 1, 1)
        with pytest.raises(kvps.ConfigError, match=r"'weight' got another gradient"):
            second.backward()


@pytest.mark.parametrize("name", ["workers", "servers"])
def test_sparse_gradients_of_two_passes_add_up_where_they_leave_in_the_step(name: str) -> None:
    def passes(model: torch.nn.Module, optimizer: Any) -> torch.Tensor:
        for step in range(3):
            optimizer.zero_grad()
            for number in range(2):
                loss_of(model, 0, step + number, 1).backward()
            optimizer.step()
        return model.state_dict()["weight"].clone()

    model = table()
    expected = passes(model, adam(model))
    with kvps.LocalCluster():
        model = table()
        found = passes(model, front_end(name, model, "dist_sync", 1))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
