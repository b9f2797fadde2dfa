"""How the ranks of a store have a checkpoint taken together, and return to one together."""

import pytest
import torch

from kvps.core.worker import calls
from kvps.dtypes import BY_NAME
from kvps.errors import ConfigError, StorageError, Timeout
from kvps.protocol.checkpoint import Checkpoint, Checkpointed, Revive, Revived
from kvps.protocol.membership import Barrier, Error, History, HistoryIs, Released
from kvps.protocol.stores import Declare, Declared, Find, Found, FoundAll, Piece, Place
from kvps.protocol.values import Pull, Pulled, Push, Stand
from tests.support.worker_harness import Bench, pull, push

FLOAT = BY_NAME["float32"].id
TAKE = calls.TakeCheckpoint("kv", "best")
RESTORE = calls.RestoreCheckpoint("kv", "best")


def bench(rank: int = 0, servers: int = 2) -> Bench:
    worker = Bench(servers=servers, rank=rank)
    worker.open()
    return worker


def meet(worker: Bench) -> None:
    """The barrier at which this rank stands is passed."""
    worker.scheduler(Released(worker.seqs(Barrier)[-1]))


def told(seq: int, restored: int = 0) -> HistoryIs:
    """A server knows of no call of all ranks, but perhaps of a checkpoint."""
    return HistoryIs(seq, 0, 0, 0, 0, 0.0, 0, joined=False, restored=restored)


class TestCheckpoint:
    def test_made_again_after_a_timeout_it_is_the_same_one(self) -> None:
        worker = bench()
        ticket = worker.call(TAKE, timeout_s=5.0)
        meet(worker)
        worker.wait(5.0)
        assert isinstance(worker.error(ticket), Timeout)
        assert "checkpoint() of store 'kv' is not done: not every server has written its snapshot" in str(
            worker.error(ticket)
        )
        again = worker.call(TAKE, timeout_s=5.0)
        worker.wait(5.0)
        assert isinstance(worker.error(again), Timeout)
        worker.scheduler(Checkpointed(worker.seqs(Checkpoint)[-1], 12))
        third = worker.call(TAKE)
        assert worker.is_done(third)
        assert worker.finish(third).value == 12  # type: ignore[union-attr]
        assert {message.number for message in worker.sent(Checkpoint)} == {1}


