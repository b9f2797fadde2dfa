"""A worker: the way of a call from its beginning to its one end, whatever happens."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from kvps.core.effects import Connect, Copied, Exit, Finish
from kvps.core.membership_client import Identity
from kvps.core.optim.hyperparams import resolve
from kvps.core.worker import calls, connection
from kvps.core.worker.call_table import LAG_MAX_S, LATE_MAX
from kvps.core.worker.worker import Worker
from kvps.dtypes import BY_NAME
from kvps.errors import (
    ConfigError,
    Fenced,
    KvpsError,
    Mismatch,
    SchedulerLost,
    ServerLost,
    Timeout,
    WorkerLost,
)
from kvps.protocol.checkpoint import Halt, Halted, Proceed, Proceeding
from kvps.protocol.envelope import MESSAGES, WINDOW, Answer, Node, Role
from kvps.protocol.membership import (
    Barrier,
    Beat,
    Done,
    Error,
    Hello,
    Join,
    Joined,
    Leave,
    Left,
    Pending,
    Ping,
    Pong,
    Probe,
    Probed,
    Released,
    Resume,
    Return,
    Stop,
    View,
    Welcome,
)
from kvps.protocol.stores import Declare, Declared, Open, Optimize, Piece, Place, Rate
from kvps.protocol.values import Ack, Pull, Pulled, Push, Stand
from tests.support.worker_harness import (
    Bench,
    Readable,
    member,
    opened,
    pull,
    push,
    sends,
    spec,
    values_of,
)

FLOAT = BY_NAME["float32"].id
W1 = Node(Role.WORKER, 1)


def small(**options: object) -> Bench:
    """One server, one key ``w`` of 4 elements in chunk 1."""
    one = Bench(servers=1)
    one.open(**options)
    one.init({"w": torch.zeros(4)})
    return one


def answer(one: Bench, seq: int, value: float, version: int = 1) -> None:
    answer = Pulled(seq, 1, FLOAT, True, (Stand(0, 4, version, 0),))
    one.server(0, answer, torch.full((4,), value))


# --- joining --------------------------------------------------------------------------------------


class TestJoin:
    def test_ends_when_the_cluster_is_complete(self) -> None:
        one = Bench(join=False)
        ticket = one.join()
        one.scheduler(Welcome(0, 21, 2, 2))
        assert one.finish(ticket) is None
        one.view()
        assert one.is_done(ticket)
        assert one.is_done(one.join())

    @pytest.mark.spec("R1", "R17")
    def test_connects_to_every_server_and_says_hello_each_second(self) -> None:
        one = Bench(ready=False)
        assert [effect for effect in one.effects if isinstance(effect, Connect)] == [
            Connect("scheduler", "tcp://sched:1"),
            Connect("server 0", "tcp://s0:1", is_near=False),
            Connect("server 1", "tcp://s1:1", is_near=False),
        ]
        assert [len(one.sent(Hello, server)) for server in (0, 1)] == [1, 1]
        one.wait(2.5)
        one.server(0, Welcome(0, 1, 2, 2))
        one.wait(2.5)
        assert [len(one.sent(Hello, server)) for server in (0, 1)] == [3, 6]

    @pytest.mark.parametrize("reason", ["waiting for 1 of 2 workers (rank 1)"])
    def test_says_what_is_missing_when_it_takes_too_long(self, reason: str) -> None:
        one = Bench(join=False)
        ticket = one.join(5.0)
        one.scheduler(Beat(0, reason))
        one.wait(4.9)
        assert one.finish(ticket) is None
        one.wait(0.1)
        assert isinstance(one.error(ticket), Timeout)
        assert str(one.error(ticket)) == (
            f"the cluster is not complete: {reason}. Start the missing members, or expect "
            "fewer with kvps-scheduler --workers and --servers"
        )

    def test_says_so_when_the_scheduler_does_not_answer(self) -> None:
        one = Bench(join=False)
        ticket = one.join(5.0)
        one.wait(5.0)
        assert "no answer from the scheduler at tcp://sched:1" in str(one.error(ticket))

    @pytest.mark.spec("R24")
    def test_gives_up_after_a_minute(self) -> None:
        one = Bench(join=False)
        ticket = one.join()
        one.wait(61.0)
        assert isinstance(one.error(ticket), SchedulerLost)
        assert [exit.code for exit in one.exits()] == [75]

    def test_ends_when_it_is_refused(self) -> None:
        one = Bench(join=False)
        ticket = one.join()
        one.scheduler(Error(0, ConfigError.code, "the job already has 2 workers"))
        assert isinstance(one.error(ticket), ConfigError)
        assert [exit.code for exit in one.exits()] == [78]

    def test_ends_when_the_job_cannot_begin(self) -> None:
        one = Bench(join=False)
        ticket = one.join()
        one.scheduler(Welcome(0, 21, 2, 2))
        one.view(phase="ending", reason="worker 1 is gone")
        assert isinstance(one.error(ticket), WorkerLost)
        assert "the job cannot continue: worker 1 is gone" in str(one.error(ticket))

    def test_ends_when_the_job_is_over(self) -> None:
        one = Bench(join=False)
        ticket = one.join()
        one.scheduler(Stop(1, "given up"))
        assert isinstance(one.error(ticket), SchedulerLost)
        assert one.exits() == [Exit(1, "given up")]

    def test_a_call_before_that_is_an_error(self) -> None:
        one = Bench(join=False)
        ticket = one.call(calls.OpenStore("kv", opened(), 1.0))
        assert "create(): no server has joined yet. Wait until" in str(one.error(ticket))

    def test_a_job_without_servers_has_no_stores(self) -> None:
        one = Bench(servers=0)
        assert one.is_done(one.join())
        error = one.error(one.call(calls.OpenStore("kv", opened(), 1.0)))
        assert isinstance(error, ConfigError)
        assert "this job has no servers. Start kvps-launch with -s 1" in str(error)

    def test_a_view_that_overtakes_the_welcome_waits_for_the_next(self) -> None:
        one = Bench(join=False)
        one.view()
        assert not one.sent(Hello, 0)
        one.scheduler(Welcome(0, 21, 2, 2))
        one.view()
        assert one.sent(Hello, 0)


# --- the caller's memory --------------------------------------------------------------------------


class TestValues:
    def test_of_an_eager_push_are_copied_before_the_caller_is_told(self) -> None:
        one = small()
        one.core.table.links[0].ready = False
        values = torch.ones(4)
        for effect in one.core.on_call(99, push({"w": values}), one.now + 9, one.now):
            assert effect == Copied(99)
            values.fill_(-1)
        one.server(0, Welcome(0, 1, 2, 1))
        assert values_of(one.sends(Push)[0]) == [1, 1, 1, 1]

    def test_of_a_lazy_push_are_read_when_they_are_sent(self) -> None:
        one = small()
        one.core.table.links[0].ready = False
        values = torch.ones(4)
        ticket = one.call(push({"w": values}, eager=False))
        values.fill_(5)
        one.server(0, Welcome(0, 1, 2, 1))
        assert values_of(one.sends(Push)[0]) == [5, 5, 5, 5]
        assert not one.is_copied(ticket)

    def test_of_a_lazy_push_are_copied_at_its_timeout(self) -> None:
        one = small()
        one.core.table.links[0].ready = False
        values = torch.ones(4)
        ticket = one.call(push({"w": values}, eager=False), 5.0)
        one.wait(5.0)
        assert isinstance(one.error(ticket), Timeout)
        values.fill_(-1)
        one.server(0, Welcome(0, 1, 2, 1))
        assert values_of(one.sends(Push)[0]) == [1, 1, 1, 1]

    def test_also_while_it_waits_for_room(self) -> None:
        one = small()
        for _ in range(64):
            one.call(push({"w": torch.zeros(4)}))
        values = torch.ones(4)
        ticket = one.call(push({"w": values}, eager=False), 5.0)
        one.wait(5.0)
        assert isinstance(one.error(ticket), Timeout)
        values.fill_(-1)
        one.server(0, Pulled(one.seqs(Pull)[0], 1, FLOAT, False, (Stand(0, 4, 1, 0),)))
        assert values_of(one.sends(Push)[-1]) == [1, 1, 1, 1]

    def test_of_an_init_that_timed_out_are_those_of_the_call(self) -> None:
        one = Bench(servers=1)
        one.open()
        values = torch.ones(4)
        ticket = one.call(calls.Init("kv", (("w", spec(4)),), (values,)), 5.0)
        one.wait(5.0)
        assert isinstance(one.error(ticket), Timeout)
        values.fill_(-1)
        place = Place(True, (Piece(1, 0, 4),))
        effects = one.server(0, Declared(one.seqs(Declare)[0], (place,)))
        assert values_of(sends(effects, type(effects[0].packet.message))[0]) == [1] * 4  # type: ignore[union-attr]

    def test_are_copied_when_a_call_fails_with_something_to_send(self) -> None:
        """Another worker's loss ends the call; the push stands."""
        one = small(on_worker_lost="fail")
        one.core.table.links[0].ready = False
        values = torch.ones(4)
        ticket = one.call(push({"w": values}, eager=False))
        one.view(member(W1, "lost"))
        assert isinstance(one.error(ticket), WorkerLost)
        values.fill_(-1)
        one.server(0, Welcome(0, 1, 2, 1))
        assert values_of(one.sends(Push)[0]) == [1, 1, 1, 1]

    @pytest.mark.parametrize("mode", ["async", "ssp"])
    def test_a_push_that_need_not_wait_for_room_ends_with_its_values(self, mode: str) -> None:
        """The window is full, and all that is in it has arrived."""
        one = small(mode=mode)
        for _ in range(WINDOW):
            step(one, "w")
        sink = torch.zeros(4)
        ticket = one.call(push({"w": torch.ones(4)}, sinks=(sink,)))
        assert len(one.sent(Push)) == WINDOW + 1
        answer(one, one.seqs(Push)[-1], 7.0, version=WINDOW + 1)
        assert one.is_done(ticket)
        assert sink.tolist() == [7] * 4


