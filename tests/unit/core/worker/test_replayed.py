"""Calls that wait for a replacement, while it passes over the steps of its predecessor."""

import pytest

from kvps.core.effects import Note
from kvps.core.worker import calls
from kvps.errors import Timeout
from kvps.protocol.membership import Barrier, Beat, Released
from tests.support.worker_harness import Bench

LIMIT_S = 40.0


def waiting(limit_s: float = LIMIT_S) -> tuple[Bench, int]:
    """A worker that waits at a barrier of a store whose limit is 40 s."""
    worker = Bench(servers=1)
    worker.open(timeout_s=LIMIT_S)
    return worker, worker.call(calls.StandAtBarrier("kv", None), limit_s)


def seconds_waited(worker: Bench, ticket: int, *replayed: int) -> float:
    """Let the scheduler tell these numbers every 10 s, the last for ever; return when the call ends by a Timeout."""
    began = worker.now
    numbers = iter(replayed)
    number = 0
    while worker.finish(ticket) is None:
        number = next(numbers, number)
        worker.scheduler(Beat(0, replayed=number))
        for _ in range(10):
            worker.wait(1.0)
    with pytest.raises(Timeout):
        raise worker.error(ticket)
    return worker.now - began


@pytest.mark.spec("R452")
def test_limit_counts_from_the_last_step_that_a_replacement_passed_over() -> None:
    worker, ticket = waiting()
    assert seconds_waited(worker, ticket, 1, 2, 3, 4, 5, 5) == 40 + LIMIT_S
    told = [effect for effect in worker.effects if isinstance(effect, Note)]
    assert ["replaces a lost worker" in note.text for note in told].count(True) == 1


@pytest.mark.spec("R452")
@pytest.mark.parametrize(("limit_s", "replayed"), [(LIMIT_S, ()), (LIMIT_S, (0, 0, 0)), (10.0, (1, 2, 3))])
def test_other_limits_hold(limit_s: float, replayed: tuple[int, ...]) -> None:
    """Where nobody replays, and where the user gave a call less time than the store's."""
    worker, ticket = waiting(limit_s)
    assert seconds_waited(worker, ticket, *replayed) == limit_s


@pytest.mark.spec("R452")
def test_a_call_that_was_put_off_ends_well() -> None:
    worker, ticket = waiting()
    for number in range(1, 7):
        worker.scheduler(Beat(0, replayed=number))
        for _ in range(10):
            worker.wait(1.0)
    worker.scheduler(Beat(0))
    worker.scheduler(Released(worker.seqs(Barrier)[-1]))
    assert worker.is_done(ticket)


@pytest.mark.spec("R452")
def test_a_call_that_is_made_again_behind_its_timeout_has_its_new_limit() -> None:
    worker, ticket = waiting()
    assert seconds_waited(worker, ticket) == LIMIT_S
    again = worker.call(calls.StandAtBarrier("kv", None), 2 * LIMIT_S)
    assert seconds_waited(worker, again, 1, 2, 3) == 20 + 2 * LIMIT_S
