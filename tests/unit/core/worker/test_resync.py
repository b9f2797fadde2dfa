"""A worker whose servers have returned to a cut: what was asked is void, and the user is told once."""

import pytest
import torch

from kvps.core.effects import Connect, Effect, Finish
from kvps.core.optim.hyperparams import resolve
from kvps.core.placement import parts
from kvps.core.worker import calls
from kvps.core.worker.gate import StoreResync, epoch_changed
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_NAME
from kvps.errors import EpochChanged, Mismatch, ServerLost, Timeout
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Done, Error, Hello, History, HistoryIs, Welcome
from kvps.protocol.stores import Declare, Declared, Find, Found, FoundAll, Open, Optimize, Piece, Place
from kvps.protocol.values import Ack, Pull, Pulled, Push, Receipt, Stand
from tests.support.worker_harness import Bench, member, opened, pull, push, sends, spec

FLOAT = BY_NAME["float32"].id
S0, W1 = Node(Role.SERVER, 0), Node(Role.WORKER, 1)
REPLACED = member(S0, incarnation=99, endpoint="tcp://new:1")
CHUNK = 77
ONES = torch.ones(4)


def trained(pushes: int = 3, **options: object) -> Bench:
    """One server, and a key ``w`` that has been pushed and pulled so often."""
    worker = Bench(servers=1)
    worker.open(**options)
    worker.init({"w": torch.zeros(4)})
    for number in range(pushes):
        ticket = worker.call(push({"w": ONES}, sinks=(torch.zeros(4),)))
        stands = (Stand(0, 4, number + 1, number + 1),)
        answer = Pulled(worker.seqs(Push)[-1], 1, FLOAT, True, stands)
        worker.server(0, answer, ONES)
        assert worker.is_done(ticket)
    return worker


def begin(worker: Bench, epoch: int = 1, *changed: object, phase: str = "running") -> list[Effect]:
    """A view that begins an epoch."""
    since = worker.number + 1
    return worker.view(*(changed or (REPLACED,)), phase=phase, epoch=epoch, since=since, cut=7)  # type: ignore[arg-type]


def rejoin(worker: Bench, version: int = 2, call: int = 0) -> None:
    """Answer all that a store asks until it has found its way."""
    worker.server(0, Welcome(0, 21, 2, 1))
    worker.server(0, Done(worker.seqs(Open)[-1]))
    found = (Found(FLOAT, (4,), call),) if version >= 0 else (Found(0, ()),)
    worker.server(0, FoundAll(worker.seqs(Find)[-1], found))
    if version >= 0:
        worker.server(0, Declared(worker.seqs(Declare)[-1], (Place(False, (Piece(CHUNK, 0, 4),)),)))
        stands = (Stand(0, 4, version, version),)
        worker.server(0, Pulled(worker.seqs(Pull)[-1], CHUNK, FLOAT, False, stands))
    tell(worker)


def tell(worker: Bench, optimize_calls: int = 0) -> None:
    """The server says which calls of all ranks it knows of."""
    seq = worker.seqs(History)[-1]
    worker.server(0, HistoryIs(seq, optimize_calls, 0, 0, 0, 0.0, 0, joined=False))


def changed_at(worker: Bench, ticket: int) -> EpochChanged:
    error = worker.error(ticket)
    assert isinstance(error, EpochChanged)
    return error


@pytest.mark.spec("R143", "R144")
def test_a_call_under_way_ends_with_where_things_stand_and_the_next_goes_on_from_there() -> None:
    worker = trained()
    sink = torch.full((4,), 9.0)
    ticket = worker.call(push({"w": ONES}, sinks=(sink,)))
    effects = begin(worker)
    assert [effect for effect in effects if isinstance(effect, Connect)] == [
        Connect("server 0", "tcp://new:1", False)
    ]
    assert len(sends(effects, Hello)) == 1
    assert worker.finish(ticket) is None
    rejoin(worker)
    error = changed_at(worker, ticket)
    assert (error.before, error.after) == ({"w": 3}, {"w": 2})
    assert error.has_optimizer, "as many as this rank had set"
    assert sink.tolist() == [9.0] * 4
    assert worker.core.stores["kv"].versions() == {"w": 2}
    again = worker.call(push({"w": ONES}))
    message = worker.sent(Push)[-1]
    assert (message.chunk, message.runs[0].number) == (CHUNK, 2)
    worker.server(0, Ack((Receipt(worker.seqs(Push)[-1], 2),)))
    assert worker.is_done(again)