# --- what the servers can read --------------------------------------------------------------------


class TestLent:
    def lent(self, count: int = 4) -> tuple[Bench, torch.Tensor]:
        """A bench, and memory of its worker that server 0 reads."""
        memory = Readable("server 0")
        one = Bench(servers=1, memory=memory)
        one.open()
        one.init({"w": torch.zeros(count)})
        return one, memory.empty(count, "float32")

    def test_takes_nothing_of_the_window(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connection, "WINDOW_BYTES", 16)
        monkeypatch.setattr(connection, "UPLINK_BYTES", 16)
        one, row = self.lent()
        for _ in range(10):
            one.call(push({"w": row}))
        assert len(one.sent(Push)) == 10
        one, _ = self.lent()
        one.core._memory.routes = ()  # type: ignore[attr-defined]
        for _ in range(10):
            one.call(push({"w": row}))
        assert len(one.sent(Push)) == 1, "and what has to be sent does"

    def test_is_sent_again_as_it_is(self) -> None:
        one, row = self.lent()
        row.fill_(3)
        one.call(push({"w": row}))
        (seq,) = one.seqs(Push)
        effects = one.server(0, Probed((seq,), ()))
        assert [values_of(send) for send in sends(effects, Push)] == [[3, 3, 3, 3]]
        one.ack(0, seq)
        assert not one.core.table.links[0].outstanding

    def test_may_be_where_the_values_go(self) -> None:
        """They come when the push has been read."""
        one, row = self.lent()
        row.fill_(3)
        ticket = one.call(push({"w": row}, sinks=(row,), eager=False))
        assert values_of(one.sends(Push)[0]) == [3, 3, 3, 3]
        answer(one, one.seqs(Push)[0], 7.0)
        assert one.is_done(ticket)
        assert row.tolist() == [7, 7, 7, 7]

    def test_is_the_callers_own_again_before_it_was_read_after_a_timeout(self) -> None:
        """If it still waited for room; what is lent is not copied, as empty_like() says."""
        one, row = self.lent()
        for _ in range(64):
            one.call(push({"w": row}))
        row.fill_(3)
        ticket = one.call(push({"w": row}, eager=False), 5.0)
        one.wait(5.0)
        assert isinstance(one.error(ticket), Timeout)
        row.fill_(-1)
        one.server(0, Pulled(one.seqs(Pull)[0], 1, FLOAT, False, (Stand(0, 4, 1, 0),)))
        assert values_of(one.sends(Push)[-1]) == [3, 3, 3, 3]

    def test_is_let_go_with_the_answer(self) -> None:
        one, row = self.lent()
        one.call(push({"w": row}))
        (request,) = one.core.table.links[0].outstanding.values()
        assert request.payload
        one.ack(0, *one.seqs(Push))
        assert not request.payload
        assert request.fill is None


