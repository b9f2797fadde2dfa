"""A worker that is added to a job that runs: it enters a store before its first push, and begins with one round."""

import pytest
import torch

from kvps.core.effects import Finish
from kvps.core.optim.hyperparams import resolve
from kvps.core.worker import calls
from kvps.core.worker.calls.base import LIGHT, push_nothing
from kvps.core.worker.calls.rows import push_no_rows
from kvps.core.worker.plan import Key, PieceLocation
from kvps.dtypes import Spec
from kvps.errors import ProtocolError
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Barrier, Done, Error, HistoryIs, Join, Resume, Return, ViewChanges
from kvps.protocol.stores import Find, Found, FoundAll
from kvps.protocol.values import Pull, Push, PushRows, PushTables, Run, TablePart
from tests.support.worker_harness import Bench, member, push, values_of
from tests.support.worker_with_key import FLOAT, HOT, resumed, stood

KNOWN = HistoryIs(0, 1, 0, 0, 0, 0.0, 0, False)
"""A server whose store has an optimizer."""


def added(**options: object) -> Bench:
    """Return worker 1, that was added, with a store and a key that lies on both servers."""
    worker = Bench(rank=1, most=4)
    worker.open(**options)
    worker.init({"w": HOT})
    return worker


def enter(worker: Bench, calls_made: int = 0) -> None:
    """Answer what a worker asks when it enters."""
    for server in (0, 1):
        worker.server(server, Done(worker.seqs(Return, server)[-1]))
    for server in (0, 1):
        for seq in worker.seqs(Find, server):
            worker.server(server, FoundAll(seq, (Found(FLOAT, (40,), calls_made),)))
    resumed(worker, KNOWN, KNOWN)


@pytest.mark.spec("R573", "R574")
def test_first_push_enters_and_begins_with_the_round_of_the_foremost_part() -> None:
    worker = added()
    first, second = worker.call(push({"w": HOT})), worker.call(push({"w": HOT + 1.0}))
    assert worker.sent(Return) == [Return("kv", 0)] * 2
    assert not worker.sent(Push) + worker.sent(Resume)
    enter(worker)
    for server, owed in ((0, 7), (1, 9)):
        stood(worker, worker.seqs(Pull, server)[0], server, owed, owed)
    empty = worker.sends(Push)
    assert [(send.packet.message.weight, send.packet.message.runs[0].number) for send in empty] == [
        (LIGHT, 7),
        (LIGHT, 8),
    ]
    assert [values_of(send) for send in empty] == [[0.0] * 16] * 2
    assert not worker.is_copied(first), "its values are still the caller's"
    worker.ack(0, *worker.seqs(Push, 0))
    for server in (0, 1):
        for seq in worker.seqs(Pull, server)[1:]:
            stood(worker, seq, server, 9, 9)
    real = [send for send in worker.sends(Push) if send.packet.message.weight == 1.0]
    numbers = [(send.packet.message.runs[0].number, values_of(send)[0]) for send in real]
    assert sorted(numbers) == [(9, 0.0), (9, 16.0), (10, 1.0), (10, 17.0)]
    for server in (0, 1):
        worker.ack(server, *worker.seqs(Push, server)[-2:])
    assert worker.is_done(first)
    assert worker.is_done(second)
    assert worker.core.info.workers == 2
    assert worker.core.info.is_added


@pytest.mark.spec("R573")
def test_pull_does_not_enter_and_asks_anew_which_push_is_owed() -> None:
    worker = added()
    for owed in (3, 5):
        worker.call(calls.Versions("kv", ("w",)))
        for server in (0, 1):
            stood(worker, worker.seqs(Pull, server)[-1], server, owed, owed)
        for server in (0, 1):
            stood(worker, worker.seqs(Pull, server)[-1], server, owed, owed)
        assert worker.core.stores["kv"].keys["w"].number == owed
    assert not worker.sent(Return)


@pytest.mark.spec("R573")
def test_resume_enters_and_returns_the_round() -> None:
    worker = added()
    ticket = worker.call(calls.TakePlace("kv", ("w", "new"), replays=False))
    enter(worker)
    worker.server(1, FoundAll(worker.seqs(Find, 1)[-1], (Found(0, ()),))) if worker.seqs(Find, 1) else None
    for server in (0, 1):
        for seq in worker.seqs(Find, server):
            worker.server(server, FoundAll(seq, (Found(0, ()),)))
    for server in (0, 1):
        stood(worker, worker.seqs(Pull, server)[-1], server, 6, 6)
    resumed(worker, KNOWN, KNOWN)
    finish = worker.finish(ticket)
    assert finish is not None
    assert finish.value.owed == 0, "of a key that is not there, all pushes are owed"
    assert worker.sent(Resume)[-1] == Resume("kv", 6)


