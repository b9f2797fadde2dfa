"""Every call says what it is: its title, what a Timeout does to it, and its operation."""

from inspect import isabstract

import pytest
import torch

from kvps.compression.policy import OFF
from kvps.core.embedding.spec import recipe_of
from kvps.core.optim.hyperparams import resolve
from kvps.core.worker import calls
from kvps.core.worker.calls import Call, OnTimeout
from kvps.core.worker.plan import Key
from kvps.core.worker.store import WorkerStore
from kvps.errors import ConfigError, Timeout
from kvps.protocol.membership import Error
from kvps.protocol.values import Ask, Pull, Push
from tests.support.worker_harness import Bench, opened, push, spec, values_of
from tests.support.worker_with_key import HOT, chunk, ready, stood

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
    (calls.TakePlace("kv", ()), "resume()", RETRY),
    (calls.EndReplay("kv"), "the end of a replay", RETRY),
    (calls.EnterStore("kv"), "the entry into a store", CONTINUE),
    (calls.PassOver("kv"), "a step of a replay", RETRY),
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
    (calls.PushStep("kv", (), (), None, 0, eager=False), "push()", CONTINUE),
    (calls.PushTableRows("kv", ("w",), True, (), (), ()), "push() of rows", CONTINUE),
    (calls.PullTableRows("kv", ("w",), (), ()), "pull() of rows", RETRY),
    (calls.Publish("kv", "policy", 2, 0, 0, ("w",), (), ()), "publish()", CONTINUE),
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
    classes = [var for var in vars(calls).values() if isinstance(var, type)]
    concrete = {kind for kind in classes if issubclass(kind, Call) and not isabstract(kind)}
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
def test_each_has_an_operation_that_reads_its_tensors(call: Call, title: str, on_timeout: OnTimeout) -> None:
    tensors = list(call.values())
    operation = call.run(new_store(), tensors)
    family = tuple([cls.__name__ for cls in type(call).__mro__])
    assert operation.gi_code.co_qualname.startswith(family)
    operation.close()


def test_existing_key_is_not_created_again() -> None:
    store = new_store()
    row = torch.zeros(1)
    for is_there, key in ((True, "w"), (False, "other")):
        init = calls.Init("kv", ((key, spec(1)),), (row,))
        assert init.is_redundant(store) == is_there
        assert init.values() == (row,)
        assert calls.MakeTable("kv", key, TABLE, 0).is_redundant(store) == is_there
    assert not calls.LoadState("kv", {}).is_redundant(store)


class TestWindow:
    """64 rounds of a key may be under way; the next push waits."""

    def test_of_pushes_that_are_applied_one_by_one(self) -> None:
        """Versions say nothing here: other ranks move them too."""
        worker = ready(mode="async")
        for _ in range(64):
            worker.call(push({"w": HOT}))
        ticket = worker.call(push({"w": HOT}))
        assert not worker.is_copied(ticket)
        assert not worker.sent(Pull)
        for server in (0, 1):
            worker.ack(server, *worker.seqs(Push, server))
        assert worker.is_copied(ticket)
        assert worker.core.stores["kv"].key("w").applied == 64
        for _ in range(63):
            assert worker.is_copied(worker.call(push({"w": HOT})))
        assert not worker.is_copied(worker.call(push({"w": HOT})))

    def test_the_values_are_those_of_the_call(self) -> None:
        """Also if its caller stops waiting for room, and uses their memory for others."""
        worker = ready()
        for _ in range(64):
            worker.call(push({"w": HOT}))
        values = HOT.clone()
        ticket = worker.call(push({"w": values}), 1.0)
        worker.wait(1.5)
        assert isinstance(worker.error(ticket), Timeout)
        values.fill_(-1)
        for server in (0, 1):
            stood(worker, worker.seqs(Pull, server)[0], server, 1)
        assert values_of(worker.sends(Push, 0)[-1]) == [*range(16)]


class TestOptimizerNeeded:
    """Where each push is applied by itself, the call that pushes without an optimizer fails."""

    @pytest.mark.spec("R227")
    def test_behind_one_that_was_taken_in_they_do_not_wait(self) -> None:
        """Another rank has set the optimizer."""
        worker = ready(mode="async")
        ticket = worker.call(push({"w": HOT}))
        worker.ack(0, worker.seqs(Push, 0)[0])
        worker.ack(1, worker.seqs(Push, 1)[0])
        assert worker.is_done(ticket)
        assert worker.is_copied(worker.call(push({"w": HOT})))


class TestRefused:
    """A push that was refused changed nothing, so its number is owed still."""

    def refuse(self, worker: Bench) -> int:
        ticket = worker.call(push({"w": HOT}))
        worker.server(0, Error(worker.seqs(Push, 0)[-1], ConfigError.code, "no optimizer"))
        assert isinstance(worker.error(ticket), ConfigError)
        return ticket

    @pytest.mark.parametrize("owed", [0, 1])
    def test_the_next_push_asks_for_its_number(self, owed: int) -> None:
        """The other server may have taken its part in."""
        worker = ready(mode="async")
        self.refuse(worker)
        ticket = worker.call(push({"w": HOT}))
        assert worker.sent(Pull) == [
            Pull(chunk(worker, 0), False, (Ask(0, 16, 0, 0),)),
            Pull(chunk(worker, 1), False, (Ask(0, 24, 0, 0),)),
        ]
        assert not worker.is_copied(ticket)
        stood(worker, worker.seqs(Pull, 0)[0], 0, 0, owed)
        stood(worker, worker.seqs(Pull, 1)[0], 1, 0, 1)
        assert [message.runs[0].number for message in worker.sent(Push, 0)] == [0, owed]
        worker.call(push({"w": HOT}))
        assert worker.sent(Push, 0)[-1].runs[0].number == owed + 1

    def test_two_that_ask_do_not_get_the_same(self) -> None:
        worker = ready(mode="async")
        self.refuse(worker)
        for _ in range(2):
            worker.call(push({"w": HOT}))
        for at in (0, 1):
            for server in (0, 1):
                stood(worker, worker.seqs(Pull, server)[at], server, 0)
        assert [message.runs[0].number for message in worker.sent(Push, 0)] == [0, 0, 1]