# --- Timeout --------------------------------------------------------------------------------------


class TestTimeout:
    def test_names_what_the_servers_wait_for(self) -> None:
        one = small()
        ticket = one.call(pull({"w": torch.zeros(4)}), 5.0)
        (seq,) = one.seqs(Pull)
        one.wait(4.75)
        assert one.sent(Probe)[-1] == Probe((seq,)), "asked once more, just before"
        reason = "key 'w': round 0 waits for a push of rank 1"
        one.server(0, Probed((), (Pending(seq, reason),)))
        one.wait(0.25)
        assert isinstance(one.error(ticket), Timeout)
        assert str(one.error(ticket)) == (
            f"worker 0: pull() of store 'kv' is not done: {reason}. Nothing was changed. Call it "
            "again, or give a longer timeout="
        )

    def test_of_a_push_cancels_nothing(self) -> None:
        one = small()
        sink = torch.zeros(4)
        ticket = one.call(push({"w": torch.ones(4)}, sinks=(sink,), eager=False), 5.0)
        one.wait(5.0)
        assert "push() of store 'kv' is not done: server 0 (tcp://s0:1) has not answered, " in str(
            one.error(ticket)
        )
        assert "Nothing was cancelled: it is still under way, and is done at most once" in str(
            one.error(ticket)
        )
        effects = one.server(0, Probed(tuple(one.seqs(Push)), ()))
        assert sends(effects, Push) == one.sends(Push)[:1], "it is still sent again"
        answer(one, one.seqs(Push)[0], 3.0)
        assert sink.tolist() == [0, 0, 0, 0], "the caller's memory is his own again"
        assert one.core.stores["kv"].key("w").applied == 1, "and the next push knows"
        assert not one.sent(Probe)[3:]
        one.wait(10.0)
        assert len(one.sent(Probe)) <= 3

    def test_of_a_pull_gives_it_up(self) -> None:
        one = small()
        one.core.table.links[0].ready = False
        sink = torch.zeros(4)
        unsent = one.call(pull({"w": sink}), 5.0)
        one.wait(5.0)
        one.server(0, Welcome(0, 1, 2, 1))
        assert isinstance(one.error(unsent), Timeout)
        assert not one.sent(Pull)
        one.call(pull({"w": sink}), 5.0)
        one.wait(5.0)
        answer(one, one.seqs(Pull)[0], 3.0)
        assert sink.tolist() == [0, 0, 0, 0]
        probes = len(one.sent(Probe))
        one.wait(10.0)
        assert len(one.sent(Probe)) == probes, "nobody asks after it"

    def test_of_a_resume_does_not_number_behind_its_callers_back(self) -> None:
        one = small()
        ticket = one.call(calls.ResumeKeys("kv", ("w",)), 5.0)
        one.wait(5.0)
        assert isinstance(one.error(ticket), Timeout)
        one.call(push({"w": torch.ones(4)}))
        one.server(0, Pulled(one.seqs(Pull)[0], 1, FLOAT, False, (Stand(0, 4, 0, 0),)))
        assert one.core.stores["kv"].key("w").number == 1

    def test_of_a_flush_names_who_has_not_acknowledged(self) -> None:
        one = small()
        one.call(push({"w": torch.ones(4)}))
        ticket = one.call(calls.Flush("kv"), 5.0)
        one.wait(5.0)
        assert (
            "worker 0: the flush of earlier pushes of store 'kv' is not done: server 0 "
            "(tcp://s0:1) has not answered, and was last heard from 5.0 s ago"
        ) in str(one.error(ticket))
        one.ack(0, *one.seqs(Push))

    def test_tells_of_a_server_that_does_not_answer_hello(self) -> None:
        one = Bench(servers=1, ready=False)
        first = one.call(calls.OpenStore("kv", opened(), 1.0), 2.0)
        one.wait(2.0)
        assert "server 0 (tcp://s0:1) has not answered HELLO." in str(one.error(first))
        one.server(0, Error(0, Mismatch.code, "another cluster"))
        second = one.call(calls.OpenStore("kv", opened(), 1.0), 2.0)
        one.wait(2.0)
        assert "HELLO: another cluster." in str(one.error(second))

    def test_lists_three_reasons_at_most(self) -> None:
        one = Bench(servers=5, ready=False)
        ticket = one.call(calls.OpenStore("kv", opened(), 1.0), 2.0)
        one.wait(2.0)
        assert str(one.error(ticket)).count("has not answered HELLO") == 3
        assert "HELLO and 2 more. Nothing" in str(one.error(ticket))

    def test_a_failure_after_it_is_logged(self) -> None:
        one = small()
        one.call(push({"w": torch.ones(4)}, eager=False), 5.0)
        one.wait(5.0)
        one.server(0, Error(one.seqs(Push)[0], ConfigError.code, "no optimizer"))
        assert one.notes()[-1] == "warning: push() failed after its Timeout: no optimizer"
        one.call(push({"w": torch.ones(4)}))
        assert one.sent(Pull), "its number is asked for"