@pytest.mark.spec("R573")
def test_refused_entry_ends_the_calls_that_wait_for_it() -> None:
    worker = added()
    ticket, other = worker.call(push({"w": HOT})), worker.call(calls.JoinStore("kv"))
    worker.server(0, Error(worker.seqs(Return, 0)[0], ProtocolError.code, "no"))
    assert "no" in str(worker.error(ticket))
    assert "no" in str(worker.error(other))
    assert not worker.sent(Join)


@pytest.mark.spec("R573")
def test_barriers_and_broadcasts_behind_the_entry_are_counted_by_rounds() -> None:
    worker = added()
    worker.call(push({"w": HOT}))
    enter(worker, calls_made=4)
    for server in (0, 1):
        stood(worker, worker.seqs(Pull, server)[0], server, 7, 7)
    assert worker.core.stores["kv"].keys["w"].broadcasts == 4
    worker.ack(0, *worker.seqs(Push, 0))
    worker.ack(1, *worker.seqs(Push, 1))
    worker.call(calls.StandAtBarrier("kv", "kvps.broadcast"))
    assert worker.sent(Barrier)[-1] == Barrier("kv", "kvps.broadcast", 0, True, 8, True)
    worker.call(calls.SetOptimizer("kv", resolve("test", {})))


@pytest.mark.spec("R573")
def test_without_rounds_the_numbers_of_barriers_are_the_next() -> None:
    worker = added(mode="async")
    worker.call(push({"w": HOT}))
    for server in (0, 1):
        worker.server(server, Done(worker.seqs(Return, server)[-1]))
    for server in (0, 1):
        for seq in worker.seqs(Find, server):
            worker.server(server, FoundAll(seq, (Found(FLOAT, (40,)),)))
    resumed(worker, KNOWN, KNOWN, b=3)
    assert worker.sent(Resume) == [Resume("kv", None)]
    assert worker.core.stores["kv"].barriers == {"b": 3}


@pytest.mark.spec("R573")
def test_rollback_makes_it_enter_again() -> None:
    worker = added()
    worker.call(push({"w": HOT}))
    enter(worker)
    for server in (0, 1):
        stood(worker, worker.seqs(Pull, server)[0], server, 0, 0)
    worker.core.stores["kv"].forget()
    assert not worker.core.stores["kv"].has_entered


@pytest.mark.spec("R573")
def test_worker_of_the_beginning_enters_nothing() -> None:
    worker = Bench(rank=1, most=4)
    worker.view(member(Node(Role.WORKER, 1)))
    first = Bench(rank=0)
    first.open()
    assert not first.core.info.is_added
    assert worker.core.info.is_added, "it stays what it was"


def test_script_hears_how_many_workers_there_are() -> None:
    worker = Bench(rank=1, workers=4, most=4)
    heard = []
    for state in ("lost", "vacant", "added"):
        worker.view(member(Node(Role.WORKER, 2), state))
        heard += [effect.value for effect in worker.effects if isinstance(effect, Finish)]
        worker.effects.clear()
    assert heard == [3, 4]


@pytest.mark.spec("R574")
def test_pushes_of_nothing_are_of_the_kind_of_the_key() -> None:
    worker = added()
    store, piece = worker.core.stores["kv"], PieceLocation(1, 9, 4, 6, 0)
    dense = push_nothing(store, Key("w", Spec("float32", (6,))), piece, 3)
    assert dense.message == Push(9, FLOAT, (1,), LIGHT, False, (Run(4, 6, 3),))
    assert torch.equal(dense.peek()[0], torch.zeros(6))
    table = push_nothing(store, Key("kvps.embedding:t", Spec("float32", (2, 4))), piece, 3).message
    rows = push_no_rows(store, Key("w", Spec("float32", (3, 2))), piece, 3).message
    assert rows == PushRows("kv", "w", FLOAT, (1,), 3, 2, 0)
    assert isinstance(table, PushTables)
    assert table.parts == (TablePart(9, 3, 0),)


@pytest.mark.spec("R572")
def test_changes_of_a_view_tell_which_ranks_have_other_holders() -> None:
    worker = Bench(rank=1, most=4)
    for state in ("lost", "added", "left"):
        seat = member(Node(Role.WORKER, 0), state, incarnation=90)
        worker.number += 1
        worker.scheduler(ViewChanges(worker.number, worker.number - 1, "running", "", (seat,)))
        assert worker.core.member.quorum().heirs == (frozenset({0}) if state == "added" else frozenset())
    assert worker.core.member.quorum().late == {0, 1}
