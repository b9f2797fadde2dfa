"""A key's value is that of its newest collective that was made."""

import gc
import threading
import weakref

import pytest
import torch

from kvps.errors import KeyNotFound, Mismatch, Timeout
from kvps.store.allreduce import queue as module
from kvps.store.allreduce.latest_values import CollectiveTicket, LatestValues
from kvps.store.allreduce.queue import Collective, CollectiveQueue

WAIT_S = 20.0


@pytest.fixture
def queue():
    made = CollectiveQueue("mine")
    yield made
    assert made.stop(WAIT_S)


def gives(*numbers, names=()):
    return Collective("push()", lambda: [torch.tensor(number) for number in numbers], names)


def fails(error, names=()):
    def make():
        raise error

    return Collective("push()", make, names)


def held(gate, begun=None, names=()):
    def make():
        if begun is not None:
            begun.set()
        assert gate.wait(WAIT_S)
        return [torch.tensor(0.0) for _ in names]

    return Collective("held()", make, names)


def wait(collective, left_s, limit_s):
    """As a store does it."""
    if not collective.wait(max(0.0, left_s)):
        raise Timeout(f"not in {limit_s} s")
    collective.result()


def test_values_and_versions_follow_the_collectives(queue):
    values = LatestValues(queue)
    values.begin(gives(0.0, 10.0, names=["a", "b"]), 0, WAIT_S)
    early = CollectiveTicket(["b", "a"], values.of(["b", "a"]), WAIT_S, wait)
    values.begin(gives(1.0, names=["a"]), 1, WAIT_S)
    values.begin(gives(11.0, 2.0, names=["b", "a"]), 1, WAIT_S)
    assert [item.item() for item in early.wait()] == [10, 0]
    assert early.wait() is early.wait()
    a, b = values.of(["a", "b"])
    CollectiveTicket(["a", "b"], [a, b], WAIT_S, wait).wait()
    assert (a.versions["a"], b.versions["b"]) == (2, 1)
    assert "a" in values
    assert "c" not in values
    with pytest.raises(KeyNotFound, match="'c' was never initialised"):
        values.of(["a", "c"])


def test_a_key_whose_collective_fails_has_the_value_that_it_had(queue):
    values = LatestValues(queue)
    values.begin(gives(0.0, names=["a"]), 0, WAIT_S)
    bad = values.begin(fails(Mismatch("no"), names=["a", "new"]), 1, WAIT_S)
    good = values.begin(gives(5.0, names=["b"]), 0, WAIT_S)
    assert good.wait(WAIT_S)
    assert bad.has_failed
    (value,) = CollectiveTicket(["a"], values.of(["a"]), WAIT_S, wait).wait()
    assert value.item() == 0
    assert "new" not in values


def test_a_collective_that_fails_behind_a_newer_one_changes_nothing(queue):
    values, gate = LatestValues(queue), threading.Event()
    values.begin(gives(0.0, names=["a"]), 0, WAIT_S)
    queue.add(held(gate), WAIT_S)
    values.begin(fails(Mismatch("no"), names=["a"]), 1, WAIT_S)
    newest = values.begin(gives(7.0, names=["a"]), 1, WAIT_S)
    gate.set()
    assert newest.wait(WAIT_S)
    assert values.of(["a"]) == [newest]
    assert newest.versions == {"a": 1}


def test_values_that_nobody_wants_are_freed_at_once(queue):
    values = LatestValues(queue)
    first = values.begin(gives(1.0, names=["a"]), 0, WAIT_S)
    assert first.wait(WAIT_S)
    value = weakref.ref(first.result()[0])
    gc.disable()  # no cycle may hold it: it may be the whole model
    try:
        del first
        assert value() is not None
        for _ in range(2):
            assert values.begin(gives(2.0, names=["a"]), 1, WAIT_S).wait(WAIT_S)
        assert queue.add(gives(), WAIT_S).wait(WAIT_S)
        assert value() is None
    finally:
        gc.enable()


def test_collective_that_was_not_begun_leaves_no_value(monkeypatch):
    monkeypatch.setattr(module, "PENDING_MAX", 1)
    queue, gate, begun = CollectiveQueue("mine"), threading.Event(), threading.Event()
    queue.add(held(gate, begun), WAIT_S)
    assert begun.wait(WAIT_S)
    values = LatestValues(queue)
    kept = values.begin(gives(1.0, names=["a"]), 0, WAIT_S)
    with pytest.raises(Timeout):
        values.begin(gives(2.0, 3.0, names=["a", "b"]), 1, 0.01)
    gate.set()
    assert kept.wait(WAIT_S)
    assert values.of(["a"]) == [kept]
    assert "b" not in values
    assert queue.stop(WAIT_S)


def test_an_awaited_call_ends_with_its_time(queue):
    values, gate = LatestValues(queue), threading.Event()
    values.begin(held(gate, names=["a"]), 0, WAIT_S)
    late = CollectiveTicket(["a"], values.of(["a"]), 0.01, wait)
    with pytest.raises(Timeout, match=r"not in 0\.01 s"):
        late.wait()
    assert late.is_over
    waiting = CollectiveTicket(["a"], values.of(["a"]), WAIT_S, wait)
    assert not waiting.is_over
    gate.set()


def test_when_over_calls_back_when_all_collectives_are_over(queue):
    values, gate, told = LatestValues(queue), threading.Event(), threading.Event()
    values.begin(gives(1.0, names=["a"]), 0, WAIT_S)
    values.begin(held(gate, names=["b", "c"]), 0, WAIT_S)
    ticket = CollectiveTicket(["a", "b", "c"], values.of(["a", "b", "c"]), WAIT_S, wait)
    ticket.when_over(told.set)
    assert not told.is_set()
    gate.set()
    assert told.wait(WAIT_S)
    again = threading.Event()
    ticket.when_over(again.set)
    assert again.is_set(), "they are over"
    none = threading.Event()
    CollectiveTicket([], [], WAIT_S, wait).when_over(none.set)
    assert none.is_set()