class TestCallsOfAllRanks:
    """They count when they succeed: made again after a Timeout, it is the same call."""

    CALLS = (
        (calls.StandAtBarrier("kv", "x"), Barrier),
        (calls.SetOptimizer("kv", resolve("test", {})), Optimize),
        (calls.SetRate("kv", 0.5), Rate),
    )

    def release(self, one: Bench, cls: type[Barrier | Optimize | Rate]) -> None:
        (seq,) = one.seqs(cls)[:1]
        if cls is Barrier:
            one.scheduler(Released(seq))
        else:
            one.server(0, Done(seq))

    @pytest.mark.parametrize(("call", "cls"), CALLS)
    def test_repeated_call_waits_again(
        self, call: calls.Call, cls: type[Barrier | Optimize | Rate]
    ) -> None:
        one = small()
        first = one.call(call, 1.0)
        one.wait(1.0)
        assert "It still stands. Call it again to wait on" in str(one.error(first))
        second = one.call(call, 1.0)
        one.wait(0.5)
        assert len(set(one.seqs(cls))) == 1
        self.release(one, cls)
        assert one.is_done(second)

    @pytest.mark.parametrize(("call", "cls"), CALLS)
    def test_or_was_passed_meanwhile(
        self, call: calls.Call, cls: type[Barrier | Optimize | Rate]
    ) -> None:
        one = small()
        one.call(call, 1.0)
        one.wait(1.0)
        self.release(one, cls)
        assert one.is_done(one.call(call))
        assert one.finish(one.call(call)) is None, "the one after that is the next"
        assert len(set(one.seqs(cls))) == 2

    @pytest.mark.spec("R121")
    def test_a_join_that_succeeds_late_says_who_was_last(self) -> None:
        one = small()
        first = one.call(calls.JoinStore("kv"), 1.0)
        one.wait(0.9)
        (seq,) = one.seqs(Join)
        one.server(0, Probed((), (Pending(seq, "rank 1 has not joined"),)))
        one.wait(0.1)
        assert "join() of store 'kv' is not done: rank 1 has not joined" in str(one.error(first))
        assert isinstance(one.error(one.call(push({"w": torch.ones(4)}))), ConfigError)
        one.server(0, Joined(seq, 1))
        one.server(0, Done(one.seqs(Return)[0]))
        (ask,) = one.sends(Pull)
        stands = (Stand(0, 4, 7, 7),)
        one.server(0, Pulled(ask.packet.envelope.seq, 1, FLOAT, False, stands))
        second = one.finish(one.call(calls.JoinStore("kv")))
        assert second is not None
        assert (second.value, second.error) == (1, None)
        one.call(push({"w": torch.ones(4)}))
        assert one.sent(Push)[-1].runs[0].number == 7

    def test_another_is_another(self) -> None:
        one = small()
        one.call(calls.StandAtBarrier("kv", "x"), 1.0)
        one.wait(1.0)
        one.call(calls.StandAtBarrier("kv", "y"))
        assert [message.name for message in dict.fromkeys(one.sent(Barrier))] == ["x", "y"]

    def test_each_of_several_that_came_late_is_found(self) -> None:
        one = small()
        for name in ("x", "y"):
            one.call(calls.StandAtBarrier("kv", name), 1.0)
        one.wait(1.0)
        for seq in dict.fromkeys(one.seqs(Barrier)):
            one.scheduler(Released(seq))
        assert one.is_done(one.call(calls.StandAtBarrier("kv", "y")))
        assert one.is_done(one.call(calls.StandAtBarrier("kv", "x")))

    def test_late_answers_are_not_kept_for_ever(self) -> None:
        one = small()
        for number in range(LATE_MAX + 5):
            one.call(calls.StandAtBarrier("kv", str(number)), 1.0)
        one.wait(1.0)
        for seq in one.seqs(Barrier):
            one.scheduler(Released(seq))
        assert len(one.core.table._late) == LATE_MAX
        assert not one.core.table.asked
        assert not one.core.table.pending


# --- requests -------------------------------------------------------------------------------------


class TestProbes:
    @pytest.mark.spec("R39", "R41")
    def test_missing_push_is_sent_again_with_the_same_bytes(self) -> None:
        one = small()
        values = torch.ones(4)
        one.call(push({"w": values}, eager=False))
        values.fill_(9)
        assert not one.sent(Probe)
        one.wait(2.0)
        assert one.sent(Probe) == [Probe(tuple(one.seqs(Push)))]
        one.server(0, Probed(tuple(one.seqs(Push)), ()))
        first, again = one.sends(Push)
        assert first.packet.envelope.seq == again.packet.envelope.seq
        assert first.packet.message == again.packet.message
        assert first.packet.payload == again.packet.payload
        one.wait(4.0)
        assert len(one.sent(Probe)) == 3, "until it is answered"
        one.ack(0, *one.seqs(Push)[:1])
        one.server(0, Probed(tuple(one.seqs(Push)[:1]), (Pending(one.seqs(Push)[0], "late"),)))
        assert len(one.sends(Push)) == 2
        one.wait(4.0)
        assert len(one.sent(Probe)) == 3

    def test_a_pending_push_is_in(self) -> None:
        """Its ACK was lost: those who wait for it need not wait for the values too."""
        one = small()
        one.call(push({"w": torch.ones(4)}, sinks=(torch.zeros(4),), eager=False))
        ticket = one.call(calls.Flush("kv"))
        one.wait(2.0)
        one.server(0, Probed((), (Pending(one.seqs(Push)[0], "round 0 waits for rank 1"),)))
        assert one.is_done(ticket)
        one.server(0, Probed((), (Pending(one.seqs(Push)[0], "round 0 waits for rank 1"),)))

    def test_an_acknowledged_push_waits_for_its_values(self) -> None:
        one = small()
        sink = torch.zeros(4)
        ticket = one.call(push({"w": torch.ones(4)}, sinks=(sink,), eager=False))
        flush = one.call(calls.Flush("kv"))
        (seq,) = one.seqs(Push)
        one.ack(0, seq, 999)
        assert one.is_done(flush)
        assert one.finish(ticket) is None
        answer(one, seq, 7.0)
        assert one.is_done(ticket)
        assert sink.tolist() == [7] * 4
        answer(one, seq, 8.0)
        one.ack(0, seq)
        assert sink.tolist() == [7] * 4, "a second answer is none"

    def test_a_barrier_is_asked_for_again_every_two_seconds(self) -> None:
        one = small()
        one.call(calls.StandAtBarrier("kv", None))
        one.wait(5.0)
        assert one.seqs(Barrier) == [1, 1, 1]
        one.scheduler(Released(1))
        one.scheduler(Released(1))
        one.wait(5.0)
        assert len(one.sent(Barrier)) == 3


