"""One thread makes the collectives, in order, and ends each with its result or its error."""

import os
import threading

import pytest
import torch

from kvps.errors import ConfigError, KvpsError, Mismatch, Timeout, WorkerLost
from kvps.store.allreduce import queue as module
from kvps.store.allreduce.queue import Collective, CollectiveQueue

WAIT_S = 20.0


@pytest.fixture
def queue():
    made = CollectiveQueue("mine")
    yield made
    assert made.stop(WAIT_S)


def gives(*values):
    return Collective("push()", lambda: [torch.tensor(value) for value in values])


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


def test_queue_are_made_in_order_and_gradients_are_not_tracked(queue):
    seen = []
    some = [Collective(str(i), lambda i=i: seen.append((i, torch.is_grad_enabled())) or []) for i in range(9)]
    for item in some:
        queue.add(item, WAIT_S)
    assert queue.flush(WAIT_S)
    assert seen == [(i, False) for i in range(9)]
    assert queue.now is None or queue.now is some[-1]


def test_a_collective_that_fails_does_not_end_the_others(queue):
    first, two = fails(Mismatch("no")), gives(1.0)
    told = []
    first.on_error = told.append
    two.on_error = told.append
    queue.add(first, WAIT_S)
    queue.add(two, WAIT_S)
    assert two.wait(WAIT_S)
    assert (str(first.exception()), two.exception(), told) == ("no", None, [first.exception()])
    assert (first.has_failed, two.has_failed) == (True, False)


@pytest.mark.parametrize("error", [WorkerLost("gone"), ZeroDivisionError("what")])
def test_broken_ring_ends_all_later_collectives(queue, error):
    first, two = fails(error), gives(1.0)
    queue.add(first, WAIT_S)
    queue.add(two, WAIT_S)
    assert queue.flush(WAIT_S)
    assert isinstance(first.exception(), KvpsError)
    assert two.exception() is first.exception() is queue.over
    assert str(error) in str(first.exception())


def test_a_time_limit_cancels_nothing(queue):
    gate = threading.Event()
    collective = queue.add(held(gate), WAIT_S)
    assert not collective.wait(0.01)
    assert not queue.flush(0.01)
    assert not collective.done()
    gate.set()
    assert collective.wait(WAIT_S)
    assert collective.exception() is None


def test_so_many_queue_may_wait(monkeypatch):
    monkeypatch.setattr(module, "PENDING_MAX", 1)
    queue, gate, begun = CollectiveQueue("mine"), threading.Event(), threading.Event()
    queue.add(held(gate, begun), WAIT_S)
    assert begun.wait(WAIT_S)
    queue.add(gives(1.0), WAIT_S)
    with pytest.raises(Timeout, match=r"'mine': push\(\): 1 earlier calls have waited"):
        queue.add(gives(2.0), 0.01)
    gate.set()
    assert queue.flush(WAIT_S)
    assert queue.stop(WAIT_S)


def test_after_the_end_nothing_is_made():
    queue = CollectiveQueue("mine")
    assert queue.stop(WAIT_S)
    assert queue.stop(WAIT_S)
    late = queue.add(gives(1.0), WAIT_S)
    assert not late.wait(0.01)


def test_a_fork_is_told(queue, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ConfigError, match="after a fork"):
        queue.add(gives(1.0), WAIT_S)
