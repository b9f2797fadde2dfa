"""Calls that create keys: of which server they ask what, and who loads."""

import pytest
import torch

from kvps.core.placement import Part, home
from kvps.core.worker import calls
from kvps.core.worker.calls.keys import _located
from kvps.dtypes import Spec
from kvps.errors import Mismatch, Timeout
from kvps.protocol.membership import Barrier, Error, Released
from kvps.protocol.stores import Declare, Declared, Piece, Place
from kvps.protocol.values import Load, Pull, Pulled, Stand
from tests.support.worker_harness import Bench, pull, push, server_of, spec
from tests.support.worker_with_key import HOT, bench, chunk, pulled, ready


class TestInit:
    def test_a_key_is_not_known_before_its_value_is_in(self) -> None:
        """Else an init that is made again after a Timeout would be done too soon."""
        worker = bench()
        init = calls.Init("kv", (("w", spec(40)),), (HOT,))
        worker.call(init)
        for server in (0, 1):
            place = Place(True, (Piece(1, 0, (16, 24)[server]),))
            worker.server(server, Declared(worker.seqs(Declare, server)[0], (place,)))
        assert len(worker.sent(Load)) == 2
        again = worker.call(init)
        assert len(worker.sent(Declare)) == 4
        assert worker.finish(again) is None

    def test_a_known_key_is_left_alone(self) -> None:
        worker = ready()
        before = len(worker.effects)
        assert worker.is_done(worker.call(calls.Init("kv", (("w", spec(40)),), (HOT,))))
        other = worker.call(calls.Init("kv", (("w", spec(9)),), (HOT,)))
        assert isinstance(worker.error(other), Mismatch)
        assert "is float32[40] and cannot be initialised as float32[9]" in str(worker.error(other))
        assert len(worker.effects) == before + 2

    def test_a_key_without_elements_is_declared_too(self) -> None:
        worker = bench()
        worker.init({"nothing": torch.zeros(0)})
        assert worker.is_done(worker.call(push({"nothing": torch.zeros(0)})))
        assert worker.is_done(worker.call(pull({"nothing": torch.zeros(0)})))
        versions = worker.call(calls.Versions("kv", ("nothing",)))
        assert worker.finish(versions).value == [0]  # type: ignore[union-attr]


class TestBroadcast:
    def call(self, worker: Bench, value: torch.Tensor, sink: torch.Tensor) -> int:
        key = ("w", Spec("float32", tuple(value.shape)))
        return worker.call(calls.Broadcast("kv", (key,), (value,), (sink,)))

    def meet(self, worker: Bench) -> None:
        worker.scheduler(Released(worker.seqs(Barrier)[-1]))

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("mode", ["sync", "async"])
    def test_all_meet_and_read_the_value_of_rank_0(self, rank: int, mode: str) -> None:
        worker = ready(rank, mode=mode)
        sink = torch.zeros(40)
        ticket = self.call(worker, HOT, sink)
        before = len(worker.sent(Declare))
        self.meet(worker)
        assert [message.call for message in worker.sent(Declare)[before:]] == [1, 1]
        for server in (0, 1):
            place = Place(rank == 0, (Piece(chunk(worker, server), 0, (16, 24)[server]),))
            worker.server(server, Declared(worker.seqs(Declare, server)[-1], (place,)))
        assert len(worker.sent(Load)) == 2 * (rank == 0)
        for server in (0, 1):
            worker.ack(server, *worker.seqs(Load, server))
        for server in (0, 1):
            assert worker.sent(Pull, server)[0].runs[0].after == 0
            pulled(worker, worker.seqs(Pull, server)[0], server, 0, 6.0)
        assert sink.tolist() == [6.0] * 40
        if mode == "async":  # a push of another rank could move it before all have read it
            assert worker.finish(ticket) is None
            self.meet(worker)
        assert worker.is_done(ticket)
        assert worker.core.stores["kv"].key("w").broadcasts == 1

    @pytest.mark.spec("R392")
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_value_on_fewer_servers_is_told_to_the_others(self, rank: int) -> None:
        worker = ready(rank)
        self.call(worker, torch.tensor([6.0, 6.0]), torch.zeros(2))
        before = [len(worker.sent(Declare, server)) for server in (0, 1)]
        self.meet(worker)
        told = [worker.sent(Declare, server)[before[server] :] for server in (0, 1)]
        sizes = {
            server: [entry.size for message in messages for entry in message.entries]
            for server, messages in enumerate(told)
        }
        at = home("w", 2)
        assert sizes == {at: [2], 1 - at: [0] if rank == 0 else []}

    def test_failed_broadcast_may_be_made_again(self) -> None:
        worker = ready()
        ticket = self.call(worker, HOT, torch.zeros(40))
        self.meet(worker)
        worker.server(0, Error(worker.seqs(Declare, 0)[-1], Mismatch.code, "no"))
        assert isinstance(worker.error(ticket), Mismatch)
        self.call(worker, HOT, torch.zeros(40))
        # All were refused alike, and they meet for the next.
        assert [message.number for message in worker.sent(Barrier)] == [0, 1]
        self.meet(worker)
        assert [(sent.call, sent.refused) for sent in worker.sent(Declare, 0)] == [(0, 0), (1, 0), (1, 1)]

    def test_late_broadcast_counts_once_when_it_is_made_again(self) -> None:
        """By this count, values from before a broadcast are told from those after it."""
        worker = ready()
        key = ("w", Spec("float32", (40,)))
        call = calls.Broadcast("kv", (key,), (HOT,), (torch.zeros(40),))
        for again in range(2):
            ticket = worker.call(call, 5.0)
            self.meet(worker)
            for server in (0, 1):
                place = Place(again == 0, (Piece(chunk(worker, server), 0, (16, 24)[server]),))
                worker.server(server, Declared(worker.seqs(Declare, server)[-1], (place,)))
            if again == 0:
                for server in (0, 1):
                    worker.ack(server, *worker.seqs(Load, server))
            assert [message.broadcasts for message in worker.sent(Pull)[-2:]] == [1, 1]
            worker.wait(5.0)
            assert isinstance(worker.error(ticket), Timeout)
        assert worker.core.stores["kv"].broadcasts == 0