class TestRefusals:
    def test_end_their_call_and_no_other(self) -> None:
        one = small()
        refused, other = one.call(push({"w": torch.ones(4)})), one.call(calls.AskStatus("kv"))
        effects = one.server(0, Error(one.seqs(Push)[0], Mismatch.code, "dtype"))
        assert [type(one.error(refused)), one.finish(other)] == [Mismatch, None]
        assert one.is_copied(refused), "it had returned already: the next call will say so"
        assert effects == [Finish(refused, error=one.error(refused))]

    def test_of_one_part_end_the_call_at_once(self) -> None:
        one = Bench()
        one.open()
        one.init({"w": torch.zeros(40)})
        ticket = one.call(push({"w": torch.zeros(40)}))
        one.server(0, Error(one.seqs(Push, 0)[0], Mismatch.code, "first"))
        one.server(1, Error(one.seqs(Push, 1)[0], Mismatch.code, "second"))
        assert str(one.error(ticket)) == "first"

    def test_let_those_go_on_who_wait_for_pushes(self) -> None:
        one = small()
        one.call(push({"w": torch.ones(4)}))
        flush = one.call(calls.Flush("kv"))
        one.server(0, Error(one.seqs(Push)[0], Mismatch.code, "dtype"))
        assert one.is_done(flush)

    def test_of_the_other_parts_are_no_warnings(self) -> None:
        one = Bench()
        one.open()
        first = one.call(calls.OpenStore("kv", opened(average=True), 1.0))
        asked = [one.seqs(Open, server)[-1] for server in (0, 1)]
        for server in (0, 1):
            one.server(server, Error(asked[server], Mismatch.code, "opened without average"))
        assert str(one.error(first)) == "opened without average"
        assert [note for note in one.notes() if "warning" in note] == []

    def test_of_nothing_we_know_are_logged(self) -> None:
        one = small()
        one.server(0, Error(0, KvpsError.code, "something"))
        one.server(0, View(1, "running", "", ()))
        assert one.notes()[-2:] == [
            "warning: something",
            "debug: unexpected View from 'server 0'",
        ]

    @pytest.mark.spec("R21")
    def test_to_be_fenced_ends_all(self) -> None:
        one = small()
        tickets = [one.call(push({"w": torch.ones(4)})), one.call(calls.StandAtBarrier("kv", None))]
        one.server(0, Error(one.seqs(Push)[0], Fenced.code, "worker 0 was replaced"))
        tickets.append(one.call(pull({"w": torch.zeros(4)})))
        assert {type(one.error(ticket)) for ticket in tickets} == {Fenced}
        assert one.exits() == [Exit(1, "worker 0 was replaced")]

    def test_also_by_the_scheduler(self) -> None:
        one = small()
        ticket = one.call(push({"w": torch.ones(4)}))
        one.scheduler(Error(0, Fenced.code, "worker 0 was replaced"))
        assert isinstance(one.error(ticket), Fenced)
        assert one.exits() == [Exit(1, "worker 0 was replaced")]

    @pytest.mark.spec("R21")
    def test_also_if_the_scheduler_was_asked_something_and_refuses_that(self) -> None:
        one = small()
        tickets = [one.call(calls.ResumeKeys("kv", ("w",)))]
        one.server(0, Pulled(one.seqs(Pull)[-1], 1, FLOAT, False, (Stand(0, 4, 0, 0),)))
        tickets.append(one.call(push({"w": torch.ones(4)})))
        one.scheduler(Error(one.seqs(Resume)[0], Fenced.code, "worker 0 was replaced"))
        tickets.append(one.call(pull({"w": torch.zeros(4)})))
        assert {type(one.error(ticket)) for ticket in tickets} == {Fenced}
        assert one.exits() == [Exit(1, "worker 0 was replaced")]
        assert one.core.member.deadline() is None, "it beats no more"


# --- cuts -----------------------------------------------------------------------------------------


def two_keys(**options: object) -> Bench:
    """One server, and keys ``a`` and ``b`` in chunks of their own."""
    one = Bench(servers=1)
    one.open(**options)
    one.init({"a": torch.zeros(4)})
    one.init({"b": torch.zeros(4)})
    return one


def step(one: Bench, *names: str) -> None:
    """Push each of these keys, and let the server take it in."""
    for name in names:
        ticket = one.call(push({name: torch.ones(4)}))
        one.ack(0, one.seqs(Push)[-1])
        assert one.is_done(ticket)


