"""A worker: the way of a call from its beginning to its one end, whatever happens."""

from dataclasses import fields

import pytest
import torch

from kvps.core.effects import Connect, Exit
from kvps.core.worker import calls
from kvps.core.worker.call_table import LAG_MAX_S
from kvps.errors import KvpsError, SchedulerLost, Timeout, WorkerLost
from kvps.protocol.checkpoint import Halt, Halted, Proceed, Proceeding
from kvps.protocol.envelope import MESSAGES, WINDOW, Answer, Node, Role
from kvps.protocol.membership import (
    Barrier,
    Beat,
    Hello,
    Leave,
    Left,
    Pending,
    Ping,
    Pong,
    Probe,
    Probed,
    Released,
    Stop,
    View,
    Welcome,
)
from kvps.protocol.values import Pull, Pulled, Push, Stand
from tests.support.worker_harness import Bench, member, opened, pull, push
from tests.support.worker_with_key import FLOAT, small, step

W1 = Node(Role.WORKER, 1)


# --- joining --------------------------------------------------------------------------------------


class TestJoin:
    @pytest.mark.spec("R1", "R17")
    def test_connects_to_every_server_and_says_hello_each_second(self) -> None:
        worker = Bench(ready=False)
        assert [effect for effect in worker.effects if isinstance(effect, Connect)] == [
            Connect("scheduler", "tcp://sched:1"),
            Connect("server 0", "tcp://s0:1", is_near=False),
            Connect("server 1", "tcp://s1:1", is_near=False),
        ]
        assert [len(worker.sent(Hello, server)) for server in (0, 1)] == [1, 1]
        worker.wait(2.5)
        worker.server(0, Welcome(0, 1, 2, 2))
        worker.wait(2.5)
        assert [len(worker.sent(Hello, server)) for server in (0, 1)] == [3, 6]

    @pytest.mark.parametrize("reason", ["waiting for 1 of 2 workers (rank 1)"])
    def test_says_what_is_missing_when_it_takes_too_long(self, reason: str) -> None:
        worker = Bench(join=False)
        ticket = worker.join(5.0)
        worker.scheduler(Beat(0, reason))
        worker.wait(4.9)
        assert worker.finish(ticket) is None
        worker.wait(0.1)
        assert isinstance(worker.error(ticket), Timeout)
        assert str(worker.error(ticket)) == (
            f"the cluster is not complete: {reason}. Start the missing members, or expect "
            "fewer with kvps-scheduler --workers and --servers"
        )

    def test_says_so_when_the_scheduler_does_not_answer(self) -> None:
        worker = Bench(join=False)
        ticket = worker.join(5.0)
        worker.wait(5.0)
        assert "no answer from the scheduler at tcp://sched:1" in str(worker.error(ticket))

    @pytest.mark.spec("R24")
    def test_gives_up_after_a_minute(self) -> None:
        worker = Bench(join=False)
        ticket = worker.join()
        worker.wait(61.0)
        assert isinstance(worker.error(ticket), SchedulerLost)
        assert [exit.code for exit in worker.exits()] == [75]

    def test_ends_when_the_job_cannot_begin(self) -> None:
        worker = Bench(join=False)
        ticket = worker.join()
        worker.scheduler(Welcome(0, 21, 2, 2))
        worker.view(phase="ending", reason="worker 1 is gone")
        assert isinstance(worker.error(ticket), WorkerLost)
        assert "the job cannot continue: worker 1 is gone" in str(worker.error(ticket))

    def test_a_call_before_that_is_an_error(self) -> None:
        worker = Bench(join=False)
        ticket = worker.call(calls.OpenStore("kv", opened(), 1.0))
        assert "create(): no server has joined yet. Wait until" in str(worker.error(ticket))


# --- cuts -----------------------------------------------------------------------------------------


def two_keys(**options: object) -> Bench:
    """One server, and keys ``a`` and ``b`` in chunks of their own."""
    worker = Bench(servers=1)
    worker.open(**options)
    worker.init({"a": torch.zeros(4)})
    worker.init({"b": torch.zeros(4)})
    return worker


