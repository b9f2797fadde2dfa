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
        worker = ready(1)
        worker.call(push({"w": HOT}))
        ticket = worker.call(calls.JoinStore("kv"))
        worker.view(member(Node(Role.WORKER, 0), "gone"))
        assert isinstance(worker.error(ticket), WorkerLost)
        assert not worker.core.stores["kv"].is_away

    def test_a_push_that_waits_for_room_does_not_come_behind_it(self) -> None:
        worker = ready(1)
        for _ in range(WINDOW):
            worker.call(push({"w": HOT}, eager=False))
        late = worker.call(push({"w": HOT}, eager=False))
        worker.core.stores["kv"].is_away = True
        for server in (0, 1):
            stood(worker, worker.seqs(Pull, server)[0], server, 1, owed=1)
        assert "has joined" in str(worker.error(late))

    def test_where_each_push_is_applied_no_number_is_asked(self) -> None:
        worker = ready(1, mode="async")
        ticket = worker.call(calls.JoinStore("kv"))
        for server in (0, 1):
            worker.server(server, Joined(worker.seqs(Join, server)[0], 1))
        for server in (0, 1):
            worker.server(server, Done(worker.seqs(Return, server)[0]))
        assert worker.finish(ticket).value == 1  # type: ignore[union-attr]
        assert not worker.sent(Pull)


class TestTogether:
    @pytest.mark.spec("R403")
    def test_models_are_compared_at_a_barrier_of_their_own(self) -> None:
        worker = bench()
        traits = (Trait("parameter 'w'", "float32[2]"),)
        ticket = worker.call(calls.Compare("kv", "Trainer()", traits))
        worker.scheduler(Released(worker.seqs(Barrier)[-1]))
        assert worker.sent(Barrier) == [Barrier("kv", "kvps.same", 0, what="Trainer()", traits=traits)]
        assert worker.is_done(ticket)

    def test_status_is_asked_of_all(self) -> None:
        worker = bench()
        ticket = worker.call(calls.AskStatus("kv"))
        for server in (0, 1):
            worker.server(server, StatusIs(worker.seqs(Status, server)[0], (), ()))
        assert [type(it) for it in worker.finish(ticket).value] == [StatusIs] * 2  # type: ignore[union-attr, attr-defined]