class TestHalting:
    @pytest.mark.spec("R130", "R131", "R133")
    def test_between_two_steps_the_next_one_waits(self) -> None:
        one = two_keys()
        step(one, "a", "b")
        one.scheduler(Halt(3, {}))
        assert one.sent(Halted) == [Halted(3, {"kv": 1}, True)]
        ticket = one.call(push({"a": torch.ones(4)}))
        assert len(one.sent(Push)) == 2
        one.scheduler(Proceed(3))
        assert one.sent(Proceeding) == [Proceeding(3, True)]
        one.ack(0, one.seqs(Push)[-1])
        assert one.is_done(ticket)
        assert len(one.sent(Push)) == 3

    def test_a_cut_that_overtakes_the_welcome_is_not_heard(self) -> None:
        """It has no name yet in which to answer, and is asked again."""
        one = Bench(join=False)
        one.scheduler(Halt(3, {}))
        one.scheduler(Proceed(3))
        assert one.sent(Halted) == one.sent(Proceeding) == []

    @pytest.mark.spec("R131")
    def test_worker_stands_when_all_its_pushes_are_acknowledged(self) -> None:
        one = two_keys()
        step(one, "b")
        one.call(push({"a": torch.ones(4)}))
        one.scheduler(Halt(3, {}))
        assert one.sent(Halted) == [Halted(3, {"kv": 1}, False)]
        one.ack(0, one.seqs(Push)[-1])
        assert one.sent(Halted)[1:] == [Halted(3, {"kv": 1}, True)]
        one.scheduler(Halt(3, {}))  # the answer may be lost
        assert one.sent(Halted)[2:] == [Halted(3, {"kv": 1}, True)]

    @pytest.mark.spec("R91", "R131")
    def test_worker_probes_whether_its_pushes_are_in(self) -> None:
        """Values of an ssp store may wait for the push of one that stands already."""
        one = two_keys(mode="ssp", staleness=1)
        ticket = one.call(push({"a": torch.ones(4)}, sinks=(torch.zeros(4),)))
        one.scheduler(Halt(3, {}))
        assert one.sent(Halted) == [Halted(3, {}, False)]
        (seq,) = one.seqs(Push)
        assert one.sent(Probe) == [Probe((seq,))]
        one.server(0, Probed((), (Pending(seq, "rank 0 is ahead"),)))
        assert one.sent(Halted)[1:] == [Halted(3, {}, True)]
        assert one.finish(ticket) is None

    @pytest.mark.spec("R131", "R132", "R134")
    def test_push_that_another_worker_waits_for_is_sent(self) -> None:
        """It has pushed ``a`` and waits for ours, before it pushes ``b``."""
        one = two_keys()
        one.scheduler(Halt(3, {}))
        ticket = one.call(push({"a": torch.ones(4)}))
        behind = one.call(pull({"a": torch.zeros(4)}))
        assert not one.sent(Push)
        one.scheduler(Halt(3, {"kv": 1}))
        one.ack(0, *one.seqs(Push))
        assert one.is_done(ticket)
        assert len(one.sent(Pull)) == 1
        assert one.sent(Halted)[-1] == Halted(3, {"kv": 1}, False)
        step(one, "b")
        assert one.sent(Halted)[-1] == Halted(3, {"kv": 1}, True)
        assert one.finish(behind) is None

    def test_worker_in_the_middle_of_a_step_stands_at_its_end(self) -> None:
        one = two_keys()
        step(one, "a")
        one.scheduler(Halt(3, {}))
        step(one, "b")
        assert one.sent(Halted) == [Halted(3, {"kv": 1}, False), Halted(3, {"kv": 1}, True)]

    def test_creation_by_rank_0_ends_before_it_stands(self) -> None:
        one = small()
        ticket = one.call(calls.SetOptimizer("kv", resolve("sgd", {"lr": 0.1})))
        one.scheduler(Halt(3, {}))
        assert [said.stands for said in one.sent(Halted)] == [False]
        one.server(0, Done(one.seqs(Optimize)[-1]))
        assert one.is_done(ticket)
        assert [said.stands for said in one.sent(Halted)] == [False, True]

    def test_a_push_that_waits_for_room_is_no_standing(self) -> None:
        one = small()
        for _ in range(WINDOW):
            step(one, "w")
        one.call(push({"w": torch.ones(4)}))
        assert len(one.sent(Push)) == WINDOW
        one.scheduler(Halt(3, {}))
        assert [said.stands for said in one.sent(Halted)] == [False]

    @pytest.mark.spec("R131")
    def test_worker_that_waits_for_a_checkpoint_stands(self) -> None:
        """Also where a key came late, and is one push behind at the end of every step."""
        one = two_keys()
        step(one, "a")
        ticket = one.call(calls.TakeCheckpoint("kv", ""), timeout_s=5.0)
        one.scheduler(Halt(3, {}))
        assert one.sent(Halted) == [Halted(3, {"kv": 1}, True)]
        one.scheduler(Proceed(3))
        one.wait(5.0)
        assert isinstance(one.error(ticket), Timeout)
        one.scheduler(Halt(4, {}))
        assert one.sent(Halted)[1:] == [Halted(4, {"kv": 1}, False)]

    @pytest.mark.spec("R133")
    def test_nobody_loses_his_patience_for_a_checkpoint(self) -> None:
        one = small()
        one.scheduler(Halt(3, {}))
        ticket = one.call(push({"w": torch.ones(4)}), timeout_s=2.5)
        one.wait(1.4)
        assert not one.sent(Push)
        one.wait(0.1)
        assert one.sent(Proceeding) == [Proceeding(3, False)]
        one.ack(0, *one.seqs(Push))
        assert one.is_done(ticket)
        one.scheduler(Proceed(3))
        assert one.sent(Proceeding)[1:] == [Proceeding(3, False)]

    @pytest.mark.spec("R133")
    def test_worker_stands_no_more_after_it_opens_a_store(self) -> None:
        """Another rank may have pushed to it, and wait in its step: the servers could take no image."""
        one = Bench()
        one.scheduler(Halt(3, {}))
        assert one.sent(Halted) == [Halted(3, {}, True)]
        one.open("async", mode="async")
        assert one.sent(Proceeding) == []
        one.open()
        assert one.sent(Proceeding) == [Proceeding(3, False)]
        one.scheduler(Halt(3, {"kv": 1}))  # said before that was heard
        assert len(one.sent(Halted)) == 1
        one.init({"w": torch.zeros(4)})
        one.scheduler(Proceed(3))
        assert one.sent(Proceeding)[1:] == [Proceeding(3, False)]

    @pytest.mark.parametrize("error", [WorkerLost, SchedulerLost])
    def test_a_held_call_ends_as_any_other(self, error: type[KvpsError]) -> None:
        one = small(on_worker_lost="fail")
        one.scheduler(Halt(3, {}))
        ticket = one.call(push({"w": torch.ones(4)}))
        if error is WorkerLost:
            one.view(member(W1, "lost"))
        else:
            one.scheduler(Stop(0, "over"))
        assert isinstance(one.error(ticket), error)


# --- losses ---------------------------------------------------------------------------------------