class TestHalting:
    @pytest.mark.spec("R130", "R131", "R133")
    def test_between_two_steps_the_next_one_waits(self) -> None:
        worker = two_keys()
        step(worker, "a", "b")
        worker.scheduler(Halt(3, {}))
        assert worker.sent(Halted) == [Halted(3, {"kv": 1}, True)]
        ticket = worker.call(push({"a": torch.ones(4)}))
        assert len(worker.sent(Push)) == 2
        worker.scheduler(Proceed(3))
        assert worker.sent(Proceeding) == [Proceeding(3, True)]
        worker.ack(0, worker.seqs(Push)[-1])
        assert worker.is_done(ticket)
        assert len(worker.sent(Push)) == 3

    def test_a_cut_that_overtakes_the_welcome_is_not_heard(self) -> None:
        """It has no name yet in which to answer, and is asked again."""
        worker = Bench(join=False)
        worker.scheduler(Halt(3, {}))
        worker.scheduler(Proceed(3))
        assert worker.sent(Halted) == worker.sent(Proceeding) == []

    @pytest.mark.spec("R91", "R131")
    def test_worker_probes_whether_its_pushes_are_in(self) -> None:
        """Values of an ssp store may wait for the push of one that stands already."""
        worker = two_keys(mode="ssp", staleness=1)
        ticket = worker.call(push({"a": torch.ones(4)}, sinks=(torch.zeros(4),)))
        worker.scheduler(Halt(3, {}))
        assert worker.sent(Halted) == [Halted(3, {}, False)]
        (seq,) = worker.seqs(Push)
        assert worker.sent(Probe) == [Probe((seq,))]
        worker.server(0, Probed((), (Pending(seq, "rank 0 is ahead"),)))
        assert worker.sent(Halted)[1:] == [Halted(3, {}, True)]
        assert worker.finish(ticket) is None

    @pytest.mark.spec("R131", "R132", "R134")
    def test_push_that_another_worker_waits_for_is_sent(self) -> None:
        """It has pushed ``a`` and waits for ours, before it pushes ``b``."""
        worker = two_keys()
        worker.scheduler(Halt(3, {}))
        ticket = worker.call(push({"a": torch.ones(4)}))
        behind = worker.call(pull({"a": torch.zeros(4)}))
        assert not worker.sent(Push)
        worker.scheduler(Halt(3, {"kv": 1}))
        worker.ack(0, *worker.seqs(Push))
        assert worker.is_done(ticket)
        assert len(worker.sent(Pull)) == 1
        assert worker.sent(Halted)[-1] == Halted(3, {"kv": 1}, False)
        step(worker, "b")
        assert worker.sent(Halted)[-1] == Halted(3, {"kv": 1}, True)
        assert worker.finish(behind) is None

    def test_a_push_that_waits_for_room_is_no_standing(self) -> None:
        worker = small()
        for _ in range(WINDOW):
            step(worker, "w")
        worker.call(push({"w": torch.ones(4)}))
        assert len(worker.sent(Push)) == WINDOW
        worker.scheduler(Halt(3, {}))
        assert [said.stands for said in worker.sent(Halted)] == [False]

    @pytest.mark.spec("R131")
    def test_worker_that_waits_for_a_checkpoint_stands(self) -> None:
        """Also where a key came late, and is one push behind at the end of every step."""
        worker = two_keys()
        step(worker, "a")
        ticket = worker.call(calls.TakeCheckpoint("kv", ""), timeout_s=5.0)
        worker.scheduler(Halt(3, {}))
        assert worker.sent(Halted) == [Halted(3, {"kv": 1}, True)]
        worker.scheduler(Proceed(3))
        worker.wait(5.0)
        assert isinstance(worker.error(ticket), Timeout)
        worker.scheduler(Halt(4, {}))
        assert worker.sent(Halted)[1:] == [Halted(4, {"kv": 1}, False)]

    @pytest.mark.spec("R133")
    def test_nobody_loses_his_patience_for_a_checkpoint(self) -> None:
        worker = small()
        worker.scheduler(Halt(3, {}))
        ticket = worker.call(push({"w": torch.ones(4)}), timeout_s=2.5)
        worker.wait(1.4)
        assert not worker.sent(Push)
        worker.wait(0.1)
        assert worker.sent(Proceeding) == [Proceeding(3, False)]
        worker.ack(0, *worker.seqs(Push))
        assert worker.is_done(ticket)
        worker.scheduler(Proceed(3))
        assert worker.sent(Proceeding)[1:] == [Proceeding(3, False)]

    @pytest.mark.spec("R133")
    def test_worker_stands_no_more_after_it_opens_a_store(self) -> None:
        """Another rank may have pushed to it, and wait in its step: the servers could take no image."""
        worker = Bench()
        worker.scheduler(Halt(3, {}))
        assert worker.sent(Halted) == [Halted(3, {}, True)]
        worker.open("async", mode="async")
        assert worker.sent(Proceeding) == []
        worker.open()
        assert worker.sent(Proceeding) == [Proceeding(3, False)]
        worker.scheduler(Halt(3, {"kv": 1}))  # said before that was heard
        assert len(worker.sent(Halted)) == 1
        worker.init({"w": torch.zeros(4)})
        worker.scheduler(Proceed(3))
        assert worker.sent(Proceeding)[1:] == [Proceeding(3, False)]

    @pytest.mark.parametrize("error", [WorkerLost, SchedulerLost])
    def test_a_held_call_ends_as_any_other(self, error: type[KvpsError]) -> None:
        worker = small(on_worker_lost="fail")
        worker.scheduler(Halt(3, {}))
        ticket = worker.call(push({"w": torch.ones(4)}))
        if error is WorkerLost:
            worker.view(member(W1, "lost"))
        else:
            worker.scheduler(Stop(0, "over"))
        assert isinstance(worker.error(ticket), error)


