"""Calls that wait for pushes, and meet the other workers."""

import pytest

from kvps.core.worker import calls
from kvps.errors import ConfigError, WorkerLost
from kvps.protocol.envelope import WINDOW, Node, Role
from kvps.protocol.membership import Barrier, Done, Error, Join, Joined, Released, Return, Trait
from kvps.protocol.stores import Status, StatusIs
from kvps.protocol.values import Pull, Push, Run
from tests.support.worker_harness import member, push
from tests.support.worker_with_key import HOT, bench, ready, stood


class TestJoin:
    @pytest.mark.spec("R120")
    def test_says_return_to_all_servers_before_it_ends(self) -> None:
        one = ready(1)
        one.call(push({"w": HOT}))
        ticket = one.call(calls.JoinStore("kv"))
        assert not one.sent(Join), "its push is not known to be in"
        for server in (0, 1):
            one.ack(server, *one.seqs(Push, server))
        assert one.sent(Join) == [Join("kv", 1, True), Join("kv", 1, False)]
        one.server(1, Joined(one.seqs(Join, 1)[0], 0))
        assert not one.sent(Return)
        one.server(0, Joined(one.seqs(Join, 0)[0], 0))
        assert one.sent(Return) == [Return("kv", 1)] * 2
        for server in (0, 1):
            assert not one.sent(Pull)
            one.server(server, Done(one.seqs(Return, server)[0]))
        for server in (0, 1):
            stood(one, one.seqs(Pull, server)[0], server, 5, owed=5)
        assert one.finish(ticket).value == 0  # type: ignore[union-attr]
        one.call(push({"w": HOT}))
        assert one.sent(Push, 0)[-1].runs == (Run(0, 16, 5),)
        one.init({"later": HOT})
        assert one.core.stores["kv"].key("later").is_refused, "others may have pushed it"

    def test_join_that_ends_before_it_was_sent_does_not_count(self) -> None:
        one = ready(1)
        one.call(push({"w": HOT}))
        ticket = one.call(calls.JoinStore("kv"))
        one.view(member(Node(Role.WORKER, 0), "gone"))
        assert isinstance(one.error(ticket), WorkerLost)
        assert not one.core.stores["kv"].is_away

    def test_a_push_that_waits_for_room_does_not_come_behind_it(self) -> None:
        one = ready(1)
        for _ in range(WINDOW):
            one.call(push({"w": HOT}, eager=False))
        late = one.call(push({"w": HOT}, eager=False))
        one.core.stores["kv"].is_away = True
        for server in (0, 1):
            stood(one, one.seqs(Pull, server)[0], server, 1, owed=1)
        assert "has joined" in str(one.error(late))

    def test_where_each_push_is_applied_no_number_is_asked(self) -> None:
        one = ready(1, mode="async")
        ticket = one.call(calls.JoinStore("kv"))
        for server in (0, 1):
            one.server(server, Joined(one.seqs(Join, server)[0], 1))
        for server in (0, 1):
            one.server(server, Done(one.seqs(Return, server)[0]))
        assert one.finish(ticket).value == 1  # type: ignore[union-attr]
        assert not one.sent(Pull)


class TestTogether:
    @pytest.mark.spec("R33")
    def test_barriers_are_numbered_by_store_and_name(self) -> None:
        one = bench()
        one.open("other")
        for store, name in (("kv", None), ("kv", "x"), ("other", None), ("kv", None)):
            one.call(calls.StandAtBarrier(store, name))
            one.scheduler(Released(one.seqs(Barrier)[-1]))
        assert one.sent(Barrier) == [
            Barrier("kv", "", 0),
            Barrier("kv", "x", 0),
            Barrier("other", "", 0),
            Barrier("kv", "", 1),
        ]

    @pytest.mark.spec("R403")
    def test_models_are_compared_at_a_barrier_of_their_own(self) -> None:
        one = bench()
        traits = (Trait("parameter 'w'", "float32[2]"),)
        ticket = one.call(calls.Compare("kv", "Trainer()", traits))
        one.scheduler(Released(one.seqs(Barrier)[-1]))
        assert one.sent(Barrier) == [Barrier("kv", "kvps.same", 0, what="Trainer()", traits=traits)]
        assert one.is_done(ticket)

    def test_a_barrier_waits_until_this_stores_pushes_are_taken_in(self) -> None:
        one = ready()
        one.open("other")
        one.call(push({"w": HOT}))
        one.call(calls.StandAtBarrier("other", None))
        one.call(calls.StandAtBarrier("kv", None))
        assert [message.store for message in one.sent(Barrier)] == ["other"]
        for server in (0, 1):
            one.ack(server, *one.seqs(Push, server))
        assert [message.store for message in one.sent(Barrier)] == ["other", "kv"]

    def test_a_flush_too(self) -> None:
        one = ready()
        assert one.is_done(one.call(calls.Flush("kv")))
        one.call(push({"w": HOT}))
        ticket = one.call(calls.Flush("kv"))
        later = one.call(push({"w": HOT}))
        for server in (0, 1):
            assert one.finish(ticket) is None
            one.ack(server, one.seqs(Push, server)[0])
        assert one.is_done(ticket), "pushes that came later are not waited for"
        assert one.finish(later) is None

    def test_a_barrier_that_was_not_passed_is_not_counted(self) -> None:
        one = bench()
        ticket = one.call(calls.StandAtBarrier("kv", None))
        one.scheduler(Error(one.seqs(Barrier)[0], ConfigError.code, "no"))
        assert isinstance(one.error(ticket), ConfigError)
        one.call(calls.StandAtBarrier("kv", None))
        assert [message.number for message in one.sent(Barrier)] == [0, 0]

    def test_status_is_asked_of_all(self) -> None:
        one = bench()
        ticket = one.call(calls.AskStatus("kv"))
        for server in (0, 1):
            one.server(server, StatusIs(one.seqs(Status, server)[0], (), ()))
        assert [type(it) for it in one.finish(ticket).value] == [StatusIs] * 2  # type: ignore[union-attr, attr-defined]
