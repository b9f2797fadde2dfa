"""Copies that are brought up to date by the rows that changed, and what makes them be read whole."""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kvps
import kvps.torch
from kvps.core.server.rules.rows import KeyRows
from kvps.errors import ConfigError, KeyNotFound, Mismatch

COUNT, WIDTH = 60, 12
ROWS = torch.ones(2, WIDTH)


def run(work: Callable[[int], Any], workers: int = 1, servers: int = 2) -> list[Any]:
    with kvps.LocalCluster(workers, servers) as cluster:
        return cluster.run(work)


def store(kind: str = "dist_sync", **options: Any) -> kvps.KVStore:
    """A store that cuts a table of COUNT rows over both servers."""
    more = {} if kind in ("local", "device", "allreduce") else {"bigarray_bound": 64}
    return kvps.create(kind, timeout=30, **more, **options)


def opened(kind: str = "dist_sync", **options: Any) -> kvps.KVStore:
    """With an optimizer that takes away what is pushed, and a table of zeros."""
    kv = store(kind, **options)
    kv.set_optimizer("sgd", lr=1.0)
    kv.init("t", torch.zeros(COUNT, WIDTH))
    return kv


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How many rows each server that was asked named as changed; None if it did not know."""
    found: list[int | None] = []
    real, lock = KeyRows.changed, threading.Lock()

    def changed(*given: Any) -> torch.Tensor | None:
        ids = real(*given)
        with lock:
            found.append(None if ids is None else len(ids))
        return ids

    monkeypatch.setattr(KeyRows, "changed", changed)
    return found


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async", "dist_sync_device"])
def test_only_what_changed_travels(kind: str, asked: list[Any]) -> None:
    def work(rank: int) -> None:
        kv = opened(kind)
        copy, held = torch.full((COUNT, WIDTH), 9.0), None
        for step in range(6):
            kv.push("t", ([step, COUNT - 1], ROWS))
            held = kv.refresh("t", copy, held)
            assert torch.equal(copy, kv.pull("t"))

    run(work)
    assert asked == [1] * 10, "on either server one row, in every step but the first"


def test_a_copy_that_was_written_to_or_is_another_is_read_whole(asked: list[Any]) -> None:
    def work(rank: int) -> None:
        kv = opened()
        copy, other = torch.empty(COUNT, WIDTH), torch.full((COUNT, WIDTH), 9.0)
        held = kv.refresh("t", copy)
        kv.push("t", ([1, 2], ROWS))
        copy[5] = 7.0
        held = kv.refresh("t", copy, held)
        assert torch.equal(copy, kv.pull("t"))
        kv.refresh("t", other, held)
        assert torch.equal(other, copy)
        assert not asked
        held = kv.refresh("t", [copy, other], held)
        assert not asked, "one of them held nothing that is known"
        kv.push("t", ([1, 2], ROWS))
        kv.refresh("t", [copy, other], held)
        assert torch.equal(copy, kv.pull("t"))
        assert torch.equal(copy, other)
        assert sorted(asked) == [0, 2]

    run(work)


def test_a_parameter_is_refreshed_in_its_place(asked: list[Any]) -> None:
    def work(rank: int) -> None:
        kv = opened()
        module = torch.nn.Embedding(COUNT, WIDTH)
        held = kv.refresh("t", module.weight)
        kv.push("t", ([1, 2], ROWS))
        held = kv.refresh("t", module.weight, held)
        assert module.weight[:4, 0].tolist() == [0.0, -1.0, -1.0, 0.0]
        assert module.weight.requires_grad
        with torch.no_grad():
            module.weight.mul_(2.0)
        kv.refresh("t", module.weight, held)
        assert module.weight[:4, 0].tolist() == [0.0, -1.0, -1.0, 0.0]

    run(work)
    assert sorted(asked) == [0, 2]


def test_arrays_strided_copies_and_keys_without_rows() -> None:
    def work(rank: int) -> None:
        kv = opened()
        kv.init(["u", "v"], [torch.zeros(COUNT, WIDTH), torch.arange(5.0)])
        array, strided = np.empty((COUNT, WIDTH), np.float32), torch.empty(WIDTH, COUNT).t()
        vector = torch.empty(5)
        held = kv.refresh(["t", "u", "v"], [array, strided, vector])
        for _ in range(2):
            kv.push(["t", "u"], [([1, 40], ROWS), ([2, 41], ROWS)])
            held = kv.refresh(["t", "u", "v"], [array, strided, vector], held)
            whole, other = kv.pull(["t", "u"])
            assert torch.equal(torch.from_numpy(array), whole)
            assert torch.equal(strided, other)
            assert vector.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        with torch.inference_mode():
            copy = torch.empty(COUNT, WIDTH)
            kv.refresh("t", copy, kv.refresh("t", copy))
            assert torch.equal(copy, whole)

    run(work)


@pytest.mark.parametrize("kind", ["local", "allreduce"])
def test_where_there_are_no_servers_it_is_a_pull(kind: str) -> None:
    def work(rank: int) -> None:
        kv = store(kind)
        kv.init(["t", "v"], [torch.ones(COUNT, WIDTH), torch.zeros(3)])
        copy, vector = torch.empty(COUNT, WIDTH), torch.empty(3)
        held = kv.refresh("t", copy)
        kv.push("t", torch.full((COUNT, WIDTH), 2.0))
        kv.refresh("t", copy, held, async_op=True).wait()
        assert copy.eq(2.0).all()
        held = kv.refresh(["t", "v"], [copy, vector])
        assert len(kv.refresh(["t", "v"], [copy, vector], held)) == 2

    run(work)


def test_mistakes_are_named() -> None:
    def work(rank: int) -> None:
        kv = opened()
        kv.init("u", torch.zeros(COUNT, WIDTH))
        copy = torch.empty(COUNT, WIDTH)
        with pytest.raises(KeyNotFound, match="key 'w'"):
            kv.refresh("w", copy)
        with pytest.raises(ConfigError, match=r"refresh.. writes to out"):
            kv.refresh("t", None)
        with pytest.raises(Mismatch, match=r"float32\[60,12\]"):
            kv.refresh("t", torch.empty(3))
        with pytest.raises(ConfigError, match="held=5: give the result of the last call"):
            kv.refresh("t", copy, 5)
        with pytest.raises(ConfigError, match="2 keys need as many entries in held="):
            kv.refresh(["t", "u"], [copy, copy], [None])

    run(work)


WORDS = 200


class Model(torch.nn.Module):
    """Words and what they vote for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, WIDTH, sparse=True)
        self.votes = torch.nn.Linear(WIDTH, 3)

    def loss(self, rank: int, step: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(100 * step + rank)
        words = torch.randint(WORDS, (4, 3), generator=dice)
        votes = self.votes(self.words(words).mean(1))
        return torch.nn.functional.cross_entropy(votes, torch.tensor([0, 1, 2, 0]), reduction="sum")


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_trainer_pulls_the_rows_that_were_updated(kind: str, asked: list[Any]) -> None:
    models = [Model(), Model()]  # seeded here: ranks are threads, and share the generator

    def work(rank: int) -> dict[str, torch.Tensor]:
        model = models[rank]
        trainer = kvps.Trainer(model, "sgd", {"lr": 0.5}, kvps.create(kind, timeout=30, bigarray_bound=64))
        for step in range(5):
            model.zero_grad()
            model.loss(rank, step).backward()
            trainer.step(8)
        trainer._kv.barrier()
        trainer._model.pull()
        return {name: item.detach().clone() for name, item in model.named_parameters()}

    first, second = run(work, workers=2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert asked
    if kind == "dist_sync":
        assert len(asked) == 16
        assert None not in asked
        assert_trained([first, second])


# --- sums of sparse gradients ------------------------------------------------------------------------


def alone() -> dict[str, torch.Tensor]:
    """The same steps in one process, with a dense gradient."""
    model = Model()
    model.words.sparse = False
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(5):
        sgd.zero_grad()
        loss = model.loss(0, step) + model.loss(1, step)
        (loss / 8).backward()
        sgd.step()
    return {name: item.detach() for name, item in model.named_parameters()}


def assert_trained(found: list[dict[str, torch.Tensor]]) -> None:
    for name, expected in alone().items():
        assert torch.equal(found[0][name], found[1][name]), name
        torch.testing.assert_close(found[0][name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"update_on_kvstore": True},
        {"overlap_forward": True},
        {"update_on_kvstore": True, "overlap_forward": True},
        {"op": "sum"},
        {"find_unused": True},
        {"compression": {"type": "2bit", "threshold": 1e9, "rules": [{"pattern": "votes*", "type": "none"}]}},
    ],
)
def test_sparse_gradients_of_an_optimizer_travel_as_rows(options: dict[str, Any], asked: list[Any]) -> None:
    models = [Model(), Model()]

    def work(rank: int) -> dict[str, torch.Tensor]:
        model = models[rank]
        scale = 8.0 if options.get("op") == "sum" else 4.0
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        kv = kvps.create("dist_sync", timeout=30, bigarray_bound=64, average=scale == 4.0)
        optimizer = kvps.torch.DistributedOptimizer(sgd, model, kv, **options)
        for step in range(5):
            optimizer.zero_grad()
            (model.loss(rank, step) / scale).backward()
            optimizer.step()
            if not options:
                assert model.words.weight.grad is not None
                assert model.words.weight.grad.is_sparse
        model.eval()
        if "overlap_forward" in options:
            model.loss(rank, 5)  # makes the updates that were put off
        return {name: item.detach().clone() for name, item in model.named_parameters()}

    assert_trained(run(work, workers=2))
    assert len(asked) == 2 * 2 * 4
    assert None not in asked


def tables_after(steps: int, backward: Callable[[Model, int, int], None]) -> list[torch.Tensor]:
    """Train with gradients that ``backward`` makes for (model, rank, step); return the table of each rank."""
    models = [Model(), Model()]

    def work(rank: int) -> torch.Tensor:
        model = models[rank]
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        kv = kvps.create("dist_sync", timeout=30, bigarray_bound=64, average=True)
        optimizer = kvps.torch.DistributedOptimizer(sgd, model, kv, find_unused=True)
        for step in range(steps):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
        return model.words.weight.detach().clone()

    return run(work, workers=2)


def test_a_table_that_a_worker_does_not_use_is_pushed_as_no_rows(asked: list[Any]) -> None:
    """All use it in the first step; from then on every other worker in turns."""

    def backward(model: Model, rank: int, step: int) -> None:
        if not step or (step + rank) % 2:
            model.loss(rank, step).backward()
        else:
            model.votes(torch.ones(WIDTH)).sum().backward()

    first, second = tables_after(5, backward)
    assert torch.equal(first, second)
    assert asked
    assert None not in asked


def test_a_gradient_that_was_made_dense_meanwhile_takes_the_dense_mean() -> None:
    def backward(model: Model, rank: int, step: int) -> None:
        model.loss(rank, step).backward()
        weight = model.words.weight
        assert weight.grad is not None
        weight.grad = weight.grad.to_dense()

    first, second = tables_after(3, backward)
    assert torch.equal(first, second)


def test_a_trainer_that_updates_here_sums_rows(asked: list[Any]) -> None:
    models = [Model(), Model()]

    def work(rank: int) -> dict[str, torch.Tensor]:
        model = models[rank]
        kv = kvps.create("dist_sync", timeout=30, bigarray_bound=64)
        trainer = kvps.Trainer(model, "sgd", {"lr": 0.5}, kv, update_on_kvstore=False)
        for step in range(5):
            model.zero_grad()
            model.loss(rank, step).backward()
            trainer.allreduce_grads()
            gradient = model.words.weight.grad
            assert gradient is not None
            assert gradient.is_sparse
            assert gradient._indices().shape[1] <= 24, "rows that both have used, and no others"
            trainer.update(8)
        return {name: item.detach().clone() for name, item in model.named_parameters()}

    assert_trained(run(work, workers=2))
    assert asked
    assert None not in asked


@pytest.mark.parametrize("kind", ["dist_sync", "local", "allreduce"])
def test_pull_changed_returns_the_changed_rows(kind: str) -> None:
    def work(rank: int) -> None:
        kv = store(kind)
        kv.init(["t", "u"], [torch.zeros(COUNT, 3, 2), torch.ones(2, 2)])
        kv.init("v", torch.zeros(3))
        row_ids, rows, held = kv.pull_changed("t")
        assert row_ids.tolist() == list(range(COUNT))
        assert rows.shape == (COUNT, 3, 2)
        for step in range(3):
            kv.push("t", ([step, 7], torch.full((2, 3, 2), step + 1.0)))
            row_ids, rows, held = kv.pull_changed("t", held, async_op=True).wait()
            some = [number for number in row_ids.tolist() if rows[row_ids == number].any()]
            assert some == [step, 7]
            assert rows.sum() == 12 * (step + 1)
            if kind == "dist_sync" and step:
                assert row_ids.tolist() == [step - 1, step, 7]
        first, second = kv.pull_changed(["t", "u"], [held, None])
        assert second.rows.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert len(first.row_ids) == (COUNT if kind == "allreduce" else 0)
        with pytest.raises(Mismatch, match=r"key 'v' is .* only keys of two or more"):
            kv.pull_changed("v")
        with pytest.raises(ConfigError, match="2 keys need as many entries in held="):
            kv.pull_changed(["t", "u"], held)

    run(work)


class Picked(torch.nn.Module):
    """Numbers, of which some are picked: one dimension, and a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.nn.Parameter(torch.arange(40.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.gather(self.numbers, 0, ids, sparse_grad=True)


@pytest.mark.parametrize("front_end", ["optimizer", "servers", "trainer", "trainer here"])
def test_a_sparse_gradient_of_one_dimension_travels_dense(front_end: str) -> None:
    def work(rank: int) -> list[float]:
        model = Picked()
        kv = kvps.create("dist_sync", timeout=30)
        step: Callable[[], object]
        if front_end.startswith("trainer"):
            on_store = front_end == "trainer"
            trainer = kvps.Trainer(model, "sgd", {"lr": 0.5}, kv, update_on_kvstore=on_store)
            step = functools.partial(trainer.step, 1)
        else:
            step = kvps.torch.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.5),
                model,
                kv,
                op="sum",
                update_on_kvstore=front_end == "servers",
            ).step
        for _ in range(2):
            model.zero_grad()
            model(torch.tensor([rank, 7])).sum().backward()
            step()
        return model.numbers.tolist()

    first, second = run(work, workers=2)
    assert first == second
    assert first[:8] == [-1.0, 0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 5.0]


@pytest.mark.parametrize("front_end", ["optimizer", "trainer"])
def test_a_push_of_rows_that_is_refused_is_told_at_once(
    front_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = KeyRows.gradient, threading.Event()

    def gradient(*given: Any) -> Any:
        if refused.is_set():
            raise Mismatch("it does not fit")
        return real(*given)

    monkeypatch.setattr(KeyRows, "gradient", gradient)

    def work(rank: int) -> None:
        model = Model()
        kv = kvps.create("dist_sync", timeout=30, bigarray_bound=64)
        if front_end == "trainer":
            step = functools.partial(kvps.Trainer(model, "sgd", {"lr": 0.5}, kv).step, 1)
        else:
            sgd = torch.optim.SGD(model.parameters(), lr=0.5)
            step = kvps.torch.DistributedOptimizer(sgd, model, kv, op="sum").step
        refused.set()
        began = time.monotonic()
        with pytest.raises(Mismatch, match="it does not fit"):  # noqa: PT012 - backward may tell it
            model.loss(rank, 0).backward()
            step()
        assert time.monotonic() - began < 15

    run(work)


def test_outputs_that_are_one_tensor_hold_nothing_that_is_known(asked: list[Any]) -> None:
    def work(rank: int) -> None:
        kv = opened()
        kv.init("u", torch.ones(COUNT, WIDTH))
        copy = torch.empty(COUNT, WIDTH)
        held = kv.refresh(["t", "u"], [copy, copy])
        kv.refresh(["t", "u"], [copy, copy], held)
        assert copy.eq(1.0).all()

    run(work)
    assert not asked