# --- losses ---------------------------------------------------------------------------------------


class TestLosses:
    def test_a_lost_worker_ends_calls_when_its_grace_is_over(self) -> None:
        worker = small(worker_grace_s=10.0)
        ticket = worker.call(calls.StandAtBarrier("kv", None))
        worker.view(member(W1, "lost", lost_for_s=3.0))
        worker.wait(6.9)
        assert worker.finish(ticket) is None
        worker.wait(0.1)
        assert isinstance(worker.error(ticket), WorkerLost)
        assert isinstance(worker.error(worker.call(calls.AskStatus("kv"))), WorkerLost)
        worker.view()
        again = worker.call(calls.StandAtBarrier("kv", None))
        assert [message.number for message in worker.sent(Barrier)][-1] == 0
        worker.scheduler(Released(worker.seqs(Barrier)[-1]))
        assert worker.is_done(again)

    def test_where_pushes_are_applied_one_by_one_nobody_waits_for_its_last(self) -> None:
        """It died with one part of its push sent; the other part may never come."""
        worker = Bench()
        for store, mode in (("kv", "async"), ("sync", "sync")):
            worker.open(store, mode=mode)
            worker.init({"w": torch.zeros(40)}, store)
        sinks = [torch.zeros(40), torch.zeros(40)]
        tickets = []
        for store, sink in zip(("kv", "sync"), sinks, strict=True):
            tickets.append(worker.call(calls.PullValues(store, ("w",), (sink,), 0, 0)))
            pieces = worker.core.stores[store].key("w").pieces
            for server, version in ((0, 5), (1, 4)):
                runs = (Stand(0, (16, 24)[server], version, 0),)
                seq = worker.seqs(Pull, server)[-1]
                values = torch.full(((16, 24)[server],), float(version))
                worker.server(server, Pulled(seq, pieces[server].chunk, FLOAT, True, runs), values)
        flush = worker.call(calls.Flush("kv"))
        assert worker.is_done(flush)
        assert [worker.finish(ticket) for ticket in tickets] == [None, None]
        worker.view(member(W1, "lost"))
        assert worker.is_done(tickets[0])
        assert sinks[0].tolist() == [5] * 16 + [4] * 24
        assert worker.finish(tickets[1]) is None
        assert worker.core.stores["kv"].is_short
        worker.open("later", mode="async")
        assert worker.core.stores["later"].is_short
        worker.view()
        assert not worker.core.stores["kv"].is_short

    @pytest.mark.parametrize("who", ["another", "this one", "nobody"])
    def test_nor_for_long_where_a_replacement_may_wait_itself(self, who: str) -> None:
        """It makes up for what its predecessor left out, and reads before."""
        worker = Bench()
        worker.open(mode="ssp")
        worker.init({"w": torch.zeros(40)})
        worker.core.stores["kv"].is_resumed = who == "this one"
        if who == "another":
            worker.view(member(W1, incarnation=99))
        sink = torch.zeros(40)
        ticket = worker.call(calls.PullValues("kv", ("w",), (sink,), 0, 0))
        pieces = worker.core.stores["kv"].key("w").pieces
        for server, version in ((0, 5), (1, 4)):
            size = (16, 24)[server]
            runs = (Stand(0, size, version, 0),)
            answer = Pulled(worker.seqs(Pull, server)[-1], pieces[server].chunk, FLOAT, True, runs)
            worker.server(server, answer, torch.full((size,), float(version)))
        worker.wait(LAG_MAX_S - 0.1)
        assert worker.finish(ticket) is None
        worker.wait(0.1)
        assert worker.is_done(ticket) == (who != "nobody")
        assert sink.tolist() == [5] * 16 + [4] * 24
        assert len(worker.sent(Pull)) == 3, "it is not asked for again"


