"""Calls under way: the values of their caller, requests that are sent again, late answers and refusals."""

import pytest
import torch

from kvps.core.effects import Copied, Effect, Exit
from kvps.core.optim.hyperparams import resolve
from kvps.core.worker import calls
from kvps.core.worker.call_table import LATE_MAX
from kvps.errors import ConfigError, Fenced, KvpsError, Mismatch, Overload, Timeout, WorkerLost
from kvps.protocol.envelope import WINDOW, Node, Role
from kvps.protocol.membership import (
    Barrier,
    Done,
    Error,
    Join,
    Joined,
    Pending,
    Probe,
    Probed,
    Released,
    Resume,
    Return,
    View,
    Welcome,
)
from kvps.protocol.stores import Open, Optimize, Rate
from kvps.protocol.values import Pull, Pulled, Push, Stand
from tests.support.worker_harness import Bench, Readable, member, opened, pull, push, values_of
from tests.support.worker_with_key import FLOAT, answer, small, step

W1 = Node(Role.WORKER, 1)


class TestValues:
    def test_of_an_eager_push_are_copied_before_the_caller_is_told(self) -> None:
        worker = small()
        worker.core.table.links[0].ready = False
        values = torch.ones(4)
        told: list[Effect] = []

        def overwrite(effect: Effect) -> None:
            told.append(effect)
            values.fill_(-1)

        worker.core.outbox.connect(overwrite)
        worker.core.on_call(99, push({"w": values}), worker.now + 9, worker.now)
        assert told == [Copied(99)]
        worker.core.outbox.connect(worker.effects.append)
        worker.server(0, Welcome(0, 1, 2, 1))
        assert values_of(worker.sends(Push)[0]) == [1, 1, 1, 1]

    @pytest.mark.parametrize("error", [Timeout, WorkerLost])
    def test_values_of_a_lazy_push_are_copied_when_its_call_fails(self, error: type[KvpsError]) -> None:
        """By its time limit, or by the loss of another worker: the push stands."""
        worker = small(on_worker_lost="fail")
        worker.core.table.links[0].ready = False
        values = torch.ones(4)
        ticket = worker.call(push({"w": values}, eager=False), 5.0)
        if error is Timeout:
            worker.wait(5.0)
        else:
            worker.view(member(W1, "lost"))
        assert isinstance(worker.error(ticket), error)
        values.fill_(-1)
        worker.server(0, Welcome(0, 1, 2, 1))
        assert values_of(worker.sends(Push)[0]) == [1, 1, 1, 1]

    @pytest.mark.parametrize("mode", ["async", "ssp"])
    def test_a_push_that_need_not_wait_for_room_ends_with_its_values(self, mode: str) -> None:
        """The window is full, and all that is in it has arrived."""
        worker = small(mode=mode)
        for _ in range(WINDOW):
            step(worker, "w")
        sink = torch.zeros(4)
        ticket = worker.call(push({"w": torch.ones(4)}, sinks=(sink,)))
        assert len(worker.sent(Push)) == WINDOW + 1
        answer(worker, worker.seqs(Push)[-1], 7.0, version=WINDOW + 1)
        assert worker.is_done(ticket)
        assert sink.tolist() == [7] * 4


class TestLent:
    def lent(self, count: int = 4) -> tuple[Bench, torch.Tensor]:
        """A bench, and memory of its worker that server 0 reads."""
        memory = Readable("server 0")
        worker = Bench(servers=1, memory=memory)
        worker.open()
        worker.init({"w": torch.zeros(count)})
        return worker, memory.empty(count, "float32")

    def test_may_be_where_the_values_go(self) -> None:
        """They come when the push has been read."""
        worker, row = self.lent()
        row.fill_(3)
        ticket = worker.call(push({"w": row}, sinks=(row,), eager=False))
        assert values_of(worker.sends(Push)[0]) == [3, 3, 3, 3]
        answer(worker, worker.seqs(Push)[0], 7.0)
        assert worker.is_done(ticket)
        assert row.tolist() == [7, 7, 7, 7]

    def test_is_the_callers_own_again_before_it_was_read_after_a_timeout(self) -> None:
        """If it still waited for room; what is lent is not copied, as empty_like() says."""
        worker, row = self.lent()
        for _ in range(64):
            worker.call(push({"w": row}))
        row.fill_(3)
        ticket = worker.call(push({"w": row}, eager=False), 5.0)
        worker.wait(5.0)
        assert isinstance(worker.error(ticket), Timeout)
        row.fill_(-1)
        worker.server(0, Pulled(worker.seqs(Pull)[0], 1, FLOAT, False, (Stand(0, 4, 1, 0),)))
        assert values_of(worker.sends(Push)[-1]) == [3, 3, 3, 3]


