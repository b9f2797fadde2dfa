"""Taking a seat, coming back to it, and losing it."""

import pytest

from kvps.core.scheduler.membership import LINKS_MAX, Membership
from kvps.core.scheduler.seat import Settings
from kvps.errors import ConfigError, Fenced, Mismatch, ProtocolError
from kvps.protocol.envelope import Envelope, Node, Role
from kvps.protocol.membership import Hello, Leave

W0, W1, S0 = Node(Role.WORKER, 0), Node(Role.WORKER, 1), Node(Role.SERVER, 0)


def seats(workers: int = 2, servers: int = 1) -> Membership:
    return Membership(Settings(workers, servers))


def hello(rank: int | None = None, role: Role = Role.WORKER, pid: int = 7, guardian: bool = False) -> Hello:
    return Hello(1, 0, "kvps", 0, role, rank, "host", pid, "", guardian)


NEW = Envelope(bytes(16), 0, Role.WORKER, 0, 0, 0)


def envelope(node: Node, incarnation: int) -> Envelope:
    return Envelope(bytes(16), 0, node.role, node.rank, incarnation, 0)


class TestTake:
    @pytest.mark.spec("R20")
    def test_refusals_change_nothing(self) -> None:
        table = seats()
        table.take("a", hello(0), 1.0)
        table.take("b", hello(1), 1.0)
        table.by_node[W1].leave(Leave(True, 0, True, ""), 1.0)
        for wanted, text in (
            (None, "already has 2 workers .--workers 2."),
            (0, "rank 0 is alive: worker 0 runs as host:7 .incarnation 1.; was it started twice"),
            (1, "worker 1 is left .done., and its rank is not assigned again"),
            (2, "there is no worker 2: the job has 2 workers"),
        ):
            with pytest.raises(ConfigError, match=text):
                table.take("x", hello(wanted, pid=8), 2.0)
        assert table.issued == 2
        assert set(table.routes) == {"a", "b"}

    @pytest.mark.spec("R23")
    def test_returning_process_takes_its_own_seat_if_the_link_to_it_is_mute(self) -> None:
        """HELLO came along a connection that WELCOME never left by, and that nobody saw break."""
        table = seats()
        table.take("a", hello(1, pid=11), 1.0)
        table.take("g", hello(0, pid=12), 1.0)
        for route, pid, now in (("a", 11, 9.0), ("b", 13, 9.0), ("b", 11, 3.9)):
            table.part_mute(route, hello(1, pid=pid), now)
            assert set(table.routes) == {"a", "g"}, "its own, another's, or too soon"
        table.part_mute("b", hello(1, pid=11), 4.0)
        assert set(table.routes) == {"g"}
        assert table.doubt("b", NEW, hello(1, pid=11), 4.0) == ""
        seat, replaces = table.take("b", hello(1, pid=11), 4.0)
        assert (seat.node, seat.incarnation, replaces) == (W1, 3, True)
        table.check()

    @pytest.mark.spec("R20", "R23")
    def test_worker_that_has_begun_keeps_its_seat_while_silent(self) -> None:
        table = seats()
        table.take("a", hello(1, pid=11), 1.0)
        table.by_node[W1].has_begun = True
        table.part_mute("b", hello(1, pid=11), 9.0)
        with pytest.raises(ConfigError, match="rank 1 is alive"):
            table.take("b", hello(1, pid=11), 9.0)


class TestDoubt:
    """Who wants a seat that is taken waits until its holder has proved that it lives, or is lost."""

    def both(self) -> Membership:
        table = seats()
        table.take("a", hello(0, pid=1, guardian=True), 1.0)
        table.take("b", hello(1, pid=2), 1.0)
        return table

    def asked(self, table: Membership) -> dict[str, int]:
        outgoing, table.claims.outgoing = table.claims.outgoing, []
        return {str(route): item.number for route, item in outgoing}

    @pytest.mark.spec("R216")
    def test_a_holder_is_asked_the_same_until_it_answers_but_not_by_everybody(self) -> None:
        table = self.both()
        table.doubt("x", NEW, hello(1), 2.0)
        first = self.asked(table)
        table.doubt("x", NEW, hello(1), 2.4)
        table.doubt("y", NEW, hello(1), 2.4)
        assert self.asked(table) == {}
        table.doubt("x", NEW, hello(1), 3.0)
        assert self.asked(table) == first
        table.doubt("y", NEW, hello(1), 4.0)
        assert self.asked(table)["b"] > first["b"], "the first one is older than this newcomer"


