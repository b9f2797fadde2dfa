"""Models that differ on one rank: every front end tells every rank at once, with the names that differ."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import kvps
import kvps.torch
from kvps.errors import Mismatch

TOLD_MAX_S = 10.0
"""It takes about 0.1 s; this machine may be busy. A call's limit is 300 s."""


def base() -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.BatchNorm1d(4)})


def deeper() -> torch.nn.Module:
    return torch.nn.ModuleDict({**base(), "c": torch.nn.Linear(4, 2, bias=False)})


def renamed() -> torch.nn.Module:
    model = base()
    model["z"] = model.pop("a")
    return model


def wider() -> torch.nn.Module:
    return torch.nn.ModuleDict({**base(), "a": torch.nn.Linear(4, 5)})


def frozen() -> torch.nn.Module:
    model = base()
    model["a"].weight.requires_grad_(False)
    return model


def without_buffers() -> torch.nn.Module:
    return torch.nn.ModuleDict({**base(), "b": torch.nn.BatchNorm1d(4, track_running_stats=False)})


OTHERS = {
    deeper: "worker 1 has parameter 'c.weight' (float32[2,4], trained), and worker 0 does not",
    renamed: "worker 0 has parameter 'a.bias' (float32[4], trained), and worker 1 does not",
    wider: "parameter 'a.weight' is float32[4,4], trained on worker 0, and float32[5,4], trained on worker 1",
    frozen: "parameter 'a.weight' is float32[4,4], trained on worker 0, and float32[4,4], frozen on worker 1",
    without_buffers: "worker 0 has buffer 'b.running_mean' (float32[4]), and worker 1 does not",
}


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)


def trainer(model: torch.nn.Module, **options: Any) -> Any:
    return kvps.Trainer(model, "sgd", {"lr": 0.1}, **{"kvstore": "dist_sync", **options})


def distributed(model: torch.nn.Module, **options: Any) -> Any:
    return kvps.torch.DistributedOptimizer(sgd(model), model, **options)


def diloco(model: torch.nn.Module, **options: Any) -> Any:
    return kvps.torch.DiLoCo(model, sgd(model), sync_every=2, **options)


FRONT_ENDS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "DistributedOptimizer": distributed,
    "DistributedOptimizer, updates on servers": partial(distributed, update_on_kvstore=True),
    "DistributedOptimizer, find_unused": partial(distributed, find_unused=True),
    "DistributedOptimizer, overlap_forward": partial(distributed, overlap_forward=True),
    "DistributedOptimizer, allreduce": partial(distributed, kvstore="allreduce"),
    "Trainer": trainer,
    "Trainer, updates here": partial(trainer, update_on_kvstore=False),
    "Trainer, overlap": partial(trainer, overlap=True),
    "Trainer, dist_async": partial(trainer, kvstore="dist_async"),
    "Trainer, allreduce": partial(trainer, kvstore="allreduce"),
    "DiLoCo": diloco,
    "DiLoCo, async": partial(diloco, mode="async"),
    "LocalSGD": lambda model: kvps.torch.LocalSGD(model, sgd(model), sync_every=2),
    "shard": lambda model: kvps.torch.shard(model, optimizer=sgd(model)),
}


def told(make: Callable[[int], Any]) -> list[str]:
    """Return what both ranks are told, soon."""

    def work(rank: int) -> str:
        began = time.monotonic()
        with pytest.raises(Mismatch) as found:
            make(rank)
        assert time.monotonic() - began < TOLD_MAX_S
        return str(found.value)

    sgd(base())  # torch compiles nothing, and imports for it all the same: seconds, once
    with kvps.LocalCluster(2, 1) as cluster:
        return cluster.run(work)


CASES = [
    pytest.param(
        front_end,
        other,
        id=f"{front_end}-{other.__name__}",
        marks=[] if turn % len(OTHERS) == index else pytest.mark.thorough,
    )
    for turn, front_end in enumerate(FRONT_ENDS)
    for index, other in enumerate(OTHERS)
]


@pytest.mark.parametrize(("front_end", "other"), CASES)
def test_every_rank_is_told_what_differs(front_end: str, other: Callable[[], torch.nn.Module]) -> None:
    make = FRONT_ENDS[front_end]
    first, second = told(lambda rank: make(other() if rank else base()))
    assert first == second
    assert OTHERS[other] in first


def test_options_that_decide_the_calls_are_compared() -> None:
    first, second = told(lambda rank: distributed(base(), find_unused=rank == 1))
    assert first == second
    assert "the option find_unused is False on worker 0, and True on worker 1" in first


def test_the_same_store_can_be_used_again_after_the_models_are_alike() -> None:
    def work(rank: int) -> float:
        kv = kvps.create("dist_sync")
        with pytest.raises(Mismatch):
            trainer(deeper() if rank else base(), kvstore=kv)
        model = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(rank + 1.0)
        trainer(model, kvstore=kv)
        return float(model.weight.detach()[0, 0])

    with kvps.LocalCluster(2, 1) as cluster:
        assert cluster.run(work) == [1.0, 1.0]


def test_a_rank_that_left_without_the_front_end_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvps")
    with kvps.LocalCluster(2, 1) as cluster:

        def work(rank: int) -> None:
            if rank == 0:
                trainer(base())
                return
            kvps.create("dist_async", name="other").session.leave(True, 0, "end of script")

        cluster.run(work)
    assert "Trainer(): rank 1 left the job without it" in caplog.text


def test_a_rank_that_alone_sets_another_rate_is_told_soon() -> None:
    told_at: list[float] = []

    def work(rank: int) -> None:
        model = torch.nn.Linear(2, 1)
        own = trainer(model)
        for step in range(4):
            if rank == 1 and step == 2:
                began = time.monotonic()
                with pytest.raises(
                    Mismatch, match=r"after 2 rounds .* rank 0 has pushed for round 2 without"
                ):
                    own.set_learning_rate(0.01)
                told_at.append(time.monotonic() - began)
            model(torch.ones(4, 2)).sum().backward()
            own.step(4)

    with kvps.LocalCluster(2, 1) as cluster:
        cluster.run(work)
    assert told_at[0] < TOLD_MAX_S
