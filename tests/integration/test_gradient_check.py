"""Gradients that a store without an optimizer would put in the place of weights."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvps

Step = Callable[[Any, torch.nn.Linear], object]


def apart(kv: Any, model: torch.nn.Linear) -> None:
    kv.push("w", model.weight.grad)
    kv.pull("w", out=model.weight)


MISTAKES: dict[str, Step] = {
    "pushpull": lambda kv, model: kv.pushpull("w", model.weight.grad, out=model.weight),
    "data": lambda kv, model: kv.pushpull("w", model.weight.grad.data, out=model.weight.data),
    "lists": lambda kv, model: kv.pushpull(["w"], [model.weight.grad], out=[model.weight.detach()]),
    "devices": lambda kv, model: kv.pushpull("w", [model.weight.grad], out=[model.weight]),
    "push and pull": apart,
}
INTENDED: dict[str, Step] = {
    "the sum of gradients": lambda kv, model: kv.pushpull("w", model.weight.grad, out=model.weight.grad),
    "the sum of weights": lambda kv, model: kv.pushpull("w", model.weight.detach(), out=model.weight),
    "a tensor of its own": lambda kv, model: kv.pushpull("w", model.weight.grad, out=torch.empty(2, 2)),
    "no tensor": lambda kv, model: kv.pushpull("w", model.weight.grad),
    "weights again": lambda kv, model: kv.pull("w", out=model.weight),
}


def begin(kind: str) -> tuple[Any, torch.nn.Linear]:
    kv, model = kvps.create(kind), torch.nn.Linear(2, 2, bias=False)
    kv.init("w", model.weight)
    model(torch.ones(1, 2)).sum().backward()
    return kv, model


@pytest.mark.parametrize("step", MISTAKES)
def test_gradients_that_replace_weights_are_told_once(step: str) -> None:
    kv, model = begin("local")
    with pytest.warns(UserWarning, match=r"no optimizer.* for 'w' replaces the weight") as told:
        MISTAKES[step](kv, model)
    with warnings.catch_warnings(action="error"):
        MISTAKES[step](kv, model)
    assert [effect.filename for effect in told] == [__file__]


@pytest.mark.parametrize("step", INTENDED)
def test_other_calls_are_not(step: str) -> None:
    with warnings.catch_warnings(action="error"):
        kv, model = begin("local")
        for _ in range(20):
            INTENDED[step](kv, model)


def test_nor_with_an_optimizer_that_only_rank_0_sets() -> None:
    def work(rank: int) -> None:
        kv, model = begin("dist_sync")
        if rank == 0:
            kv.set_optimizer("sgd", lr=0.1)
        kv.barrier()
        MISTAKES["pushpull"](kv, model)

    with warnings.catch_warnings(action="error"), kvps.LocalCluster(2, 1) as cluster:
        cluster.run(work)