class TestCallsOfAllRanks:
    """They count when they succeed: made again after a Timeout, it is the same call."""

    CALLS = (
        (calls.StandAtBarrier("kv", "x"), Barrier),
        (calls.SetOptimizer("kv", resolve("test", {})), Optimize),
        (calls.SetRate("kv", 0.5), Rate),
    )

    def release(self, worker: Bench, cls: type[Barrier | Optimize | Rate]) -> None:
        (seq,) = worker.seqs(cls)[:1]
        if cls is Barrier:
            worker.scheduler(Released(seq))
        else:
            worker.server(0, Done(seq))

    @pytest.mark.spec("R121")
    def test_a_join_that_succeeds_late_says_who_was_last(self) -> None:
        worker = small()
        first = worker.call(calls.JoinStore("kv"), 1.0)
        worker.wait(0.9)
        (seq,) = worker.seqs(Join)
        worker.server(0, Probed((), (Pending(seq, "rank 1 has not joined"),)))
        worker.wait(0.1)
        assert "join() of store 'kv' is not done: rank 1 has not joined" in str(worker.error(first))
        assert isinstance(worker.error(worker.call(push({"w": torch.ones(4)}))), ConfigError)
        worker.server(0, Joined(seq, 1))
        worker.server(0, Done(worker.seqs(Return)[0]))
        (ask,) = worker.sends(Pull)
        stands = (Stand(0, 4, 7, 7),)
        worker.server(0, Pulled(ask.packet.envelope.seq, 1, FLOAT, False, stands))
        second = worker.finish(worker.call(calls.JoinStore("kv")))
        assert second is not None
        assert (second.value, second.error) == (1, None)
        worker.call(push({"w": torch.ones(4)}))
        assert worker.sent(Push)[-1].runs[0].number == 7

    def test_each_of_several_that_came_late_is_found(self) -> None:
        worker = small()
        for name in ("x", "y"):
            worker.call(calls.StandAtBarrier("kv", name), 1.0)
        worker.wait(1.0)
        for seq in dict.fromkeys(worker.seqs(Barrier)):
            worker.scheduler(Released(seq))
        assert worker.is_done(worker.call(calls.StandAtBarrier("kv", "y")))
        assert worker.is_done(worker.call(calls.StandAtBarrier("kv", "x")))

    def test_interrupted_call_is_that_which_is_made_again(self) -> None:
        worker = small()
        first = worker.call(calls.StandAtBarrier("kv", "x"))
        worker.take(worker.core.on_interrupt(first, worker.now))
        worker.wait(0.0)
        assert isinstance(worker.error(first), Timeout)
        worker.take(worker.core.on_interrupt(first, worker.now))  # again, before its caller has heard
        second = worker.call(calls.StandAtBarrier("kv", "x"))
        (seq,) = dict.fromkeys(worker.seqs(Barrier))
        worker.scheduler(Released(seq))
        assert worker.is_done(second)

    def test_late_answers_are_not_kept_for_ever(self) -> None:
        worker = small()
        for number in range(LATE_MAX + 5):
            worker.call(calls.StandAtBarrier("kv", str(number)), 1.0)
        worker.wait(1.0)
        for seq in worker.seqs(Barrier):
            worker.scheduler(Released(seq))
        assert len(worker.core.table._late) == LATE_MAX
        assert not worker.core.table.scheduler.outstanding
        assert not worker.core.table.pending


class TestProbes:
    @pytest.mark.spec("R39", "R41")
    def test_missing_push_is_sent_again_with_the_same_bytes(self) -> None:
        worker = small()
        values = torch.ones(4)
        worker.call(push({"w": values}, eager=False))
        values.fill_(9)
        assert not worker.sent(Probe)
        worker.wait(2.0)
        assert worker.sent(Probe) == [Probe(tuple(worker.seqs(Push)))]
        worker.server(0, Probed(tuple(worker.seqs(Push)), ()))
        first, again = worker.sends(Push)
        assert first.packet.envelope.seq == again.packet.envelope.seq
        assert first.packet.message == again.packet.message
        assert first.packet.payload == again.packet.payload
        worker.wait(4.0)
        assert len(worker.sent(Probe)) == 3, "until it is answered"
        worker.ack(0, *worker.seqs(Push)[:1])
        worker.server(0, Probed(tuple(worker.seqs(Push)[:1]), (Pending(worker.seqs(Push)[0], "late"),)))
        assert len(worker.sends(Push)) == 2
        worker.wait(4.0)
        assert len(worker.sent(Probe)) == 3

    def test_a_pending_push_is_in(self) -> None:
        """Its ACK was lost: those who wait for it need not wait for the values too."""
        worker = small()
        worker.call(push({"w": torch.ones(4)}, sinks=(torch.zeros(4),), eager=False))
        ticket = worker.call(calls.Flush("kv"))
        worker.wait(2.0)
        worker.server(0, Probed((), (Pending(worker.seqs(Push)[0], "round 0 waits for rank 1"),)))
        assert worker.is_done(ticket)
        worker.server(0, Probed((), (Pending(worker.seqs(Push)[0], "round 0 waits for rank 1"),)))

    def test_an_acknowledged_push_waits_for_its_values(self) -> None:
        worker = small()
        sink = torch.zeros(4)
        ticket = worker.call(push({"w": torch.ones(4)}, sinks=(sink,), eager=False))
        flush = worker.call(calls.Flush("kv"))
        (seq,) = worker.seqs(Push)
        worker.ack(0, seq, 999)
        assert worker.is_done(flush)
        assert worker.finish(ticket) is None
        answer(worker, seq, 7.0)
        assert worker.is_done(ticket)
        assert sink.tolist() == [7] * 4
        answer(worker, seq, 8.0)
        worker.ack(0, seq)
        assert sink.tolist() == [7] * 4, "a second answer is none"


