"""Where a worker halts: at the end of a step, which it reads off the numbers of its pushes."""

import pytest
import torch

from kvps.core.embedding.spec import recipe_of
from kvps.core.worker import calls
from kvps.core.worker.gate import DeferredCall
from kvps.core.worker.plan import PieceLocation as Piece
from kvps.core.worker.quiesce import FREE_STAND_MAX_S, SILENCE_MAX_S, STAND_MAX_S, Quiesce
from kvps.core.worker.store import WorkerStore
from kvps.protocol.checkpoint import Halt, Proceed
from tests.support.worker_harness import opened, pull, push, spec

ROW = torch.zeros(4)


def stores_of(rank: int = 0, mode: str = "sync", **numbers: int) -> dict[str, WorkerStore]:
    """One store, whose keys have been pushed so often."""
    store = WorkerStore(opened(mode=mode), rank, 1, 240.0)
    store.place((name, spec(4), [Piece(0, 1, 4 * at, 4, 0)]) for at, name in enumerate(numbers))
    for name, number in numbers.items():
        store.keys[name].number = number
    return {"kv": store}


def halted(known: dict[str, WorkerStore], cut: int = 1, **least: int) -> Quiesce:
    quiesce = Quiesce(known)
    assert quiesce.halt(Halt(cut, least), 100.0) == []
    return quiesce


def holds(quiesce: Quiesce, known: dict[str, WorkerStore], *names: str) -> bool:
    return quiesce.holds(known["kv"], push(dict.fromkeys(names, ROW)))


@pytest.mark.spec("R130", "R131")
def test_a_push_that_would_take_the_lead_further_ends_a_step() -> None:
    """As where a key came later than the others, and is always one push behind."""
    known = stores_of(a=4, late=3)
    quiesce = halted(known)
    quiesce.held.append(DeferredCall(7, push({"a": ROW}), 200.0))
    assert quiesce.stands(False)


@pytest.mark.spec("R131")
def test_so_does_a_script_that_waits_for_the_cut_itself() -> None:
    known = stores_of(a=4, late=3)
    quiesce = halted(known)
    assert quiesce.stands(is_at_rest=True)
    quiesce.halt(Halt(1, {"kv": 5}), 100.0)
    assert not quiesce.stands(is_at_rest=True), "others have gone further"


@pytest.mark.spec("R131")
def test_joined_worker_stands_however_far_the_others_go() -> None:
    known = stores_of(a=4, b=3)
    known["kv"].is_away = True
    quiesce = halted(known, kv=9)
    assert quiesce.stands(False)
    assert quiesce.numbers() == {}


@pytest.mark.spec("R132")
def test_an_order_of_a_cut_that_is_over_is_none() -> None:
    known = stores_of(a=3)
    quiesce = halted(known, cut=5)
    quiesce.held.append(DeferredCall(7, push({"a": ROW}), 200.0))
    assert quiesce.halt(Halt(4, {"kv": 9}), 100.0) == []
    assert holds(quiesce, known, "a")
    assert [held.ticket for held in quiesce.go_on()] == [7]
    assert quiesce.halt(Halt(5, {}), 100.0) == []
    assert not quiesce.is_shut


@pytest.mark.spec("R130")
def test_where_pushes_are_applied_one_by_one_any_moment_will_do() -> None:
    known = stores_of(mode="async", a=4, b=3)
    quiesce = halted(known)
    assert quiesce.stands(False)
    assert quiesce.numbers() == {}
    assert holds(quiesce, known, "b")


def test_an_init_of_what_is_there_changes_nothing_and_goes_on() -> None:
    known = stores_of(a=3)
    quiesce = halted(known)
    assert not quiesce.holds(known["kv"], calls.Init("kv", (("a", spec(4)),), (ROW,)))
    assert quiesce.holds(known["kv"], calls.Init("kv", (("new", spec(4)),), (ROW,)))


@pytest.mark.parametrize("rank", [0, 1])
def test_creation_of_a_table_is_held(rank: int) -> None:
    recipe = recipe_of("t", 1, "zeros", "sgd", 1, None, "float32", None)
    known = stores_of(rank, a=3)
    quiesce = halted(known)
    assert quiesce.holds(known["kv"], calls.MakeTable("kv", "new", recipe, rank))
    assert not quiesce.holds(known["kv"], calls.MakeTable("kv", "a", recipe, rank))
    rows = calls.PushTableRows("kv", ("a",), True, (), (), ())
    assert quiesce.holds(known["kv"], rows)


def test_calls_keep_their_order() -> None:
    known = stores_of(a=3) | {"other": WorkerStore(opened("other"), 0, 1, 240.0)}
    quiesce = halted(known)
    quiesce.held.append(DeferredCall(7, push({"a": ROW}), 200.0))
    assert quiesce.holds(known["kv"], pull({"a": ROW}))
    assert not quiesce.holds(known["other"], calls.AskStatus("other"))


def test_an_unknown_key_is_not_its_business() -> None:
    known = stores_of(a=3)
    assert not holds(halted(known), known, "unknown")


class TestPatience:
    @pytest.mark.parametrize(("mode", "most"), [("sync", STAND_MAX_S), ("ssp", FREE_STAND_MAX_S)])
    def test_has_an_end(self, mode: str, most: float) -> None:
        known = stores_of(mode=mode, a=3)
        quiesce = halted(known)
        assert quiesce.deadline(200.0) == 100.0 + most
        assert not quiesce.is_impatient(200.0, 100.0 + most - 0.1)
        assert quiesce.stood
        assert quiesce.is_impatient(200.0, 100.0 + most)
        quiesce.break_off()
        assert not quiesce.is_impatient(200.0, 100.0 + most)
        assert not quiesce.stood

    def test_is_short_with_a_scheduler_that_is_silent(self) -> None:
        quiesce = halted(stores_of(a=3))
        assert quiesce.deadline(101.0) == 101.0 + SILENCE_MAX_S


class TestProceed:
    @pytest.mark.spec("R133")
    def test_nor_did_one_that_never_heard_of_the_cut(self) -> None:
        quiesce = halted(stores_of(a=3))
        assert quiesce.proceed(Proceed(2)) == (False, [])
        assert quiesce.proceed(Proceed(1)) == (False, [])  # an old one, said again
