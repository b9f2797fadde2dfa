"""Every call says what it is: its title, what a Timeout does to it, and its operation."""

from __future__ import annotations

from inspect import isabstract

import numpy as np
import pytest
import torch

from kvps.compression.policy import OFF
from kvps.core.embedding.spec import recipe_of
from kvps.core.optim.hyperparams import resolve
from kvps.core.worker import calls
from kvps.core.worker.calls import Call, OnTimeout
from kvps.core.worker.plan import Key
from kvps.core.worker.store import WorkerStore
from tests.support.worker_harness import opened, spec

CONTINUE, RETRY, RESUME = OnTimeout.CONTINUE, OnTimeout.RETRY, OnTimeout.RESUME
TABLE = recipe_of("t", 1, "zeros", "sgd", 1, None, "float32", None)
EVERY: list[tuple[Call, str, OnTimeout]] = [
    (calls.OpenStore("kv", opened(), 240.0), "create()", CONTINUE),
    (calls.Init("kv", (), ()), "init()", CONTINUE),
    (calls.Broadcast("kv", (), (), ()), "broadcast()", RETRY),
    (calls.Lookup("kv", ()), "the look-up of keys", RETRY),
    (calls.PushValues("kv", (), (), None, 0, True), "push()", CONTINUE),
    (calls.PullValues("kv", (), (), 0, 0), "pull()", RETRY),
    (calls.PushKeyRows("kv", (), (), 0, True), "push()", CONTINUE),
    (calls.PullKeyRows("kv", (), (), (), 0), "row_sparse_pull()", RETRY),
    (calls.Refresh("kv", (), (), (), 0), "refresh()", RETRY),
    (calls.Allocate("kv", ()), "empty_like()", RETRY),
    (calls.Locate("kv", ()), "placement()", RETRY),
    (calls.Versions("kv", ()), "version()", RETRY),
    (calls.ResumeKeys("kv", ()), "resume()", RETRY),
    (calls.TakePlace("kv", ()), "resume()", RETRY),
    (calls.EndReplay("kv"), "the end of a replay", RETRY),
    (calls.SetOptimizer("kv", resolve("sgd", {"lr": 0.1})), "set_optimizer()", RESUME),
    (calls.SetRate("kv", 0.1), "set_learning_rate()", RESUME),
    (calls.StandAtBarrier("kv", None), "barrier()", RESUME),
    (calls.Compare("kv", "Trainer()", ()), "the comparison of models", RESUME),
    (calls.JoinStore("kv"), "join()", RESUME),
    (calls.Flush("kv"), "the flush of earlier pushes", RETRY),
    (calls.AskStatus("kv"), "status", RETRY),
    (calls.SaveState("kv"), "save_optimizer_states()", RETRY),
    (calls.LoadState("kv", {}), "load_optimizer_states()", CONTINUE),
    (calls.Compress("kv", OFF), "set_gradient_compression()", CONTINUE),
    (calls.SaveResiduals("kv"), "compression_state()", RETRY),
    (calls.LoadResiduals("kv", {}), "load_compression_state()", CONTINUE),
    (calls.TakeCheckpoint("kv", ""), "checkpoint()", RESUME),
    (calls.RestoreCheckpoint("kv", ""), "restore()", RESUME),
    (calls.RejoinStore("kv", ()), "the return to a checkpoint", CONTINUE),
    (calls.MakeTable("kv", "t", TABLE, 0), "embedding()", CONTINUE),
    (calls.SetTableRate("kv", "w", 0.5), "set_learning_rate() of a table", CONTINUE),
    (calls.PushTableRows("kv", ("w",), True, 1, ()), "push() of rows", CONTINUE),
    (calls.PullTableRows("kv", ("w",), TABLE, np.empty(0, np.int64)), "pull() of rows", RETRY),
    (calls.ExportBlock("kv", "w", 0, 2, 0, 1, 0, False), "export()", RETRY),
]
"""A call of each class, its title, and what a Timeout does to it."""
CREATING = (
    calls.Init,
    calls.MakeTable,
    calls.Broadcast,
    calls.SetOptimizer,
    calls.SetRate,
    calls.SetTableRate,
    calls.LoadState,
    calls.RestoreCheckpoint,
)


def new_store() -> WorkerStore:
    """One that knows the key ``w``, of which no server has a piece."""
    store = WorkerStore(opened(), 0, 1, 240.0)
    store.keys["w"] = Key("w", spec(1))
    return store


def test_the_table_is_of_all_calls() -> None:
    classes = [one for one in vars(calls).values() if isinstance(one, type)]
    concrete = {one for one in classes if issubclass(one, Call) and not isabstract(one)}
    assert len(EVERY) == len(concrete)
    assert {type(call) for call, _, _ in EVERY} == concrete


@pytest.mark.parametrize(("call", "title", "on_timeout"), EVERY)
def test_each_says_what_it_is(call: Call, title: str, on_timeout: OnTimeout) -> None:
    assert (call.title, call.on_timeout) == (title, on_timeout)
    assert call.creates == isinstance(call, CREATING)
    assert call.is_creating(0) == call.creates
    assert not call.is_creating(1)
    assert isinstance(call, calls.PushCall) == title.startswith("push()")
    assert type(call).__doc__


@pytest.mark.parametrize(("call", "title", "on_timeout"), EVERY)
def test_each_has_an_operation_that_reads_its_tensors(
    call: Call, title: str, on_timeout: OnTimeout
) -> None:
    tensors = list(call.values())
    operation = call.run(new_store(), tensors)
    assert operation.gi_code.co_qualname.startswith(type(call).__name__)
    operation.close()


def test_a_creator_may_be_another_rank() -> None:
    for call in (calls.Init("kv", (), (), 2), calls.MakeTable("kv", "t", TABLE, 2)):
        assert call.is_creating(2)
        assert not call.is_creating(0)


def test_what_is_there_is_not_created_again() -> None:
    store = new_store()
    row = torch.zeros(1)
    for is_there, key in ((True, "w"), (False, "other")):
        init = calls.Init("kv", ((key, spec(1)),), (row,))
        assert init.is_redundant(store) == is_there
        assert init.values() == (row,)
        assert calls.MakeTable("kv", key, TABLE, 0).is_redundant(store) == is_there
    assert not calls.LoadState("kv", {}).is_redundant(store)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("eager", [True, False])
def test_a_push_returns_early_unless_it_may_be_refused(mode: str, eager: bool) -> None:
    store = WorkerStore(opened(mode=mode), 0, 1, 240.0)
    dense = calls.PushValues("kv", (), (), None, 0, eager)
    rows = calls.PushKeyRows("kv", (), (), 0, eager)
    table = calls.PushTableRows("kv", ("t",), eager, 1, ())
    assert dense.returns_early(store) == rows.returns_early(store) == (eager and mode == "sync")
    assert table.returns_early(store) == eager, "a table has an optimizer of its own"
    assert not calls.Flush("kv").returns_early(store)
