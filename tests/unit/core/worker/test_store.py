"""What a worker knows of a store."""

import pytest

from kvps.core.worker.plan import PieceLocation
from kvps.core.worker.store import Made, WorkerStore, of_beat
from kvps.errors import KeyNotFound
from tests.support.worker_harness import opened, spec


def new_store(**options: object) -> WorkerStore:
    return WorkerStore(opened(**options), 0, 2, 240.0)


def place(store: WorkerStore, *names: str, chunk: int = 1) -> None:
    store.place((name, spec(4), [PieceLocation(0, chunk, 4 * at, 4, 0)]) for at, name in enumerate(names))


@pytest.mark.parametrize(
    ("mode", "on_worker_lost", "ordered", "waits"),
    [
        ("sync", "wait", True, True),
        ("sync", "fail", True, True),
        ("sync", "shrink", True, False),
        ("async", "wait", False, False),
        ("ssp", "wait", False, False),
        ("async", "fail", False, True),
        ("async", "shrink", False, False),
    ],
)
def test_options_set_order_and_waiting(mode: str, on_worker_lost: str, ordered: bool, waits: bool) -> None:
    store = new_store(mode=mode, on_worker_lost=on_worker_lost)
    assert (store.ordered, store.waits_for_lost) == (ordered, waits)


@pytest.mark.spec("R434")
def test_a_worker_says_that_it_goes_on_without_lost_ones() -> None:
    waiting, shrinking = new_store(), new_store(on_worker_lost="shrink")
    assert not of_beat({}).goes_on
    assert not of_beat({"a": waiting}).goes_on
    assert of_beat({"a": waiting, "b": shrinking}).goes_on


def test_a_plan_is_made_once() -> None:
    store = new_store()
    place(store, "a", "b")
    plan = store.plan(("b", "a"))
    assert [key.name for key in plan.keys] == ["b", "a"]
    assert store.plan(("b", "a")) is plan
    assert store.plan(("a", "b")) is not plan


def test_plans_do_not_grow_without_end() -> None:
    store = new_store()
    names = [f"k{index}" for index in range(10)]
    place(store, *names)
    for first in names:
        for second in names:
            store.plan((first, second))
    assert len(store.plans) <= 4 * 10 + 16


def test_counts_of_a_key_stay_unless_its_spec_changes() -> None:
    store = new_store()
    place(store, "a")
    key = store.key("a")
    key.number = 7
    place(store, "a", chunk=3)
    assert store.key("a") is key
    assert key.pieces == (PieceLocation(0, 3, 0, 4, 0),)
    store.place([("a", spec(5), [])])
    assert (store.key("a").number, store.key("a").spec) == (0, spec(5))


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(KeyNotFound, match=r"'w' of store 'kv' was never initialised; call init"):
        new_store().plan(("w",))


def test_versions_are_rounds_or_those_that_servers_told() -> None:
    """Where push numbers are rounds, what is applied is the version; else the servers have told it."""
    store, free = new_store(), new_store(mode="async")
    for each in (store, free):
        place(each, "a")
        each.keys["a"].applied, each.keys["a"].version = 3, 7
    assert store.versions() == {"a": 3}
    assert free.versions() == {"a": 7}


@pytest.mark.spec("R252")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_calls_are_numbered_anew_after_each_join(mode: str) -> None:
    store = new_store(mode=mode)
    assert store.next_call(Made(6)).number == 7
    store.joins = 2
    first = (2 << 20) + 1
    assert store.next_call(Made(7)).number == first
    assert store.next_call(Made(first)).number == first + 1
    assert store.next_call(Made(7, is_inherited=True)).number == first, "it was made before the join"