class TestLosses:
    def test_a_lost_server_ends_pending_and_later_calls(self) -> None:
        one = Bench()
        one.open()
        one.open("async", mode="async")
        tickets = [one.call(calls.AskStatus("kv")), one.call(calls.StandAtBarrier("async", None))]
        one.view(member(Node(Role.SERVER, 1), "lost"))
        tickets.append(one.call(calls.AskStatus("kv")))
        tickets.append(one.join())
        assert {type(one.error(ticket)) for ticket in tickets} == {ServerLost}
        one.wait(5.0)
        assert len(one.sent(Barrier)) == 1, "nobody stands there any more"

    def test_a_lost_worker_ends_calls_when_its_grace_is_over(self) -> None:
        one = small(worker_grace_s=10.0)
        ticket = one.call(calls.StandAtBarrier("kv", None))
        one.view(member(W1, "lost", lost_for_s=3.0))
        one.wait(6.9)
        assert one.finish(ticket) is None
        one.wait(0.1)
        assert isinstance(one.error(ticket), WorkerLost)
        assert isinstance(one.error(one.call(calls.AskStatus("kv"))), WorkerLost)
        one.view()
        again = one.call(calls.StandAtBarrier("kv", None))
        assert [message.number for message in one.sent(Barrier)][-1] == 0
        one.scheduler(Released(one.seqs(Barrier)[-1]))
        assert one.is_done(again)

    def test_pushes_that_were_made_stand(self) -> None:
        one = small(on_worker_lost="fail")
        one.call(push({"w": torch.ones(4)}))
        one.view(member(W1, "lost"))
        one.wait(3.0)
        one.server(0, Probed(tuple(one.seqs(Push)), ()))
        assert len(one.sends(Push)) == 2
        one.ack(0, one.seqs(Push)[0])

    def test_where_pushes_are_applied_one_by_one_nobody_waits_for_its_last(self) -> None:
        """It died with one part of its push sent; the other part may never come."""
        one = Bench()
        for store, mode in (("kv", "async"), ("sync", "sync")):
            one.open(store, mode=mode)
            one.init({"w": torch.zeros(40)}, store)
        sinks = [torch.zeros(40), torch.zeros(40)]
        tickets = []
        for store, sink in zip(("kv", "sync"), sinks, strict=True):
            tickets.append(one.call(calls.PullValues(store, ("w",), (sink,), 0, 0)))
            pieces = one.core.stores[store].key("w").pieces
            for server, version in ((0, 5), (1, 4)):
                runs = (Stand(0, (16, 24)[server], version, 0),)
                seq = one.seqs(Pull, server)[-1]
                values = torch.full(((16, 24)[server],), float(version))
                one.server(server, Pulled(seq, pieces[server].chunk, FLOAT, True, runs), values)
        flush = one.call(calls.Flush("kv"))
        assert one.is_done(flush)
        assert [one.finish(ticket) for ticket in tickets] == [None, None]
        one.view(member(W1, "lost"))
        assert one.is_done(tickets[0])
        assert sinks[0].tolist() == [5] * 16 + [4] * 24
        assert one.finish(tickets[1]) is None
        assert one.core.stores["kv"].is_short
        one.open("later", mode="async")
        assert one.core.stores["later"].is_short
        one.view()
        assert not one.core.stores["kv"].is_short

    @pytest.mark.parametrize("who", ["another", "this one", "nobody"])
    def test_nor_for_long_where_a_replacement_may_wait_itself(self, who: str) -> None:
        """It makes up for what its predecessor left out, and reads before: where staleness is bounded,
        that may wait for this worker."""
        one = Bench()
        one.open(mode="ssp")
        one.init({"w": torch.zeros(40)})
        one.core.stores["kv"].is_resumed = who == "this one"
        if who == "another":
            one.view(member(W1, incarnation=99))
        sink = torch.zeros(40)
        ticket = one.call(calls.PullValues("kv", ("w",), (sink,), 0, 0))
        pieces = one.core.stores["kv"].key("w").pieces
        for server, version in ((0, 5), (1, 4)):
            size = (16, 24)[server]
            runs = (Stand(0, size, version, 0),)
            answer = Pulled(one.seqs(Pull, server)[-1], pieces[server].chunk, FLOAT, True, runs)
            one.server(server, answer, torch.full((size,), float(version)))
        one.wait(LAG_MAX_S - 0.1)
        assert one.finish(ticket) is None
        one.wait(0.1)
        assert one.is_done(ticket) == (who != "nobody")
        assert sink.tolist() == [5] * 16 + [4] * 24
        assert len(one.sent(Pull)) == 3, "it is not asked for again"


# --- the scheduler --------------------------------------------------------------------------------