@pytest.mark.spec("R144")
def test_without_a_call_under_way_the_next_one_is_told() -> None:
    worker = trained()
    worker.call(calls.SetOptimizer("kv", resolve("sgd", {"lr": 0.1})))
    worker.server(0, Done(worker.seqs(Optimize)[-1]))
    begin(worker)
    rejoin(worker, version=3)
    told = worker.call(pull({"w": torch.zeros(4)}))
    assert changed_at(worker, told).after == {"w": 3}
    assert not changed_at(worker, told).has_optimizer, "it was set after the cut"
    assert worker.finish(worker.call(pull({"w": torch.zeros(4)}))) is None
    assert [note for note in worker.notes() if "epoch 1" in note]


@pytest.mark.spec("R461")
@pytest.mark.parametrize(
    ("pushes", "version", "mode", "is_told"),
    [(0, 0, "sync", False), (3, 3, "sync", False), (3, 2, "sync", True), (0, 7, "async", False)],
)
def test_script_that_ends_is_told_only_where_a_push_of_its_worker_is_lost(
    pushes: int, version: int, mode: str, is_told: bool
) -> None:
    worker = trained(pushes, mode=mode)
    begin(worker)
    rejoin(worker, version=version)
    ticket = worker.call(calls.Flush("kv"))
    finish = worker.finish(ticket)
    assert isinstance(finish, Finish)
    assert isinstance(finish.error, EpochChanged) == is_told
    if not is_told:
        assert changed_at(worker, worker.call(pull({"w": torch.zeros(4)}))).after == {"w": version}


@pytest.mark.spec("R461")
def test_script_that_ends_during_the_return_is_not_told() -> None:
    worker = trained(0)
    begin(worker)
    flush = worker.call(calls.Flush("kv"))
    rejoin(worker, version=0)
    assert worker.is_done(flush)
    assert changed_at(worker, worker.call(pull({"w": torch.zeros(4)}))).after == {"w": 0}


@pytest.mark.spec("R144")
@pytest.mark.parametrize(("calls_known", "is_set"), [((1, 1), True), ((0, 1), False)])
def test_an_optimizer_that_rank_0_is_setting_again_is_there_when_all_servers_have_it(
    calls_known: tuple[int, int], is_set: bool
) -> None:
    """Else this rank would go on, and change the rate of an optimizer that a server does not have."""
    worker = Bench(rank=1)
    worker.open()
    worker.init({"w": torch.zeros(4)})
    worker.call(calls.SetOptimizer("kv", resolve("sgd", {"lr": 0.1})))
    for server in (0, 1):
        worker.server(server, Done(worker.seqs(Optimize, server)[-1]))
    begin(worker)
    for server in (0, 1):
        worker.server(server, Welcome(1, 22, 2, 2))
    for server in (0, 1):
        worker.server(server, Done(worker.seqs(Open, server)[-1]))
    (home,) = [part.server for part in parts("w", 4, 2)]
    worker.server(home, FoundAll(worker.seqs(Find)[-1], (Found(FLOAT, (4,), 0),)))
    worker.server(home, Declared(worker.seqs(Declare)[-1], (Place(False, (Piece(CHUNK, 0, 4),)),)))
    stands = (Stand(0, 4, 0, 0),)
    worker.server(home, Pulled(worker.seqs(Pull)[-1], CHUNK, FLOAT, False, stands))
    for server, known in enumerate(calls_known):
        seq = worker.seqs(History, server)[-1]
        worker.server(server, HistoryIs(seq, known, 0, 0, 0, 0.0, 0, joined=False))
    assert changed_at(worker, worker.call(calls.AskStatus("kv"))).has_optimizer == is_set
    worker.call(calls.SetOptimizer("kv", resolve("sgd", {"lr": 0.1})))
    assert worker.sent(Optimize)[-1].call == 1, "the one that rank 0 makes"


@pytest.mark.spec("R144")
def test_a_store_that_knew_no_key_has_nothing_to_tell() -> None:
    worker = Bench(servers=1)
    worker.open()
    init = worker.call(calls.Init("kv", (("w", spec(4)),), (ONES,)))
    begin(worker)
    worker.server(0, Welcome(0, 21, 2, 1))
    worker.server(0, Done(worker.seqs(Open)[-1]))
    tell(worker)
    assert len(worker.sent(Declare)) == 2, "it is made again"
    worker.server(0, Declared(worker.seqs(Declare)[-1], (Place(False, (Piece(CHUNK, 0, 4),)),)))
    assert worker.is_done(init)


