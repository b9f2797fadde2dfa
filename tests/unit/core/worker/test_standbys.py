"""Jobs whose servers have standbys, as the worker's rules see them; tests/simulation has every moment of them."""

from dataclasses import replace

import pytest
import torch

from kvps import protocol as p
from kvps.core.server import options
from kvps.core.worker import calls
from kvps.core.worker.connection import Request
from kvps.core.worker.kept_pushes import KeptPushes
from kvps.errors import ServerLost, Timeout
from kvps.protocol.envelope import Message, Node, Role
from tests.simulation.cluster import Cluster
from tests.simulation.test_moves import drain, moved, moving_job, slowly
from tests.simulation.test_replicas import BEGIN_S, COPIED, job_of, lose_primary, train
from tests.simulation.training import ON_TIME, play_with
from tests.support.worker_harness import Bench, member, pull, push, values_of


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "CHUNK_BYTES_MIN", 1)


@pytest.mark.spec("R499", "R500")
@pytest.mark.parametrize("after_s", [0.002, 0.012, 0.02, 0.028, 0.036, 0.05, 0.07, 0.1])
def test_no_push_is_lost_with_a_server(after_s: float) -> None:
    def prepare(cluster: Cluster) -> None:
        cluster.network.at(BEGIN_S + after_s, lambda: lose_primary(cluster))

    play_with(job_of(has_optimizer=True), lambda *_: ON_TIME, COPIED, prepare)


@pytest.mark.spec("R470")
def test_a_worker_goes_on_with_the_next_holder_of_a_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvps.core.scheduler.standbys.GATHER_MAX_S", 0.0)
    job = moving_job()
    cluster = Cluster(2, 2, lambda rank: slowly(job, rank), 0, job.faults)
    drain(cluster)
    cluster.run(400)
    cluster.ended_well()
    assert moved(cluster) == [0]


@pytest.mark.spec("R500")
def test_a_server_without_a_level_standby_is_lost_as_ever() -> None:
    job = job_of()
    cluster = Cluster(2, 2, lambda rank: train(job, rank), 0, job.faults, replicas=1)

    def lose() -> None:
        for process in cluster.holders(0):
            if process is not None:
                cluster.network.kill(process)
        cluster.network.at(cluster.network.now + 3, lambda: cluster.start_server(0))

    cluster.network.at(BEGIN_S + 0.03, lose)
    cluster.run(400)
    for client in cluster.clients.values():
        with pytest.raises(ServerLost, match="lost"):
            raise client.error or AssertionError("it ended well")


def sent(message: Message) -> Request:
    """Return a request without a call, as those that are sent again."""
    request = Request(0, message)
    request.payload = (torch.tensor([1.0, 2.0]),)
    return request


@pytest.mark.spec("R499")
def test_pushes_are_kept_until_their_version_is_shown() -> None:
    kept = KeptPushes({})
    dense = p.Push(3, 1, (0,), 1.0, False, (p.Run(0, 2, 4),))
    later = p.Push(3, 1, (0,), 1.0, False, (p.Run(0, 2, 5),))
    rows = p.PushRows("kv", "r", 1, (0,), 4, 2, 1)
    for message in (later, dense, rows, p.Open("kv", "sync", 0, False, "wait", 9)):
        kept.acknowledged(sent(message), 4)
    asked = sent(p.Open("kv", "sync", 0, False, "wait", 9))
    kept.told(asked, p.Done(3))
    kept.told(asked, p.Pulled(1, 3, 1, True, (p.Stand(0, 1, 6, 6), p.Stand(1, 1, 4, 6))))
    found = list(kept.take(0))
    assert [request.message for request in found] == [dense, later, rows]
    assert all(request.owner is None for request in found)
    for request in found:
        kept.acknowledged(request, 5)
    assert [request.message for request in kept.take(0)] == [later]
    kept.acknowledged(sent(later), 5)
    kept.told(asked, p.Pulled(1, 3, 1, True, (p.Stand(0, 2, 6, 6),)))
    assert not list(kept.take(0))
    kept.acknowledged(sent(later), 5)
    kept.clear()
    assert not list(kept.take(0))


