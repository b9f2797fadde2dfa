"""A worker: the way of a call from its beginning to its one end, whatever happens."""

from dataclasses import fields

import pytest
import torch

from kvps.core.effects import Connect, Exit
from kvps.core.worker import calls
from kvps.core.worker.call_table import LAG_MAX_S
from kvps.errors import ConfigError, KvpsError, SchedulerLost, Timeout, WorkerLost
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

    def test_ends_when_the_job_cannot_begin(self) -> None:
        one = Bench(join=False)
        ticket = one.join()
        one.scheduler(Welcome(0, 21, 2, 2))
        one.view(phase="ending", reason="worker 1 is gone")
        assert isinstance(one.error(ticket), WorkerLost)
        assert "the job cannot continue: worker 1 is gone" in str(one.error(ticket))

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


# --- cuts -----------------------------------------------------------------------------------------


def two_keys(**options: object) -> Bench:
    """One server, and keys ``a`` and ``b`` in chunks of their own."""
    one = Bench(servers=1)
    one.open(**options)
    one.init({"a": torch.zeros(4)})
    one.init({"b": torch.zeros(4)})
    return one


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
        """It makes up for what its predecessor left out, and reads before."""
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
        assert "resume() of store 'kv' is not done: the scheduler has not answered" in str(one.error(ticket))

    def test_a_barrier_without_a_scheduler_is_its_loss(self) -> None:
        one = small()
        ticket = one.call(calls.StandAtBarrier("kv", None), 20.0)
        one.wait(20.0)
        assert isinstance(one.error(ticket), SchedulerLost)
        assert ("the scheduler at tcp://sched:1 has been silent for 20 s. Pushes and pulls continue") in str(
            one.error(ticket)
        )

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

    @pytest.mark.spec("R28")
    def test_an_old_view_changes_nothing(self) -> None:
        one = small()
        ticket = one.call(pull({"w": torch.zeros(4)}))
        one.scheduler(View(1, "running", "", (member(Node(Role.SERVER, 0), "lost"),)))
        assert one.finish(ticket) is None

    def test_leaving(self) -> None:
        one = small()
        one.take(one.core.leave(True, 0, "done", True, one.now))
        assert one.sent(Leave) == [Leave(True, 0, True, "done")]
        assert not one.exits()
        one.scheduler(Left())
        assert one.exits() == [Exit(0, "left")]

    def test_leaving_before_it_has_joined(self) -> None:
        one = Bench(join=False)
        one.take(one.core.leave(False, 1, "interrupted", True, one.now))
        assert one.exits() == [Exit(0, "left before it had joined")]

    def test_a_broken_connection_is_no_news(self) -> None:
        one = small()
        assert one.take(one.core.on_drop("server 0", one.now)) == []


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
    assert "create(): this job has no servers. Start kvps-launch with -s 1" in str(bench.error(ticket))


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