class TestRelay:
    """A broadcast of many values, which are read while they are loaded."""

    COUNT = 100_000
    KEYS = (("w", Spec("float32", (COUNT,))),)

    def begin(self, worker: Bench, timeout_s: float = 300.0) -> tuple[int, torch.Tensor]:
        value = torch.arange(float(self.COUNT)) if worker.rank == 0 else torch.zeros(self.COUNT)
        sink = torch.full((self.COUNT,), -1.0)
        ticket = worker.call(calls.Broadcast("kv", self.KEYS, (value,), (sink,)), timeout_s)
        worker.scheduler(Released(worker.seqs(Barrier)[-1]))
        return ticket, sink

    def declared(self, worker: Bench, *, fresh: bool = False, stamp: int = 1) -> None:
        for send in worker.sends(Declare)[-2:]:
            message = send.packet.message
            assert isinstance(message, Declare)
            (entry,) = message.entries
            server = server_of(send)
            assert server is not None
            place = Place(fresh, (Piece(4 + server, 0, entry.size),))
            worker.server(server, Declared(send.packet.envelope.seq, (place,), stamp))

    def answer(self, worker: Bench, begin: int, add: float = 0.0) -> None:
        """Answer the pulls from ``begin`` on with the value, to which something is added."""
        for send in worker.sends(Pull)[begin:]:
            pull, server = send.packet.message, server_of(send)
            assert isinstance(pull, Pull)
            assert server is not None
            stands = tuple(Stand(ask.start, ask.size, 0, 0) for ask in pull.runs)
            offset = 0 if server == 0 else self.COUNT - worker.sent(Declare, 1)[0].entries[0].size
            rows = [torch.arange(ask.start, ask.start + ask.size) + offset for ask in pull.runs]
            payload = (torch.cat(rows).float() + add,) if pull.values else ()
            seq = send.packet.envelope.seq
            worker.server(server, Pulled(seq, pull.chunk, 1, pull.values, stands), *payload)

    @pytest.mark.spec("R226")
    def test_others_read_part_by_part_and_ask_at_the_end(self) -> None:
        worker = bench(rank=1)
        ticket, sink = self.begin(worker)
        assert [message.early for message in worker.sent(Declare)] == [True, True]
        self.declared(worker)
        pulls = worker.sent(Pull)
        assert len(pulls) == 7
        assert {(pull.values, pull.call) for pull in pulls} == {(True, 1)}
        assert max(ask.size for pull in pulls for ask in pull.runs) == (64 << 10) // 4
        assert [message.early for message in worker.sent(Declare)] == [True, True, False, False]
        self.answer(worker, 0)
        assert torch.equal(sink, torch.arange(float(self.COUNT)))
        assert worker.finish(ticket) is None
        self.declared(worker)
        assert len(worker.sent(Pull)) == 7
        assert worker.is_done(ticket)
        assert worker.core.stores["kv"].key("w").broadcasts == 1

    @pytest.mark.spec("R226")
    def test_reader_of_two_lives_of_rank_0_reads_again(self) -> None:
        worker = bench(rank=1)
        ticket, sink = self.begin(worker)
        self.declared(worker)
        self.answer(worker, 0)
        self.declared(worker, stamp=2)
        assert [(pull.values, pull.call) for pull in worker.sent(Pull)[7:]] == [(True, None)] * 2
        self.answer(worker, 7, add=5.0)
        assert worker.is_done(ticket)
        assert torch.equal(sink, torch.arange(float(self.COUNT)) + 5)

    @pytest.mark.spec("R223")
    def test_rank_0_loads_part_by_part_and_reads_nothing(self) -> None:
        worker = bench()
        ticket, sink = self.begin(worker)
        self.declared(worker, fresh=True)
        seen = {0: 0, 1: 0}
        while any(len(worker.seqs(Load, server)) > seen[server] for server in seen):
            for server in seen:
                new = worker.seqs(Load, server)[seen[server] :]
                seen[server] += len(new)
                worker.ack(server, *new)
        loads = worker.sent(Load)
        assert len(loads) == 7
        assert sum(run.size for load in loads for run in load.runs) == self.COUNT
        assert not worker.sent(Pull)
        assert worker.is_done(ticket)
        assert torch.equal(sink, torch.arange(float(self.COUNT)))

    def test_rank_0_reads_what_its_predecessor_has_loaded(self) -> None:
        worker = bench()
        ticket, sink = self.begin(worker)
        self.declared(worker, fresh=False)
        assert not worker.sent(Load)
        assert [pull.values for pull in worker.sent(Pull)] == [True, True]
        self.answer(worker, 0, add=7.0)
        assert worker.is_done(ticket)
        assert sink[0] == 7


@pytest.mark.spec("R481")
def test_pieces_of_a_server_lie_in_its_parts_one_after_the_other() -> None:
    pieces = (Piece(5, 0, 4), Piece(6, 2, 6), Piece(7, 0, 3))
    parts = (Part(1, 10, 10), Part(1, 50, 3))
    assert [piece.offset for piece in _located(1, pieces, parts)] == [10, 14, 50]