# --- the scheduler --------------------------------------------------------------------------------


class TestScheduler:
    @pytest.mark.spec("R127")
    def test_a_late_barrier_names_who_is_missing(self) -> None:
        worker = small()
        ticket = worker.call(calls.StandAtBarrier("kv", "epoch"), 1.0)
        worker.wait(0.9)
        assert len(worker.sent(Barrier)) == 2  # it asks before it gives up
        (seq,) = set(worker.seqs(Barrier))
        worker.scheduler(Probed((), (Pending(seq, "waits for rank 1"), Pending(99, "of another"))))
        worker.wait(0.1)
        assert "is not done: number 0 of 'epoch' waits for rank 1. It" in str(worker.error(ticket))

    @pytest.mark.spec("R127")
    def test_barrier_without_a_number_is_named_by_its_place(self) -> None:
        worker = small()
        worker.core.stores["kv"].is_resumed = True
        ticket = worker.call(calls.StandAtBarrier("kv", "epoch"), 1.0)
        worker.wait(1.0)
        assert "not every worker has reached 'epoch' after round 0" in str(worker.error(ticket))

    def test_a_late_resume_waits_for_the_scheduler(self) -> None:
        worker = small()
        ticket = worker.call(calls.TakePlace("kv", ()), 1.0)
        worker.wait(1.0)
        assert "resume() of store 'kv' is not done: the scheduler has not answered" in str(
            worker.error(ticket)
        )

    def test_a_barrier_without_a_scheduler_is_its_loss(self) -> None:
        worker = small()
        ticket = worker.call(calls.StandAtBarrier("kv", None), 20.0)
        worker.wait(20.0)
        assert isinstance(worker.error(ticket), SchedulerLost)
        assert ("the scheduler at tcp://sched:1 has been silent for 20 s. Pushes and pulls continue") in str(
            worker.error(ticket)
        )

    @pytest.mark.spec("R100")
    def test_when_it_is_silent_the_servers_are_told_that_the_worker_lives(self) -> None:
        worker = Bench()
        worker.effects.clear()
        worker.wait(11.9)
        assert worker.sends(Hello) == []
        worker.wait(24.2)
        assert [send.to for send in worker.sends(Hello)] == 3 * ["server 0", "server 1"]
        worker.scheduler(Beat(0))
        worker.effects.clear()
        worker.wait(11.9)
        assert worker.sends(Hello) == []

    @pytest.mark.spec("R28")
    def test_an_old_view_changes_nothing(self) -> None:
        worker = small()
        ticket = worker.call(pull({"w": torch.zeros(4)}))
        worker.scheduler(View(1, "running", "", (member(Node(Role.SERVER, 0), "lost"),)))
        assert worker.finish(ticket) is None

    def test_leaving(self) -> None:
        worker = small()
        worker.take(worker.core.leave(True, 0, "done", True, worker.now))
        assert worker.sent(Leave) == [Leave(True, 0, True, "done")]
        assert not worker.exits()
        worker.scheduler(Left())
        assert worker.exits() == [Exit(0, "left")]

    def test_leaving_before_it_has_joined(self) -> None:
        worker = Bench(join=False)
        worker.take(worker.core.leave(False, 1, "interrupted", True, worker.now))
        assert worker.exits() == [Exit(0, "left before it had joined")]

    def test_a_broken_connection_is_no_news(self) -> None:
        worker = small()
        assert worker.take(worker.core.on_drop("server 0", worker.now)) == []


def test_every_answer_of_a_server_is_known_as_one() -> None:
    """One that is none would be dropped without a word, and its call would wait."""
    numbered = [item for item in MESSAGES.values() if "seq" in {each.name for each in fields(item)}]
    assert all(issubclass(item, Answer) for item in numbered)


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
    assert "create(): this job has no servers. Start kvps-launch with -s 1" in str(bench.error(ticket))


@pytest.mark.spec("R390")
def test_a_server_that_asks_is_told_for_how_long_values_were_under_way_to_it() -> None:
    worker = small()
    worker.call(push({"w": torch.ones(4)}), timeout_s=600.0)
    worker.now += 2.0
    worker.ack(0, worker.seqs(Push)[-1])
    worker.now += 5.0
    worker.effects.clear()
    worker.server(0, Ping(), seq=7)
    (pong,) = worker.sent(Pong, 0)
    assert pong.seq == 7
    assert pong.sending_s == 2.0