@pytest.mark.spec("R657")
def test_late_pushes_are_kept_until_the_version_that_the_server_told() -> None:
    kept = KeptPushes({})
    late = p.Push(3, 1, (0,), 1.0, False, (p.Run(0, 2, 4),), since=(4,))
    asking = p.Push(3, 1, (0,), 1.0, True, (p.Run(0, 2, 5),), since=(5,))
    in_time = p.Push(3, 1, (0,), 1.0, True, (p.Run(2, 2, 8),), since=(8,))
    stands = p.Stand(0, 1, 7, 6), p.Stand(1, 1, 9, 6)
    kept.acknowledged(sent(late), 7, 8)
    kept.told(sent(asking), p.Pulled(1, 3, 1, True, stands, due=9))
    kept.told(sent(in_time), p.Pulled(1, 3, 1, True, (p.Stand(2, 2, 9, 9),), due=9))
    found = list(kept.take(0))
    assert [request.message for request in found] == [late, replace(asking, pull=False)]
    for request, due in zip(found, (8, 9), strict=True):
        kept.acknowledged(request, 7, due)
    asked = sent(p.Pull(3, True, (p.Ask(0, 2, 0, 0),)))
    kept.told(asked, p.Pulled(1, 3, 1, True, (p.Stand(0, 2, 8, 8),)))
    assert [request.message for request in kept.take(0)] == [replace(asking, pull=False)]
    kept.acknowledged(sent(asking), 8, 9)
    kept.told(asked, p.Pulled(1, 3, 1, True, (p.Stand(0, 2, 9, 9),)))
    assert not list(kept.take(0))


@pytest.mark.spec("R657")
def test_bytes_of_a_late_push_with_values_outlive_its_answer() -> None:
    worker = Bench(servers=1, replicas=1)
    worker.open(late="next")
    worker.init({"w": torch.tensor([1.0, 2.0])})
    given = torch.tensor([3.0, 4.0])
    call = worker.call(push({"w": given}, sinks=(torch.zeros(2),)))
    (seq,) = worker.seqs(p.Push, 0)
    worker.server(0, p.Pulled(seq, 1, 1, True, (p.Stand(0, 2, 1, 1),), due=2), torch.tensor([5.0, 6.0]))
    assert worker.is_done(call)
    given.zero_()
    worker.view(NEXT)
    worker.server(0, p.Welcome(0, 1, 2, 1, promoted=True), life=5)
    again = worker.sends(p.Push)[-1].packet
    assert (again.message.runs[0].number, again.message.pull) == (0, False)  # type: ignore[attr-defined]
    assert values_of(worker.sends(p.Push)[-1]) == [3.0, 4.0]


@pytest.mark.spec("R448")
def test_pushes_of_tables_are_kept_until_the_version_of_each_is_shown() -> None:
    kept = KeptPushes({})
    both = p.PushTables((0,), (), (p.TablePart(7, 4, 1), p.TablePart(8, 9, 1)))
    first = p.PushTables((0,), (), (p.TablePart(7, 5, 1), p.TablePart(9, 3, 1)))
    kept.acknowledged(sent(both), 4)
    kept.acknowledged(sent(first), 12)  # it shows nothing of the second table
    asked = sent(p.PullTables((p.TablePart(8, 0, 1),)))
    kept.told(asked, p.PulledTables(1, (), (), (p.TableStand(9, 10),)))
    (found,) = kept.take(0)
    assert found.message == both
    kept.acknowledged(found, 5)
    kept.told(asked, p.PulledTables(1, (), (), (p.TableStand(10, 10),)))
    assert not list(kept.take(0))


NEXT = member(Node(Role.SERVER, 0), incarnation=5, endpoint="tcp://q:1")


def pushing() -> tuple[Bench, int]:
    """Return a worker whose push server 0 has taken in, and a call that waits for server 0's answer."""
    worker = Bench(servers=1, replicas=1)
    worker.open()
    worker.init({"w": torch.tensor([1.0, 2.0])})
    first = worker.call(push({"w": torch.tensor([3.0, 4.0])}))
    worker.ack(0, worker.seqs(p.Push, 0)[-1])
    assert worker.is_done(first)
    return worker, worker.call(push({"w": torch.tensor([5.0, 6.0])}))