@pytest.mark.spec("R141")
def test_answers_of_the_epoch_before_are_not_heard() -> None:
    worker = trained()
    ticket = worker.call(pull({"w": torch.zeros(4)}))
    seq = worker.seqs(Pull)[-1]
    begin(worker)
    old = Pulled(seq, 1, FLOAT, True, (Stand(0, 4, 3, 3),))
    worker.server(0, old, ONES, view=worker.number - 1)
    worker.server(0, Welcome(0, 21, 2, 1), view=worker.number - 1)
    assert worker.finish(ticket) is None
    assert len(worker.sends(Open)) == 1, "there is no server yet that serves"
    rejoin(worker)
    changed_at(worker, ticket)


def test_a_seat_that_is_empty_still_is_connected_to_when_it_is_taken() -> None:
    worker = trained()
    effects = begin(worker, 1, member(S0, "lost"))
    assert not [effect for effect in effects if isinstance(effect, Connect)]
    effects = begin(worker, 2)
    assert [effect for effect in effects if isinstance(effect, Connect)] == [
        Connect("server 0", "tcp://new:1", False)
    ]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_call_times_out_and_the_store_resyncs_all_the_same(is_interrupted: bool) -> None:
    worker = trained()
    begin(worker, phase="returning")
    ticket = worker.call(push({"w": ONES}), timeout_s=5.0)
    if is_interrupted:
        worker.take(worker.core.on_interrupt(ticket, worker.now))
    worker.wait(0.0 if is_interrupted else 5.0)
    assert isinstance(worker.error(ticket), Timeout)
    rejoin(worker)
    changed_at(worker, worker.call(calls.AskStatus("kv")))


def test_a_store_that_is_refused_tells_why_to_those_who_wait() -> None:
    worker = trained()
    ticket = worker.call(push({"w": ONES}))
    begin(worker)
    worker.server(0, Welcome(0, 21, 2, 1))
    worker.server(0, Error(worker.seqs(Open)[-1], Mismatch.code, "store 'kv' has other options"))
    assert isinstance(worker.error(ticket), Mismatch)


class TestLost:
    @pytest.mark.spec("R149")
    def test_a_lost_server_is_waited_for_while_there_is_a_cut(self) -> None:
        worker = trained(worker_grace_s=20.0)
        ticket = worker.call(push({"w": ONES}))
        worker.view(member(S0, "lost"), cut=7)
        worker.wait(19.0)
        assert worker.finish(ticket) is None
        worker.wait(1.0)
        error = worker.error(ticket)
        assert isinstance(error, ServerLost)
        assert "Checkpoint 7 is complete, and no replacement came in time" in str(error)

    @pytest.mark.spec("R149")
    def test_lost_server_returns_in_time(self) -> None:
        worker = trained(worker_grace_s=20.0)
        ticket = worker.call(push({"w": ONES}))
        worker.view(member(S0, "lost"), cut=7)
        worker.wait(19.0)
        begin(worker)
        worker.wait(19.0)
        rejoin(worker)
        changed_at(worker, ticket)

    @pytest.mark.spec("R140")
    def test_where_no_return_is_possible_calls_end_and_the_next_ones_too(self) -> None:
        worker = trained()
        ticket = worker.call(push({"w": ONES}))
        begin(worker, phase="returning")
        waiting = worker.call(calls.AskStatus("kv"))
        worker.view(REPLACED, reason="no cut is complete", epoch=1, since=2, cut=0)
        for each in (ticket, waiting, worker.call(calls.AskStatus("kv"))):
            assert isinstance(worker.error(each), ServerLost)
            assert "no cut is complete" in str(worker.error(each))
        worker.wait(10.0)


def test_the_text_names_some_keys_and_counts_the_others() -> None:
    before = dict.fromkeys("abcde", 9)
    store_resync = StoreResync(before, 0, after=dict.fromkeys("abc", 7))
    error = epoch_changed(WorkerStore(opened(), 0, 1, 240.0), 4, store_resync)
    assert "('a' 9 -> 7, 'b' 9 -> 7, 'c' 9 -> 7 and 2 more)" in str(error)
    assert "(epoch 4)" in str(error)
    assert set(error.before) == set("abcde")
