"""A script that took another's place and runs again from its beginning: its calls pass until it is where the others are."""

from __future__ import annotations

import pytest

from kvps.core.optim.hyperparams import resolve
from kvps.core.worker import calls
from kvps.protocol.checkpoint import Checkpoint, Checkpointed, Revive
from kvps.protocol.membership import Barrier, Done, HistoryIs, Released, Resume
from kvps.protocol.stores import Optimize, Rate
from kvps.protocol.values import Pull
from tests.support.worker_harness import Bench
from tests.unit.core.worker.calls.test_dense import ready, resumed, stood

SILENT = HistoryIs(0, 0, 0, 0, 0, 0.0, 0, False)
"""A server that has heard of no call."""


def replay(
    one: Bench,
    *known: HistoryIs,
    owed: tuple[int, int] = (4, 4),
    replaced: bool = True,
    **more: int,
) -> calls.Place:
    """Take a place that owes these pushes on the two servers."""
    ticket = one.call(calls.TakePlace("kv", ("w",)))
    for server in (0, 1):
        stood(one, one.seqs(Pull, server)[0], server, 4, owed=owed[server])
    resumed(one, *known, replaced=replaced, **more)
    finish = one.finish(ticket)
    assert finish is not None
    assert isinstance(finish.value, calls.Place)
    return finish.value


def test_a_new_worker_has_nothing_to_replay() -> None:
    one = ready()
    assert replay(one, replaced=False) == calls.Place(4, 4)
    one.call(calls.StandAtBarrier("kv", None))
    assert one.sent(Barrier)


@pytest.mark.spec("R394")
def test_calls_pass_until_the_end_of_a_replay() -> None:
    one = ready(1)
    place = replay(one, *[HistoryIs(0, 1, 0, 2, 3, 0.5, 0, False)] * 2, owed=(4, 6))
    assert place == calls.Place(4, 6, is_replacement=True, rate=0.5)
    for call in (
        calls.StandAtBarrier("kv", None),
        calls.SetRate("kv", 0.25),
        calls.SetOptimizer("kv", resolve("test", {})),
    ):
        assert one.is_done(one.call(call))
    assert not one.sent(Barrier) + one.sent(Rate) + one.sent(Optimize)
    assert one.is_done(one.call(calls.EndReplay("kv")))
    one.call(calls.StandAtBarrier("kv", None))
    assert one.sent(Barrier) == [Barrier("kv", "", 0, True, 4, resumed=True)]
    one.call(calls.SetRate("kv", 0.25))
    assert one.sent(Rate)[-1].resumed


@pytest.mark.parametrize(
    ("rate_calls", "rate_after", "optimize_after"), [(0, 0, 0), (2, 4, 0), (2, 3, 4)]
)
def test_the_rate_of_the_round_before_may_not_be_known(
    rate_calls: int, rate_after: int, optimize_after: int
) -> None:
    told = HistoryIs(0, 1, optimize_after, rate_calls, rate_after, 0.5, 0, False)
    assert replay(ready(1), told, told).rate is None


@pytest.mark.spec("R394")
def test_without_rounds_its_barriers_are_counted() -> None:
    one = ready(1, mode="async")
    replay(one, SILENT, SILENT, **{"": 5})
    for _ in range(3):
        assert one.is_done(one.call(calls.StandAtBarrier("kv", None)))
    one.call(calls.EndReplay("kv"))
    one.call(calls.StandAtBarrier("kv", None))
    assert one.sent(Barrier) == [Barrier("kv", "", 3, False, 0)]


@pytest.mark.spec("R393")
def test_one_that_owes_its_first_push_makes_all_calls_by_itself() -> None:
    one = ready()
    one.core.stores["kv"].barriers = {"": 1}
    optimizer = calls.SetOptimizer("kv", resolve("test", {}))
    one.call(optimizer)
    for server in (0, 1):
        one.server(server, Done(one.seqs(Optimize, server)[-1]))
    place = replay(one, *[HistoryIs(0, 2, 0, 1, 0, 0.5, 0, False)] * 2, owed=(0, 1))
    assert one.sent(Resume) == [Resume("kv", None)]
    assert place == calls.Place(0, 1, is_replacement=True)
    one.call(optimizer)
    assert one.sent(Optimize)[-1].call == 2, "the second of this process is that of all others"
    one.call(calls.StandAtBarrier("kv", None))
    assert one.sent(Barrier) == [Barrier("kv", "", 1, True, 0)]


@pytest.mark.spec("R395")
def test_a_checkpoint_that_a_predecessor_asked_for_is_not_asked_for_again() -> None:
    one = ready(1)
    replay(one, SILENT, SILENT)
    one.call(calls.EndReplay("kv"))
    ticket = one.call(calls.TakeCheckpoint("kv", "best"))
    one.scheduler(Released(one.seqs(Barrier)[-1]))
    assert one.sent(Checkpoint) == [Checkpoint("kv", "best", 0)]
    one.scheduler(Checkpointed(one.seqs(Checkpoint)[-1], 12))
    assert one.finish(ticket).value == 12  # type: ignore[union-attr]


@pytest.mark.spec("R395")
def test_the_values_of_a_job_that_goes_on_are_not_those_of_a_checkpoint_again() -> None:
    one = ready()
    place = replay(one, *[HistoryIs(0, 0, 0, 0, 0, 0.0, 0, False, 7)] * 2)
    assert place.restored == 7
    assert one.is_done(one.call(calls.RestoreCheckpoint("kv", "")))
    assert not one.sent(Revive)
