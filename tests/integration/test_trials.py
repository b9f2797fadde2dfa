"""Trials in one process: each begins anew, and nothing of those before is left on workers, servers and scheduler.

The limits of the cluster leave room for one trial: a store or a barrier that was kept would be refused room.
"""

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kvps
import kvps.torch
from tests.integration.processes import until

THOROUGH = pytest.mark.thorough
LIMITS = "stores=3,barrier_names=12,keys=64"


@pytest.fixture(autouse=True)
def _room_for_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KVPS_LIMITS", LIMITS)
    yield
    kvps.shutdown()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 1))


def store(model: torch.nn.Module) -> Callable[[], None]:
    kv = kvps.create("dist_sync", name="trial")
    names = [name for name, _ in model.named_parameters()]
    values = [param.detach() for param in model.parameters()]
    kv.init(names, values)
    kv.set_optimizer("sgd", lr=0.1, momentum=0.9)
    assert kv.version(names) == [0] * len(names)
    for _ in range(3):
        kv.pushpull(names, [torch.ones_like(value) for value in values], out=values)
    kv.barrier()
    return kv.close


def optimizer(**options: Any) -> Callable[[torch.nn.Module], Callable[[], None]]:
    def train(model: torch.nn.Module) -> Callable[[], None]:
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        own = kvps.torch.DistributedOptimizer(inner, model, **options)
        for _ in range(3):
            own.zero_grad()
            model(torch.ones(4, 40)).sum().backward()
            own.step()
        return own.close

    return train


def trainer(**options: Any) -> Callable[[torch.nn.Module], Callable[[], None]]:
    def train(model: torch.nn.Module) -> Callable[[], None]:
        sgd = {"lr": 0.1, "momentum": 0.9}
        own = kvps.Trainer(model, "sgd", sgd, kvstore="dist_sync", **options)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(4, 40)).sum().backward()
            own.step(1)
        return own.close

    return train


def diloco(model: torch.nn.Module) -> Callable[[], None]:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with kvps.torch.DiLoCo(model, inner, sync_every=2):
        for _ in range(4):
            inner.zero_grad()
            model(torch.ones(4, 40)).sum().backward()
            inner.step()
    return lambda: None


FRONT_ENDS = {
    "store": store,
    "optimizer": optimizer(),
    "optimizer on servers": optimizer(update_on_kvstore=True),
    "optimizer, overlap_forward": optimizer(overlap_forward=True),
    "trainer": trainer(),
    "trainer, overlap": trainer(overlap=True),
    "trainer on workers": trainer(update_on_kvstore=False, overlap=True),
    "DiLoCo": diloco,
}


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten().clone() for param in model.parameters()])


def sweep(train: Callable[[torch.nn.Module], Callable[[], None]], trials: int) -> None:
    """Train the same model again and again: the same weights each time, and no more descriptors."""
    first, opened, alive = None, 0, []
    for number in range(trials):
        model = model_of(3)
        close = train(model)
        close()
        trained = weights(model)
        first = trained if first is None else first
        assert torch.equal(trained, first), f"trial {number} is another"
        alive.append(weakref.ref(model))
        del model, close
        if number == 3:
            gc.collect()
            opened = descriptors()
    gc.collect()
    assert not [item for item in alive if item() is not None], "models are kept"
    until(lambda: descriptors() <= opened, "end of the descriptors")


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_each_trial_begins_anew_and_leaves_nothing(front_end: str) -> None:
    with kvps.LocalCluster(1, 2):
        sweep(FRONT_ENDS[front_end], 6)


@THOROUGH
@pytest.mark.timeout(600)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_200_trials(front_end: str) -> None:
    with kvps.LocalCluster(1, 2):
        sweep(FRONT_ENDS[front_end], 200)


@pytest.mark.parametrize(
    "name", ["optimizer", "optimizer on servers", "optimizer, overlap_forward", "trainer, overlap"]
)
def test_a_front_end_that_was_not_closed_is_freed(name: str) -> None:
    with kvps.LocalCluster(1, 1):
        model = model_of(3)
        FRONT_ENDS[name](model)
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None


def fail() -> None:
    with kvps.create("dist_sync", name="trial") as kv:
        kv.init("w", torch.zeros(4))
        assert kv.pushpull("w", torch.ones(4)).tolist() == [1.0] * 4
        raise ZeroDivisionError


def test_a_trial_that_fails_does_not_show_in_the_next() -> None:
    with kvps.LocalCluster(1, 2):
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                fail()


def test_two_objects_of_one_name_are_one_store_until_the_last_is_closed() -> None:
    with kvps.LocalCluster(1, 1):
        first, second = (kvps.create("dist_sync", name="trial") for _ in range(2))
        first.init("w", torch.zeros(4))
        first.close()
        assert kvps.create("dist_sync", name="trial").pull("w").tolist() == [0.0] * 4
        second.close()
        assert second.is_over
        with pytest.raises(kvps.ConfigError, match="is closed"):
            second.pull("w")


def test_a_rank_that_begins_the_next_trial_waits_for_the_others() -> None:
    def trials(rank: int) -> list[float]:
        found = []
        for number in range(3):
            with kvps.create("dist_sync", name="trial", timeout=30) as kv:
                kv.init("w", torch.zeros(4))
                found.append(kv.pushpull("w", torch.full((4,), float(number)))[0].item())
        return found

    with kvps.LocalCluster(2, 2) as cluster:
        assert cluster.run(trials) == [[0.0, 2.0, 4.0]] * 2