class TestRefusals:
    def test_of_one_part_end_the_call_at_once(self) -> None:
        worker = Bench()
        worker.open()
        worker.init({"w": torch.zeros(40)})
        ticket = worker.call(push({"w": torch.zeros(40)}))
        worker.server(0, Error(worker.seqs(Push, 0)[0], Mismatch.code, "first"))
        worker.server(1, Error(worker.seqs(Push, 1)[0], Mismatch.code, "second"))
        assert str(worker.error(ticket)) == "first"

    def test_of_a_push_end_the_reads_of_its_keys_that_wait_for_it(self) -> None:
        worker = small()
        before = worker.call(pull({"w": torch.zeros(4)}))
        refused = worker.call(push({"w": torch.rand(4)}))
        barrier = worker.call(calls.StandAtBarrier("kv", None))
        after = [worker.call(pull({"w": torch.zeros(4)})), worker.call(calls.Versions("kv", ("w",)))]
        worker.server(0, Error(worker.seqs(Push)[0], Overload.code, "too much memory"))
        for ticket in [refused, *after]:
            assert isinstance(worker.error(ticket), Overload)
        assert (worker.finish(before), worker.finish(barrier)) == (None, None)
        again = worker.call(pull({"w": torch.zeros(4)}))
        assert worker.finish(again) is None, "its number is asked first"

    def test_of_the_other_parts_are_no_warnings(self) -> None:
        worker = Bench()
        worker.open()
        first = worker.call(calls.OpenStore("kv", opened(average=True), 1.0))
        asked = [worker.seqs(Open, server)[-1] for server in (0, 1)]
        for server in (0, 1):
            worker.server(server, Error(asked[server], Mismatch.code, "opened without average"))
        assert str(worker.error(first)) == "opened without average"
        assert [note for note in worker.notes() if "warning" in note] == []

    def test_of_nothing_we_know_are_logged(self) -> None:
        worker = small()
        worker.server(0, Error(0, KvpsError.code, "something"))
        worker.server(0, View(1, "running", "", ()))
        assert worker.notes()[-2:] == ["warning: something", "debug: unexpected View from 'server 0'"]

    @pytest.mark.spec("R21")
    def test_to_be_fenced_ends_all(self) -> None:
        worker = small()
        tickets = [worker.call(push({"w": torch.ones(4)})), worker.call(calls.StandAtBarrier("kv", None))]
        worker.server(0, Error(worker.seqs(Push)[0], Fenced.code, "worker 0 was replaced"))
        tickets.append(worker.call(pull({"w": torch.zeros(4)})))
        assert {type(worker.error(ticket)) for ticket in tickets} == {Fenced}
        assert worker.exits() == [Exit(1, "worker 0 was replaced")]

    @pytest.mark.spec("R21")
    def test_also_if_the_scheduler_was_asked_something_and_refuses_that(self) -> None:
        worker = small()
        tickets = [worker.call(calls.TakePlace("kv", ("w",)))]
        worker.server(0, Pulled(worker.seqs(Pull)[-1], 1, FLOAT, False, (Stand(0, 4, 0, 0),)))
        tickets.append(worker.call(push({"w": torch.ones(4)})))
        worker.scheduler(Error(worker.seqs(Resume)[0], Fenced.code, "worker 0 was replaced"))
        tickets.append(worker.call(pull({"w": torch.zeros(4)})))
        assert {type(worker.error(ticket)) for ticket in tickets} == {Fenced}
        assert worker.exits() == [Exit(1, "worker 0 was replaced")]
        assert worker.core.member.deadline() is None, "it beats no more"
