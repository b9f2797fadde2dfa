"""The options of a front end's store: all stores that the front end makes have them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvps
import kvps.torch
from kvps.compat.horovod.engine import context
from kvps.store.options import StoreOptions
from kvps.store.server_store import DistStore

GIVEN = {"timeout": 47.0, "on_worker_lost": "shrink", "worker_grace": 11.0}
WANTED = StoreOptions(47.0, "shrink", 11.0)
SGD = torch.optim.SGD


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


def backward(model: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(4, 2)).square().mean()
    return loss


def find_unused(options: dict[str, Any]) -> None:
    model = net()
    optimizer = kvps.torch.DistributedOptimizer(
        SGD(model.parameters(), lr=0.1), model, find_unused=True, **options
    )
    backward(model).backward()
    optimizer.step()


def scaler(options: dict[str, Any]) -> None:
    model = net()
    optimizer = kvps.torch.DistributedOptimizer(
        SGD(model.parameters(), lr=0.1), model, update_on_kvstore=True, **options
    )
    scale = torch.amp.GradScaler("cpu")
    scale.scale(backward(model)).backward()
    scale.step(optimizer)


def join(options: dict[str, Any]) -> None:
    model = net()
    optimizer = kvps.torch.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model, **options)
    optimizer.join()


def trainer(optimizer: Any) -> Callable[[dict[str, Any]], None]:
    def work(options: dict[str, Any]) -> None:
        model = net()
        item = optimizer(model.parameters()) if callable(optimizer) else optimizer
        kvps.Trainer(model, item, **{"kvstore": "dist_sync", **options}, update_on_kvstore=False).join()

    return work


def shard(options: dict[str, Any]) -> None:
    kvps.torch.shard(net(), optimizer="sgd", lr=0.1, **options)


def diloco(options: dict[str, Any]) -> None:
    model = net()
    kvps.torch.DiLoCo(model, SGD(model.parameters(), lr=0.1), mode="async", dynamic_sync_every=True, **GIVEN)


def helpers(options: dict[str, Any]) -> None:
    kvps.torch.broadcast_parameters(net(), **options)
    kvps.torch.broadcast_object(1, **options)
    kvps.torch.broadcast_optimizer_state(SGD(net().parameters(), lr=0.1), **options)
    kvps.torch.all_gather_object(1, **options)
    kvps.torch.gather_object(1, **options)
    kvps.torch.average(1.0, **options)
    layers = kvps.torch.SyncBatchNorm.convert_sync_batchnorm(net(), **options)
    backward(layers).backward()


FRONT_ENDS: dict[str, tuple[Callable[[dict[str, Any]], None], int]] = {
    "find_unused": (find_unused, 2),
    "scaler": (scaler, 2),
    "join": (join, 2),
    "Trainer": (trainer("sgd"), 2),
    "Trainer of torch": (trainer(lambda params: SGD(params, lr=0.1)), 2),
    "shard": (shard, 2),
    "DiLoCo": (diloco, 3),
    "helpers": (helpers, 4),
}
"""What to do with options; and how many stores that makes."""


def made(monkeypatch: pytest.MonkeyPatch) -> list[DistStore]:
    """Return a list to which rank 0's stores are added when they are made."""
    stores: list[DistStore] = []
    before = DistStore.__init__

    def init(self: DistStore, *args: Any, **more: Any) -> None:
        before(self, *args, **more)
        if self.rank == 0:
            stores.append(self)

    monkeypatch.setattr(DistStore, "__init__", init)
    return stores


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_all_stores_of_a_front_end_have_its_options(front_end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = made(monkeypatch)
    work, count = FRONT_ENDS[front_end]
    with kvps.LocalCluster(2, 1) as cluster:
        cluster.run(lambda rank: work({"kvstore_options": GIVEN}))
    assert {store.name: store.options for store in stores} == dict.fromkeys(
        (store.name for store in stores), WANTED
    )
    assert len(stores) == count


@pytest.mark.parametrize("front_end", ["find_unused", "scaler", "join", "Trainer", "shard"])
def test_front_ends_keep_the_options_of_a_store_that_is_passed(
    front_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = made(monkeypatch)

    def work(rank: int) -> None:
        is_mean = front_end != "Trainer"
        kv = kvps.create("dist_sync", average=is_mean, **GIVEN)  # type: ignore[arg-type]
        FRONT_ENDS[front_end][0]({"kvstore": kv})

    with kvps.LocalCluster(2, 1) as cluster:
        cluster.run(work)
    assert [store.options for store in stores] == [WANTED] * 2


def test_with_shrink_a_step_that_may_leave_out_parameters_goes_on_without_a_lost_worker() -> None:
    def work(rank: int) -> int:
        model = net()
        optimizer = kvps.torch.DistributedOptimizer(
            SGD(model.parameters(), lr=0.1),
            model,
            find_unused=True,
            kvstore_options={"on_worker_lost": "shrink"},
        )
        for step in range(4):
            if rank == 1 and step == 2:
                raise ZeroDivisionError
            backward(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        ended.append(rank)
        return rank

    ended: list[int] = []
    with kvps.LocalCluster(2, 1) as cluster, pytest.raises(ZeroDivisionError):
        cluster.run(work)
    assert ended == [0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timeout": 0}, "timeout=0: use a number of seconds"),
        ({"on_worker_lost": "ignore"}, "on_worker_lost='ignore': use one of"),
        ({"worker_grace": "long"}, "worker_grace='long'"),
        ({"timeout_s": 3}, "give a dict with some of timeout, on_worker_lost, worker_grace"),
        ("shrink", "give a dict with some of"),
    ],
)
def test_options_that_cannot_be(options: Any, says: str) -> None:
    with pytest.raises(kvps.ConfigError, match=says):
        kvps.Trainer(net(), "sgd", kvstore_options=options)
    with pytest.raises(kvps.ConfigError, match=says):
        kvps.torch.broadcast_object(1, kvstore_options=options)


def test_options_beside_a_store_are_refused() -> None:
    with kvps.LocalCluster():
        kv = kvps.create("dist_sync")
        with pytest.raises(kvps.ConfigError, match=r"give the options to kvps.create\(\)"):
            kvps.Trainer(net(), "sgd", kvstore=kv, kvstore_options=GIVEN)
        with pytest.raises(kvps.ConfigError, match=r"give the options to the kvps.create\(\)"):
            kvps.torch.broadcast_object(1, kvstore=kv, kvstore_options=GIVEN)
        with pytest.raises(kvps.ConfigError, match="needs servers"):
            kvps.Trainer(net(), "sgd", kvstore="allreduce", kvstore_options=GIVEN)


def test_horovods_variable_limits_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert context._limits().timeout_s == context.TIMEOUT_S
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "47")
    assert context._limits().timeout_s == 47
