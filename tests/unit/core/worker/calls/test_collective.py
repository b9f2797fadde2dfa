"""Calls that wait for pushes, and meet the other workers."""

import pytest

from kvps.core.worker import calls
from kvps.errors import WorkerLost
from kvps.protocol.envelope import WINDOW, Node, Role
from kvps.protocol.membership import Barrier, Done, Join, Joined, Released, Return, Trait
from kvps.protocol.stores import Status, StatusIs
from kvps.protocol.values import Pull
from tests.support.worker_harness import member, push
from tests.support.worker_with_key import HOT, bench, ready, stood


class TestJoin:
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
    @pytest.mark.spec("R403")
    def test_models_are_compared_at_a_barrier_of_their_own(self) -> None:
        one = bench()
        traits = (Trait("parameter 'w'", "float32[2]"),)
        ticket = one.call(calls.Compare("kv", "Trainer()", traits))
        one.scheduler(Released(one.seqs(Barrier)[-1]))
        assert one.sent(Barrier) == [Barrier("kv", "kvps.same", 0, what="Trainer()", traits=traits)]
        assert one.is_done(ticket)

    def test_status_is_asked_of_all(self) -> None:
        one = bench()
        ticket = one.call(calls.AskStatus("kv"))
        for server in (0, 1):
            one.server(server, StatusIs(one.seqs(Status, server)[0], (), ()))
        assert [type(it) for it in one.finish(ticket).value] == [StatusIs] * 2  # type: ignore[union-attr, attr-defined]