class TestAttach:
    def guarded(self) -> Membership:
        table = seats()
        table.take("supervisor", hello(0, guardian=True), 1.0)
        return table

    def test_only_one_at_a_time(self) -> None:
        table = self.guarded()
        table.attach("child", envelope(W0, 1), hello(0, pid=8), 2.0)
        with pytest.raises(ConfigError, match="host:8 already speaks for worker 0"):
            table.attach("other", envelope(W0, 1), hello(0, pid=9), 3.0)
        waits = "host:8 claims the seat of worker 0; asking whether it is alive"
        assert table.doubt("other", envelope(W0, 1), hello(0, pid=9), 3.0) == waits
        assert [item.number for _, item in table.claims.outgoing] == [3_000_000]
        table.by_node[W0].links["child"].proved = 3_000_000
        assert table.doubt("other", envelope(W0, 1), hello(0, pid=9), 3.0) == ""
        again = table.attach("child again", envelope(W0, 1), hello(0, pid=8), 3.0)
        assert set(again.links) == {"supervisor", "child again"}
        later = table.attach("other", envelope(W0, 1), hello(0, pid=9), 15.0)
        assert set(later.links) == {"supervisor", "other"}
        table.check()


class TestRecognise:
    def test_a_route_that_speaks_for_another_seat_moves_there(self) -> None:
        table = seats()
        table.take("a", hello(0), 1.0)
        table.take("b", hello(1, pid=8), 1.0)
        assert table.recognise("a", envelope(W1, 2), 5.0).node == W1
        assert table.by_node[W0].dropped_at == 5.0
        table.check()

    def test_links_are_bounded(self) -> None:
        table = seats()
        table.take("supervisor", hello(0, guardian=True), 1.0)
        for index in range(4):
            seat = table.recognise(f"r{index}", envelope(W0, 1), 2.0 + index)
            assert len(seat.links) <= LINKS_MAX
            table.check()
        assert list(seat.links) == ["r2", "r3"]

    @pytest.mark.spec("R17", "R21")
    def test_strangers(self) -> None:
        table = seats()
        table.take("a", hello(0), 1.0)
        table.by_node[W0].lose("silent", 13.0)
        table.take("b", hello(0, pid=8), 14.0)
        for node, incarnation, cls, text in (
            (W0, 0, ProtocolError, "send HELLO"),
            (Node(Role.WORKER, 5), 1, ProtocolError, "send HELLO"),
            (W0, 1, Fenced, "worker 0 is now incarnation 2 at host:8; you are incarnation 1"),
            (W1, 1, Fenced, "belongs to a job that is over"),
            (W0, 9, Mismatch, "incarnation 9 of worker 0 was not issued"),
        ):
            with pytest.raises(cls, match=text):
                table.recognise("x", envelope(node, incarnation), 15.0)
        assert set(table.routes) == {"b"}


class TestLoss:
    @pytest.mark.spec("R71")
    def test_expires_after_a_second_broken_or_twelve_silent(self) -> None:
        table = seats()
        table.take("a", hello(0), 0.0)
        table.take("b", hello(1, pid=8), 5.0)
        table.drop("b", 6.0)
        assert table.expire(6.9) == []
        assert [seat.reason for seat in table.expire(7.0)] == ["connection broke, no beat for 1 s"]
        assert table.expire(11.9) == []
        assert [seat.reason for seat in table.expire(12.0)] == ["silent for 12 s"]
        assert table.expire(99.0) == []
        table.check()
