"""Gradients that a store clips by their norm over all keys of a push, and the front ends that have it do so.

Each refusal says what works instead: the tests do as it says.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import kvps
import kvps.torch
from kvps.errors import ConfigError, Mismatch

LIMIT = 0.5
BATCH = torch.arange(6.0).view(3, 2)


@pytest.fixture
def kv() -> Iterator[kvps.KVStore]:
    store = kvps.create("local")
    store.set_optimizer("sgd", lr=1.0, clip_global_norm=5.0)
    store.init(["a", "b"], [torch.zeros(2), torch.zeros(1)])
    yield store
    store.close()


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def trained_by_torch() -> list[torch.Tensor]:
    model = net()
    optimizer = sgd(model)
    for _ in range(4):
        optimizer.zero_grad()
        model(BATCH).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def is_equal(model: nn.Module) -> bool:
    pairs = zip(model.parameters(), trained_by_torch(), strict=True)
    return all(torch.allclose(param.detach(), other, atol=1e-6) for param, other in pairs)


def test_the_norm_is_of_all_keys_of_a_push(kv: kvps.KVStore) -> None:
    first, second = kv.pushpull(["a", "b"], [torch.tensor([-6.0, 0.0]), torch.tensor([-8.0])])
    assert first.tolist() == pytest.approx([3.0, 0.0], abs=1e-5)
    assert second.tolist() == pytest.approx([4.0], abs=1e-5)


def test_a_push_of_some_keys_is_a_step_of_these(kv: kvps.KVStore) -> None:
    kv.push("b", torch.tensor([-8.0]))
    assert kv.pull("b").tolist() == pytest.approx([5.0], abs=1e-5)
    kv.push(["a", "b"], [torch.tensor([-3.0, 0.0]), torch.tensor([-4.0])])
    assert kv.pull("b").tolist() == pytest.approx([9.0], abs=1e-5)


def test_the_limit_is_lifted_by_another_set_optimizer(kv: kvps.KVStore) -> None:
    kv.set_optimizer("sgd", lr=1.0)
    assert kv.pushpull("b", torch.tensor([-8.0])).tolist() == [8.0]


def test_rows_are_refused_before_anything_is_pushed(kv: kvps.KVStore) -> None:
    kv.init("t", torch.zeros(4, 2))
    with pytest.raises(ConfigError, match="push dense gradients"):
        kv.push(["b", "t"], [torch.ones(1), ([1], torch.ones(1, 2))])
    kv.push(["b", "t"], [torch.zeros(1), torch.zeros(4, 2)])
    assert kv.version("b") == 1


def test_tables_are_refused(kv: kvps.KVStore) -> None:
    with pytest.raises(ConfigError, match="clip_gradient="):
        kv.embedding("users", 4, optimizer="sgd", lr=0.1, clip_global_norm=1.0)
    kv.embedding("users", 4, optimizer="sgd", lr=0.1, clip_gradient=1.0)


def test_an_optimizer_on_the_servers_clips_as_torch_does() -> None:
    model = net()
    optimizer = kvps.torch.DistributedOptimizer(
        sgd(model), model, "local", update_on_kvstore=True, clip_global_norm=LIMIT
    )
    for _ in range(4):
        optimizer.zero_grad()
        model(BATCH).square().mean().backward()
        optimizer.step()
    assert is_equal(model)
    optimizer.close()


@pytest.mark.parametrize("by_name", [True, False])
def test_a_trainer_clips_as_torch_does(by_name: bool) -> None:
    model = net()
    optimizer = "sgd" if by_name else sgd(model)
    numbers = {"lr": 0.1, "momentum": 0.9} if by_name else None
    trainer = kvps.Trainer(model, optimizer, numbers, "local", update_on_kvstore=True, clip_global_norm=LIMIT)
    for _ in range(4):
        model.zero_grad()
        model(BATCH).square().sum().backward()
        trainer.step(len(BATCH))
    assert is_equal(model)
    trainer.close()


def test_with_the_optimizer_on_the_workers_torch_clips() -> None:
    model = net()
    says = r"leave clip_global_norm= out, and call torch.nn.utils.clip_grad_norm_\(model.parameters\(\), max_norm\)"
    with pytest.raises(ConfigError, match=says):
        kvps.torch.DistributedOptimizer(sgd(model), model, "local", clip_global_norm=LIMIT)
    optimizer = kvps.torch.DistributedOptimizer(sgd(model), model, "local")
    for _ in range(4):
        optimizer.zero_grad()
        model(BATCH).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
    assert is_equal(model)
    optimizer.close()


def test_a_trainer_that_updates_on_the_workers_leaves_clipping_to_torch() -> None:
    model = net()
    says = r"call torch.nn.utils.clip_grad_norm_\(model.parameters\(\), max_norm \* batch_size\) between allreduce_grads"
    with pytest.raises(ConfigError, match=says):
        kvps.Trainer(model, "sgd", {"lr": 0.1, "clip_global_norm": LIMIT})
    trainer = kvps.Trainer(model, "sgd", {"lr": 0.1, "momentum": 0.9})
    for _ in range(4):
        model.zero_grad()
        model(BATCH).square().sum().backward()
        trainer.allreduce_grads()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT * len(BATCH))
        trainer.update(len(BATCH))
    assert is_equal(model)
    trainer.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"overlap_backward": True}, "leave out overlap_backward=True"),
        ({"bucket_bytes": 100}, "leave out bucket_bytes="),
    ],
)
def test_gradients_that_leave_apart_are_refused(options: dict[str, object], says: str) -> None:
    model = net()
    with pytest.raises(ConfigError, match=says):
        kvps.torch.DistributedOptimizer(
            sgd(model),
            model,
            "local",
            update_on_kvstore=True,
            clip_global_norm=LIMIT,
            **options,  # type: ignore[arg-type]
        )


def test_a_trainer_with_overlap_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave out overlap=True"):
        kvps.Trainer(
            net(), "sgd", {"lr": 0.1}, "local", update_on_kvstore=True, overlap=True, clip_global_norm=LIMIT
        )


def test_sparse_gradients_are_refused_before_anything_is_pushed() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    optimizer = kvps.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        model,
        "local",
        update_on_kvstore=True,
        clip_global_norm=LIMIT,
    )
    before = model[1].weight.detach().clone()
    model(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(model[1].weight, before)
    optimizer.close()


def test_a_sharded_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="clip elements with clip_gradient="):
        kvps.torch.shard(net(), "local", optimizer="sgd", lr=0.1, clip_global_norm=LIMIT)
    kvps.torch.shard(net(), "local", optimizer="sgd", lr=0.1, clip_gradient=LIMIT).close()


@pytest.mark.parametrize("limit", [0.0, -1.0, "much"])
def test_a_limit_is_a_number_above_0(kv: kvps.KVStore, limit: object) -> None:
    with pytest.raises(ConfigError, match=r"clip_global_norm=.* is not allowed"):
        kv.set_optimizer("sgd", lr=1.0, clip_global_norm=limit)


def test_stores_that_allreduce_have_no_servers_to_clip() -> None:
    model = net()
    with pytest.raises(Mismatch, match="omit update_on_kvstore=True"):
        kvps.torch.DistributedOptimizer(
            sgd(model), model, "allreduce", update_on_kvstore=True, clip_global_norm=LIMIT
        )
