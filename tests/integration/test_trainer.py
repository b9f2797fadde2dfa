"""The Trainer over a cluster: any number of workers gives the weights of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import kvps
from tests.integration.training_loops import (
    INPUTS,
    LABELS,
    STEPS,
    Weights,
    assert_all,
    net,
    part,
    run,
    weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({"lr": 0.1, "momentum": 0.9}, torch.optim.SGD),
    "adam": ({"lr": 0.01}, torch.optim.Adam),
    "adamw": ({"lr": 0.01, "weight_decay": 0.1}, torch.optim.AdamW),
}


def backward(model: torch.nn.Module, rows: slice) -> None:
    model.zero_grad()
    cross_entropy(model(INPUTS[rows]), LABELS[rows], reduction="sum").backward()


def alone(name: str, batches: list[int], rates: dict[int, float] | None = None, seed: int = 0) -> Weights:
    """Train in one process with torch alone; ``rates`` sets learning rates before some steps."""
    options, cls = OPTIMIZERS[name]
    model = net(seed)
    optimizer = cls(model.parameters(), **options)
    for number, size in enumerate(batches):
        if rates and number in rates:
            optimizer.param_groups[0]["lr"] = rates[number]
        backward(model, slice(size))
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= size
        optimizer.step()
    return weights(model)


# --- any number of workers --------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("overlap", [True, False])
def test_workers_give_the_weights_of_one_process(
    name: str, on_store: bool, workers: int, overlap: bool
) -> None:
    def work(rank: int) -> Weights:
        model = net(seed=rank)  # rank 0's weights count
        options = OPTIMIZERS[name][0]
        trainer = kvps.Trainer(model, name, options, "dist_sync", update_on_kvstore=on_store, overlap=overlap)
        for _ in range(STEPS):
            backward(model, part(rank, workers, 24))
            trainer.step(24)
        return weights(model)

    assert_all(run(workers, work), alone(name, [24] * STEPS))


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_batches_may_change_and_be_uneven(on_store: bool, overlap: bool) -> None:
    sizes = [24, 24, 7, 24, 2, 11]

    def work(rank: int) -> Weights:
        model = net()
        options = OPTIMIZERS["sgd"][0]
        trainer = kvps.Trainer(
            model, "sgd", options, "dist_sync", update_on_kvstore=on_store, overlap=overlap
        )
        for size in sizes:
            trainer.batch_size = size
            mine = slice(0, size - 1) if rank == 0 else slice(size - 1, size)
            backward(model, mine)
            trainer.step(size)
        return weights(model)

    assert_all(run(2, work), alone("sgd", sizes))


@pytest.mark.parametrize("on_store", [True, False])
def test_with_overlap_gradients_come_once_and_stay_as_they_are(on_store: bool) -> None:
    def begun() -> tuple[torch.nn.Module, kvps.Trainer]:
        model = net()
        trainer = kvps.Trainer(
            model, "sgd", {"lr": 0.1}, "dist_sync", update_on_kvstore=on_store, overlap=True
        )
        backward(model, slice(24))
        trainer.step(24)
        backward(model, slice(24))
        return model, trainer

    def work(rank: int) -> None:
        model, trainer = begun()
        with pytest.raises(kvps.ConfigError, match=r"call step\(\).*with overlap=False$"):
            cross_entropy(model(INPUTS), LABELS).backward()
        model, trainer = begun()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(kvps.ConfigError, match=r"was changed.*with overlap=False to change"):
            trainer.step(24)

    run(1, work)


@pytest.mark.parametrize("kind", ["store", "rules", "torch"])
def test_workers_may_have_more_batches_than_others(kind: str) -> None:
    """Behind join() all have the weights and the momenta of who came last."""

    def work(rank: int) -> Weights:
        model = net(rank)
        options = OPTIMIZERS["sgd"][0]
        sgd = torch.optim.SGD(model.parameters(), **options)
        optimizer, options = (sgd, {}) if kind == "torch" else ("sgd", options)
        trainer = kvps.Trainer(model, optimizer, options, "dist_sync", update_on_kvstore=kind == "store")
        for _ in range(2):
            for step in range(2 + rank):
                backward(model, slice(rank, rank + 4 + step))
                trainer.step(8)
            trainer.join()
        return weights(model)

    model = net()
    sgd = torch.optim.SGD(model.parameters(), **OPTIMIZERS["sgd"][0])
    for _ in range(2):
        for step in range(3):
            sums = [torch.zeros_like(item) for item in model.parameters()]
            for rank in range(2):
                if step < 2 + rank:
                    backward(model, slice(rank, rank + 4 + step))
                    for total, param in zip(sums, model.parameters(), strict=True):
                        assert param.grad is not None
                        total += param.grad / 8
            for total, param in zip(sums, model.parameters(), strict=True):
                param.grad = total
            sgd.step()
    assert_all(run(2, work), weights(model))


def test_a_batch_size_that_comes_too_late_is_told() -> None:
    with kvps.LocalCluster():
        model = net()
        trainer = kvps.Trainer(model, "sgd", {"lr": 0.1}, "dist_sync", overlap=True)
        for size in (24, 24):
            backward(model, slice(size))
            trainer.step(size)
        backward(model, slice(7))
        with pytest.raises(kvps.ConfigError, match=r"Set trainer\.batch_size = 7 before"):
            trainer.step(7)


@pytest.mark.parametrize("on_store", [True, False])
def test_a_missing_gradient_may_be_only_one_workers(on_store: bool) -> None:
    def work(rank: int) -> float:
        param = torch.nn.Parameter(torch.zeros(1))
        trainer = kvps.Trainer({"w": param}, "sgd", {"lr": 1.0}, "dist_sync", update_on_kvstore=on_store)
        param.grad = torch.ones(1) if rank == 0 else None
        trainer.step(2, ignore_stale_grad=True)
        return param.item()

    assert run(2, work) == [-0.5, -0.5]


# --- what is sent around at the start -----------------------------------------------------------------


@pytest.mark.parametrize("on_store", [True, False])
def test_weights_and_buffers_come_from_rank_0(on_store: bool) -> None:
    def work(rank: int) -> tuple[list[Any], ...]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        model.register_buffer("mask", torch.tensor([rank == 0, False]))
        model.register_buffer("turn", torch.tensor([1j]) * (rank + 1))
        model[0].bias.requires_grad_(False)
        with torch.no_grad():
            for tensor in (*model.parameters(), model[1].running_mean, model[1].running_var):
                tensor.fill_(rank + 1.0)
        kvps.Trainer(model, "sgd", {"lr": 1.0}, "dist_sync", update_on_kvstore=on_store)
        return tuple(tensor.tolist() for tensor in model.state_dict().values())

    first, *others = run(3, work)
    assert others == [first, first]
    assert [[1.0, 1.0], [1.0, 1.0]] in first
    assert [True, False] in first
    assert [1j] in first


def test_workers_must_agree_on_the_optimizer() -> None:
    def work(rank: int) -> None:
        kvps.Trainer(torch.nn.Linear(2, 2), "sgd", {"lr": 0.1 + rank}, kvstore="dist_sync")

    with pytest.raises(kvps.Mismatch, match="rank 0's counts"):
        run(2, work)


# --- several in one job -------------------------------------------------------------------------------


def test_trainers_and_users_stores_do_not_collide() -> None:
    def work(rank: int) -> tuple[Weights, Weights, float]:
        first, second = net(0), net(3)  # the same names of parameters
        kv = kvps.create("dist_sync")
        kv.init("0.weight", torch.zeros(1))
        trainers = [
            kvps.Trainer(first, "sgd", OPTIMIZERS["sgd"][0], "dist_sync"),
            kvps.Trainer(second, "adam", OPTIMIZERS["adam"][0], "dist_sync"),
        ]
        for _ in range(STEPS):
            for model, trainer in zip((first, second), trainers, strict=True):
                backward(model, part(rank, 2, 24))
                trainer.step(24)
        return weights(first), weights(second), kv.pushpull("0.weight", torch.ones(1)).item()

    results = run(2, work)
    assert_all([result[0] for result in results], alone("sgd", [24] * STEPS))
    assert_all([result[1] for result in results], alone("adam", [24] * STEPS, seed=3))
    assert [result[2] for result in results] == [2.0, 2.0]


def test_the_names_of_own_stores_are_reserved() -> None:
    with kvps.LocalCluster(), pytest.raises(kvps.ConfigError, match=r"'kvps\.trainer-0'.*reserved for kvps"):
        kvps.create("dist_sync", name="kvps.trainer-0")


# --- the optimizer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saved_states_resume_in_another_job(name: str, on_store: bool, tmp_path: Path) -> None:
    """Two workers and two servers stop half-way; three servers and one worker go on."""
    states, model_file = str(tmp_path / "states.safetensors"), tmp_path / "model.pt"

    def begin(rank: int) -> None:
        model = net()
        trainer = kvps.Trainer(model, name, OPTIMIZERS[name][0], "dist_sync", update_on_kvstore=on_store)
        for _ in range(3):
            backward(model, part(rank, 2, 24))
            trainer.step(24)
        if rank == 0:
            trainer.save_states(states)
            torch.save(model.state_dict(), model_file)

    def go_on(rank: int) -> Weights:
        model = net(seed=9)
        model.load_state_dict(torch.load(model_file))
        trainer = kvps.Trainer(model, name, OPTIMIZERS[name][0], "dist_sync", update_on_kvstore=on_store)
        trainer.load_states(states)
        for _ in range(3):
            backward(model, slice(24))
            trainer.step(24)
        return weights(model)

    run(2, begin)
    assert_all(run(1, go_on, servers=3), alone(name, [24] * 6))


@pytest.mark.parametrize("store", ["dist_async", "dist_ssp"])
def test_async_updates_in_the_store_only(store: str) -> None:
    with kvps.LocalCluster(), pytest.raises(ValueError, match="use update_on_kvstore=True") as caught:
        kvps.Trainer(net(), "sgd", {"lr": 0.1}, store, update_on_kvstore=False)
    assert isinstance(caught.value, kvps.KvpsError)


@pytest.mark.parametrize("store", ["dist_async", "dist_ssp", "dist_async_device"])
def test_in_async_every_push_is_a_step(store: str) -> None:
    def work(rank: int) -> None:
        kv = kvps.create(store)
        param = torch.nn.Parameter(torch.zeros(1))
        trainer = kvps.Trainer({"w": param}, "sgd", {"lr": 1.0}, kv)
        for _ in range(3):
            param.grad = torch.ones(1)
            trainer.step(2)
        kv.barrier()
        assert kv.pull("w").item() == -3.0

    run(2, work)


def test_grad_scaler_that_steps_a_trainer_is_told_what_to_use() -> None:
    model = net()
    trainer = kvps.Trainer(model, "sgd")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(INPUTS).sum()).backward()
    with pytest.raises(AttributeError, match="bfloat16, which needs no scaler, or kvps"):
        scaler.step(trainer)
    assert not hasattr(trainer, "param_groups")