class TestScheduler:
    def test_a_late_barrier_says_how_the_job_stands(self) -> None:
        one = small()
        ticket = one.call(calls.StandAtBarrier("kv", "epoch"), 5.0)
        one.wait(4.9)
        one.scheduler(Beat(0, "worker 1 is lost (exit code 9)"))
        one.wait(0.1)
        assert str(one.error(ticket)) == (
            "worker 0: barrier() of store 'kv' is not done: not every worker has reached number 0 of "
            "'epoch' (worker 1 is lost (exit code 9)). It still stands. Call it again "
            "to wait on, or give a longer timeout="
        )

    @pytest.mark.spec("R127")
    def test_a_late_barrier_names_who_is_missing(self) -> None:
        one = small()
        ticket = one.call(calls.StandAtBarrier("kv", "epoch"), 1.0)
        one.wait(0.9)
        assert len(one.sent(Barrier)) == 2  # it asks before it gives up
        (seq,) = set(one.seqs(Barrier))
        one.scheduler(Probed((), (Pending(seq, "waits for rank 1"), Pending(99, "of another"))))
        one.wait(0.1)
        assert "is not done: number 0 of 'epoch' waits for rank 1. It" in str(one.error(ticket))

    @pytest.mark.spec("R127")
    def test_barrier_without_a_number_is_named_by_its_place(self) -> None:
        one = small()
        one.core.stores["kv"].is_resumed = True
        ticket = one.call(calls.StandAtBarrier("kv", "epoch"), 1.0)
        one.wait(1.0)
        assert "not every worker has reached 'epoch' after round 0" in str(one.error(ticket))

    def test_a_late_resume_waits_for_the_scheduler(self) -> None:
        one = small()
        ticket = one.call(calls.ResumeKeys("kv", ()), 1.0)
        one.wait(1.0)
        assert "resume() of store 'kv' is not done: the scheduler has not answered" in str(
            one.error(ticket)
        )

    def test_a_barrier_without_a_scheduler_is_its_loss(self) -> None:
        one = small()
        ticket = one.call(calls.StandAtBarrier("kv", None), 20.0)
        one.wait(20.0)
        assert isinstance(one.error(ticket), SchedulerLost)
        assert (
            "the scheduler at tcp://sched:1 has been silent for 20 s. Pushes and pulls continue"
        ) in str(one.error(ticket))

    @pytest.mark.spec("R100")
    def test_when_it_is_silent_the_servers_are_told_that_the_worker_lives(self) -> None:
        one = Bench()
        one.effects.clear()
        one.wait(11.9)
        assert one.sends(Hello) == []
        one.wait(24.2)
        assert [send.to for send in one.sends(Hello)] == 3 * ["server 0", "server 1"]
        one.scheduler(Beat(0))
        one.effects.clear()
        one.wait(11.9)
        assert one.sends(Hello) == []

    def test_silence_of_the_scheduler_does_not_end_a_pull(self) -> None:
        one = small()
        ticket = one.call(pull({"w": torch.zeros(4)}))
        one.wait(100.0)
        answer(one, one.seqs(Pull)[0], 1.0)
        assert one.is_done(ticket)

    def test_a_stop_ends_all(self) -> None:
        one = small()
        ticket = one.call(pull({"w": torch.zeros(4)}))
        one.scheduler(Stop(1, "given up"))
        assert "the job is over: given up" in str(one.error(ticket))
        assert one.exits() == [Exit(1, "given up")]

    @pytest.mark.spec("R28")
    def test_an_old_view_changes_nothing(self) -> None:
        one = small()
        ticket = one.call(pull({"w": torch.zeros(4)}))
        one.scheduler(View(1, "running", "", (member(Node(Role.SERVER, 0), "lost"),)))
        assert one.finish(ticket) is None

    def test_leaving(self) -> None:
        one = small()
        one.take(one.core.leave(True, 0, "done"))
        assert one.sent(Leave) == [Leave(True, 0, True, "done")]
        assert not one.exits()
        one.scheduler(Left())
        assert one.exits() == [Exit(0, "left")]

    def test_leaving_before_it_has_joined(self) -> None:
        one = Bench(join=False)
        one.take(one.core.leave(False, 1, "interrupted"))
        assert one.exits() == [Exit(0, "left before it had joined")]

    def test_a_broken_connection_is_no_news(self) -> None:
        one = small()
        assert one.take(one.core.on_drop("server 0", one.now)) == []

    def test_packets_of_other_workers_are_not_for_here(self) -> None:
        one = small()
        core = one.core
        packet = core.member.packet(Ack(()))
        assert one.take(core.on_packet("server 0", packet, one.now)) == []


def test_progress_is_what_the_user_asks_for() -> None:
    one = small()
    before = one.core.member.progress
    one.call(calls.AskStatus("kv"))
    one.wait(1.0)
    assert one.sent(Beat)[-1].progress == before + 1


@pytest.mark.spec("R29")
def test_waiting_or_computing_worker_beats_on_and_says_which() -> None:
    one = small()
    one.effects.clear()
    ticket = one.call(push({"w": torch.ones(4)}), timeout_s=600.0)
    one.wait(60.0)
    waiting = one.sent(Beat)
    assert len(waiting) >= 59
    assert {beat.reason for beat in waiting[1:]} == {"push()"}
    one.ack(0, one.seqs(Push)[-1])
    assert one.is_done(ticket)
    one.effects.clear()
    one.wait(60.0)  # a long backward pass
    computing = one.sent(Beat)
    assert len(computing) >= 59
    assert {(beat.progress, beat.reason) for beat in computing} == {(waiting[-1].progress, "")}


def test_nothing_is_due_for_one_that_has_left_and_waits_for_nothing() -> None:
    one = Bench(servers=1)
    one.scheduler(Left())
    assert one.core.deadline() is None
    assert Worker(Identity(Role.WORKER, "tcp://s:1", "h", 1, "kvps"), 5.0).deadline() == 5.0


def test_every_answer_of_a_server_is_known_as_one() -> None:
    """One that is none would be dropped without a word, and its call would wait."""
    numbered = [one for one in MESSAGES.values() if "seq" in {each.name for each in fields(one)}]
    assert all(issubclass(one, Answer) for one in numbered)


def test_a_lost_worker_that_nobody_waits_for_is_no_deadline() -> None:
    due = []
    for policy in ("shrink", "wait"):
        bench = Bench()
        bench.open(on_worker_lost=policy, worker_grace_s=0.5)
        bench.init({"w": torch.zeros(4)})
        bench.call(push({"w": torch.zeros(4)}))
        bench.view(member(W1, "lost"))
        due.append(bench.core.deadline() == bench.now + 0.5)
    assert due == [False, True]


def test_a_job_without_servers_is_complete_and_refuses_calls() -> None:
    bench = Bench(servers=0)
    assert bench.is_done(bench.join())
    assert bench.core.deadline() == bench.now + 1.0, "the next beat, and no HELLO"
    ticket = bench.call(calls.OpenStore("kv", opened(), 60.0))
    assert "create(): this job has no servers. Start kvps-launch with -s 1" in str(
        bench.error(ticket)
    )


@pytest.mark.spec("R390")
def test_a_server_that_asks_is_told_for_how_long_values_were_under_way_to_it() -> None:
    one = small()
    one.call(push({"w": torch.ones(4)}), timeout_s=600.0)
    one.now += 2.0
    one.ack(0, one.seqs(Push)[-1])
    one.now += 5.0
    one.effects.clear()
    one.server(0, Ping(), seq=7)
    (pong,) = one.sent(Pong, 0)
    assert pong.seq == 7
    assert pong.sending_s == 2.0