@pytest.mark.spec("R499", "R500")
def test_a_promoted_standby_is_sent_again_what_was_taken_in() -> None:
    worker, call = pushing()
    over = worker.call(pull({"w": torch.zeros(2)}), 1.0)
    worker.view(NEXT)
    worker.wait(1.5)
    assert isinstance(worker.error(over), Timeout)
    before, pulls = len(worker.sends(p.Push)), len(worker.sends(p.Pull))
    worker.server(0, p.Welcome(0, 1, 2, 1, promoted=True), life=5)
    assert len(worker.sends(p.Pull)) == pulls, "nobody waits for it"
    again = worker.sends(p.Push)[before:]
    assert [send.packet.message.runs[0].number for send in again] == [0, 1]  # type: ignore[attr-defined]
    for send in again:
        worker.server(0, p.Ack((p.Receipt(send.packet.envelope.seq, 0),)), life=5)
    assert worker.is_done(call)


@pytest.mark.spec("R500")
@pytest.mark.parametrize("welcomes", [1, 2])
def test_an_empty_server_in_the_place_of_another_is_a_loss(welcomes: int) -> None:
    worker, call = pushing()
    worker.view(NEXT)
    assert worker.finish(call) is None, "it may have been the standby"
    for _ in range(welcomes):
        worker.server(0, p.Welcome(0, 1, 2, 1), life=5)
    error = worker.error(call)
    assert isinstance(error, ServerLost)
    assert "has replaced the server that this worker used, and is empty" in str(error)
    assert isinstance(worker.error(worker.call(push({"w": torch.tensor([5.0, 6.0])}))), ServerLost)


@pytest.mark.spec("R499")
def test_pushes_of_before_a_rollback_are_not_sent_again() -> None:
    worker, _ = pushing()
    worker.view(phase="returning", epoch=1)
    assert worker.core.table.kept is not None
    assert not list(worker.core.table.kept.take(0))


@pytest.mark.spec("R499")
def test_pushes_of_before_a_restore_are_not_sent_again() -> None:
    worker = Bench(rank=1, servers=1, replicas=1)
    for store in ("kv", "other"):
        worker.open(store)
        worker.init({"w": torch.tensor([1.0, 2.0])}, store)
        worker.call(replace(push({"w": torch.tensor([3.0, 4.0])}), store=store))
        worker.ack(0, worker.seqs(p.Push, 0)[-1])
    kept = worker.core.table.kept
    assert kept is not None
    kept.acknowledged(sent(p.PushTables((0,), (), (p.TablePart(1, 0, 1),))), 0)
    kept.acknowledged(sent(p.PushTables((0,), (), (p.TablePart(2, 0, 1),))), 0)
    kept.acknowledged(sent(p.PushRows("kv", "w", 1, (0,), 0, 2, 1)), 0)
    restore = worker.call(calls.RestoreCheckpoint("kv", "best"))
    for _ in range(2):
        worker.scheduler(p.Released(worker.seqs(p.Barrier)[-1]))
    worker.server(0, p.FoundAll(worker.seqs(p.Find, 0)[-1], (p.Found(1, (2,), 1),)))
    worker.server(0, p.Declared(worker.seqs(p.Declare, 0)[-1], (p.Place(False, (p.Piece(1, 0, 2),)),)))
    worker.server(0, p.Pulled(worker.seqs(p.Pull, 0)[-1], 1, 1, False, (p.Stand(0, 2, 3, 3),)))
    worker.server(0, p.HistoryIs(worker.seqs(p.History, 0)[-1], 0, 0, 0, 0, 0.0, 0, joined=False, restored=3))
    assert worker.finish(restore).value.cut == 3  # type: ignore[union-attr]
    chunks = [
        message.chunk if isinstance(message, p.Push) else message.parts[0].chunk
        for message in [request.message for request in kept.take(0)]
        if isinstance(message, p.Push | p.PushTables)
    ]
    assert chunks == [2, 2], "those of the other store"


@pytest.mark.spec("R499")
def test_pushes_of_rows_are_kept_by_store() -> None:
    kept = KeptPushes({})
    kept.acknowledged(sent(p.PushRows("kv", "r", 1, (0,), 0, 2, 1)), 0)
    kept.acknowledged(sent(p.PushRows("other", "r", 1, (0,), 7, 2, 1)), 7)
    stores = [request.message.store for request in kept.take(0)]  # type: ignore[union-attr]
    assert stores == ["kv", "other"]