class TestRestore:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_other_calls_that_push_or_read_are_refused_until_it_has_returned(self, rank: int) -> None:
        worker = bench(rank)
        worker.init({"w": torch.zeros(1)})
        late = worker.call(RESTORE, timeout_s=5.0)
        worker.wait(5.0)
        assert isinstance(worker.error(late), Timeout)
        for call in (
            push({"w": torch.ones(1)}),
            pull({"w": torch.zeros(1)}),
            calls.RestoreCheckpoint("kv", ""),
        ):
            refused = worker.error(worker.call(call))
            assert isinstance(refused, ConfigError)
            assert "restore('best') of store 'kv' is under way and gives its keys other values" in str(
                refused
            )
            assert "If it has ended with Timeout, call restore('best') once more to wait on" in str(refused)
        assert not worker.sent(Push)
        restoring = worker.call(RESTORE)
        worker.scheduler(Error(worker.seqs(Barrier)[-1], ConfigError.code, "another call"))
        assert isinstance(worker.error(restoring), ConfigError)
        worker.call(push({"w": torch.ones(1)}))
        assert worker.sent(Push)

    def revive(self, worker: Bench, *cuts: tuple[int, ...], **versions: int) -> None:
        """Let each server say which cuts it has, each at version 5 unless it is named as cNUMBER=."""
        for server, some in enumerate(cuts):
            at = tuple(versions.get(f"c{cut}", 5) + 1 for cut in some)
            worker.server(server, Revived(worker.seqs(Revive, server)[-1], some, at))

    def restored(self, worker: Bench, tag: str, **versions: int) -> tuple[int, bool, str]:
        """Restore where these cuts are; return the one that was taken, and what is told of it."""
        ticket = worker.call(calls.RestoreCheckpoint("kv", tag))
        meet(worker)
        cuts = tuple(int(name[1:]) for name in versions)
        self.revive(worker, cuts, cuts, **versions)
        return self.finished(worker, ticket)

    def finished(self, worker: Bench, ticket: int) -> tuple[int, bool, str]:
        cut = worker.sent(Revive)[-1].cut
        self.revive(worker, (cut,), (cut,))
        meet(worker)
        for server in (0, 1):
            worker.server(server, told(worker.seqs(History, server)[-1], restored=cut))
        done = worker.finish(ticket)
        assert done is not None
        assert isinstance(done.value, calls.Restored)
        return done.value.cut, done.value.is_odd, done.value.told

    @pytest.mark.spec("R415")
    def test_checkpoint_without_pushes_is_passed_over(self) -> None:
        cut, is_odd, text = self.restored(bench(), "", c3=900, c4=1000, c6=0, c7=-1)
        assert (cut, is_odd) == (4, True)
        assert "checkpoint 4, at version 1000; passed over checkpoints [6, 7]" in text
        assert "older checkpoints: [3]" in text

    @pytest.mark.spec("R415")
    @pytest.mark.parametrize("tag", ["", "best"])
    def test_but_not_if_this_job_has_asked_for_it_or_it_has_the_tag(self, tag: str) -> None:
        worker = bench()
        if not tag:
            ticket = worker.call(TAKE)
            meet(worker)
            worker.scheduler(Checkpointed(worker.seqs(Checkpoint)[-1], 6))
            assert worker.is_done(ticket)
            for name in ("kvps.checkpoint", "kvps.restore"):
                worker.core.stores["kv"].barriers.pop(name, None)
        cut, is_odd, text = self.restored(worker, tag, c4=1000, c6=0)
        assert (cut, is_odd) == (6, True)
        assert "an older checkpoint is further: 4 (version 1000)" in text

    @pytest.mark.spec("R415")
    def test_where_there_is_no_other_it_is_taken(self) -> None:
        assert self.restored(bench(), "", c4=0, c6=0)[:2] == (6, False)
        assert self.restored(bench(), "", c4=-1, c6=-1)[:2] == (6, False)

    @pytest.mark.spec("R415")
    def test_unreadable_checkpoint_is_passed_over(self) -> None:
        worker = bench()
        ticket = worker.call(calls.RestoreCheckpoint("kv", ""))
        meet(worker)
        self.revive(worker, (3, 7), (3, 7))
        damaged = Error(worker.seqs(Revive, 1)[-1], StorageError.code, "damaged")
        worker.server(1, damaged)
        cut, is_odd, text = self.finished(worker, ticket)
        assert (cut, is_odd) == (3, True)
        assert "checkpoints [7] could not be read" in text

    @pytest.mark.spec("R415")
    @pytest.mark.parametrize(("tag", "cuts"), [("best", (3, 7)), ("", (7,))])
    def test_the_last_that_cannot_be_read_is_an_error(self, tag: str, cuts: tuple[int]) -> None:
        worker = bench()
        worker.call(calls.RestoreCheckpoint("kv", tag))
        meet(worker)
        self.revive(worker, cuts, cuts)
        worker.server(1, Error(worker.seqs(Revive, 1)[-1], StorageError.code, "damaged"))
        assert worker.sent(Barrier)[-1].code == StorageError.code

    @pytest.mark.spec("R147")
    def test_rank_0_takes_the_newest_that_all_servers_have(self) -> None:
        worker = bench()
        ticket = worker.call(RESTORE)
        assert worker.sent(Barrier) == [Barrier("kv", "kvps.restore", 0, what="restore('best')")]
        meet(worker)
        assert worker.sent(Revive) == [Revive("kv", "best", 0)] * 2
        self.revive(worker, (3, 7, 9), (3, 7))
        assert worker.sent(Revive)[2:] == [Revive("kv", "best", 7)] * 2
        self.revive(worker, (7,), (7,))
        assert worker.sent(Barrier)[1:] == [Barrier("kv", "kvps.restore", 1)]
        meet(worker)
        for server in (0, 1):
            worker.server(server, told(worker.seqs(History, server)[-1], restored=7))
        assert worker.is_done(ticket)
        assert worker.finish(ticket).value.cut == 7  # type: ignore[union-attr]

    @pytest.mark.parametrize(("tag", "what"), [("best", "with tag 'best'"), ("", "no checkpoint is")])
    @pytest.mark.spec("R229")
    def test_without_a_common_one_it_fails_for_all_who_wait_at_the_barrier(self, tag: str, what: str) -> None:
        worker = bench()
        ticket = worker.call(calls.RestoreCheckpoint("kv", tag))
        meet(worker)
        self.revive(worker, (3,), (4,))
        sent = worker.sent(Barrier)[-1]
        assert (sent.number, sent.code) == (1, StorageError.code)
        worker.scheduler(Error(worker.seqs(Barrier)[-1], sent.code, sent.text))
        assert isinstance(worker.error(ticket), StorageError)
        assert what in str(worker.error(ticket))
        assert "complete on all 2 servers" in str(worker.error(ticket))

    def test_failed_restore_raises_though_the_others_have_passed(self) -> None:
        """They were told before, by the scheduler that was there then."""
        worker = bench()
        ticket = worker.call(RESTORE)
        meet(worker)
        self.revive(worker, (3,), (4,))
        meet(worker)
        assert isinstance(worker.error(ticket), StorageError)

    @pytest.mark.spec("R143")
    def test_others_wait_for_it_and_all_count_from_what_the_servers_hold(self) -> None:
        worker = bench(rank=1, servers=1)
        worker.init({"w": torch.zeros(4), "new": torch.zeros(4)})
        for _ in range(3):
            worker.call(push({"w": torch.ones(4)}))
        worker.ack(0, *worker.seqs(Push))
        ticket = worker.call(RESTORE)
        meet(worker)
        assert not worker.sent(Revive)
        meet(worker)
        names = worker.sent(Find)[-1].keys
        found = tuple(Found(FLOAT, (4,), 2) if name == "w" else Found(0, ()) for name in names)
        worker.server(0, FoundAll(worker.seqs(Find)[-1], found))
        worker.server(0, Declared(worker.seqs(Declare)[-1], (Place(False, (Piece(9, 0, 4),)),)))
        assert worker.finish(ticket) is None
        worker.server(0, Pulled(worker.seqs(Pull)[-1], 9, FLOAT, False, (Stand(0, 4, 11, 11),)))
        worker.server(0, told(worker.seqs(History)[-1]))
        assert worker.is_done(ticket)
        store = worker.core.stores["kv"]
        assert set(store.keys) == {"w"}
        assert (store.key("w").number, store.key("w").broadcasts) == (11, 2)
        worker.call(push({"w": torch.ones(4)}))
        assert [run.number for run in worker.sent(Push)[-1].runs] == [11]
