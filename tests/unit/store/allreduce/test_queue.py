"""One thread makes the turns, in order; a key's value is that of its newest turn that was made."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch

from kvps.errors import ConfigError, KeyNotFound, KvpsError, Mismatch, Timeout, WorkerLost
from kvps.store.allreduce import queue as module
from kvps.store.allreduce.cells import Cells, CollectiveTicket
from kvps.store.allreduce.queue import Collective, CollectiveQueue

WAIT_S = 20.0


@pytest.fixture
def turns():
    made = CollectiveQueue("mine")
    yield made
    assert made.stop(WAIT_S)


def gives(*values):
    return Collective("push()", lambda: [torch.tensor(one) for one in values])


def fails(error):
    def make():
        raise error

    return Collective("push()", make)


def held(gate, begun=None):
    def make():
        if begun is not None:
            begun.set()
        assert gate.wait(WAIT_S)
        return []

    return Collective("held()", make)


def test_turns_are_made_in_order_and_gradients_are_not_tracked(turns):
    seen = []
    some = [
        Collective(str(i), lambda i=i: seen.append((i, torch.is_grad_enabled())) or [])
        for i in range(9)
    ]
    for one in some:
        turns.add(one, WAIT_S)
    assert turns.flush(WAIT_S)
    assert seen == [(i, False) for i in range(9)]
    assert turns.now is None or turns.now is some[-1]


def test_a_turn_that_fails_does_not_end_the_others(turns):
    one, two = fails(Mismatch("no")), gives(1.0)
    told = []
    one.on_error = told.append
    two.on_error = told.append
    turns.add(one, WAIT_S)
    turns.add(two, WAIT_S)
    assert two.wait(WAIT_S)
    assert (str(one.error), two.error, told) == ("no", None, [one.error])


@pytest.mark.parametrize("error", [WorkerLost("gone"), ZeroDivisionError("what")])
def test_what_breaks_the_ring_ends_all_later_turns(turns, error):
    one, two = fails(error), gives(1.0)
    turns.add(one, WAIT_S)
    turns.add(two, WAIT_S)
    assert turns.flush(WAIT_S)
    assert isinstance(one.error, KvpsError)
    assert two.error is one.error is turns.over
    assert str(error) in str(one.error)


def test_a_time_limit_cancels_nothing(turns):
    gate = threading.Event()
    turn = turns.add(held(gate), WAIT_S)
    assert not turn.wait(0.01)
    assert not turns.flush(0.01)
    assert not turn.is_over
    gate.set()
    assert turn.wait(WAIT_S)
    assert turn.error is None


def test_so_many_turns_may_wait(monkeypatch):
    monkeypatch.setattr(module, "PENDING_MAX", 1)
    turns, gate, begun = CollectiveQueue("mine"), threading.Event(), threading.Event()
    turns.add(held(gate, begun), WAIT_S)
    assert begun.wait(WAIT_S)
    turns.add(gives(1.0), WAIT_S)
    with pytest.raises(Timeout, match=r"'mine': push\(\): 1 calls before it wait"):
        turns.add(gives(2.0), 0.01)
    gate.set()
    assert turns.flush(WAIT_S)
    assert turns.stop(WAIT_S)


def test_after_the_end_nothing_is_made():
    turns = CollectiveQueue("mine")
    assert turns.stop(WAIT_S)
    assert turns.stop(WAIT_S)
    late = turns.add(gives(1.0), WAIT_S)
    assert not late.wait(0.01)


def test_a_fork_is_told(turns, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ConfigError, match="after a fork"):
        turns.add(gives(1.0), WAIT_S)


# --- cells ------------------------------------------------------------------------------------------------


def wait(turn, left_s, limit_s):
    """As a store does it."""
    if not turn.wait(max(0.0, left_s)):
        raise Timeout(f"not in {limit_s} s")
    if turn.error is not None:
        raise turn.error


def test_values_and_versions_follow_the_turns(turns):
    cells = Cells(turns)
    cells.begin(gives(0.0, 10.0), ["a", "b"], 0, WAIT_S)
    early = CollectiveTicket(["b", "a"], cells.of(["b", "a"]), WAIT_S, wait)
    cells.begin(gives(1.0), ["a"], 1, WAIT_S)
    cells.begin(gives(11.0, 2.0), ["b", "a"], 1, WAIT_S)
    assert [one.item() for one in early.wait()] == [10, 0]
    assert early.wait() is early.wait()
    a, b = cells.of(["a", "b"])
    CollectiveTicket(["a", "b"], [a, b], WAIT_S, wait).wait()
    assert (a.version("a"), b.version("b")) == (2, 1)
    assert "a" in cells
    assert "c" not in cells
    with pytest.raises(KeyNotFound, match="'c' was never initialised"):
        cells.of(["a", "c"])


def test_a_key_whose_turn_fails_has_the_value_that_it_had(turns):
    cells = Cells(turns)
    cells.begin(gives(0.0), ["a"], 0, WAIT_S)
    bad = cells.begin(fails(Mismatch("no")), ["a", "new"], 1, WAIT_S)
    good = cells.begin(gives(5.0), ["b"], 0, WAIT_S)
    assert good.wait(WAIT_S)
    assert bad.is_over
    (value,) = CollectiveTicket(["a"], cells.of(["a"]), WAIT_S, wait).wait()
    assert value.item() == 0
    assert "new" not in cells


def test_a_turn_that_fails_behind_a_newer_one_changes_nothing(turns):
    cells, gate = Cells(turns), threading.Event()
    cells.begin(gives(0.0), ["a"], 0, WAIT_S)
    turns.add(held(gate), WAIT_S)
    cells.begin(fails(Mismatch("no")), ["a"], 1, WAIT_S)
    newest = cells.begin(gives(7.0), ["a"], 1, WAIT_S)
    gate.set()
    assert newest.wait(WAIT_S)
    assert cells.of(["a"]) == [newest]
    assert newest.versions == [1]


def test_values_that_nobody_wants_are_freed_at_once(turns):
    cells = Cells(turns)
    first = cells.begin(gives(1.0), ["a"], 0, WAIT_S)
    assert first.wait(WAIT_S)
    value = weakref.ref(first.rows[0])
    gc.disable()  # no cycle may hold it: it may be the whole model
    try:
        del first
        assert value() is not None
        for _ in range(2):
            assert cells.begin(gives(2.0), ["a"], 1, WAIT_S).wait(WAIT_S)
        assert turns.add(gives(), WAIT_S).wait(WAIT_S)
        assert value() is None
    finally:
        gc.enable()


def test_what_was_not_begun_leaves_no_cell(monkeypatch):
    monkeypatch.setattr(module, "PENDING_MAX", 1)
    turns, gate, begun = CollectiveQueue("mine"), threading.Event(), threading.Event()
    turns.add(held(gate, begun), WAIT_S)
    assert begun.wait(WAIT_S)
    cells = Cells(turns)
    kept = cells.begin(gives(1.0), ["a"], 0, WAIT_S)
    with pytest.raises(Timeout):
        cells.begin(gives(2.0, 3.0), ["a", "b"], 1, 0.01)
    gate.set()
    assert kept.wait(WAIT_S)
    assert cells.of(["a"]) == [kept]
    assert "b" not in cells
    assert turns.stop(WAIT_S)


def test_an_awaited_call_ends_with_its_time(turns):
    cells, gate = Cells(turns), threading.Event()
    cells.begin(held(gate), ["a"], 0, WAIT_S)
    late = CollectiveTicket(["a"], cells.of(["a"]), 0.01, wait)
    with pytest.raises(Timeout, match=r"not in 0\.01 s"):
        late.wait()
    assert late.is_over
    waiting = CollectiveTicket(["a"], cells.of(["a"]), WAIT_S, wait)
    assert not waiting.is_over
    gate.set()
