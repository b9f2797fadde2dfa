"""Links: windows, priorities, lanes, probes."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.core.worker import connection as link
from kvps.core.worker.connection import (
    PROBE_AFTER_S,
    UPLINK_BYTES,
    WINDOW_BYTES,
    Connection,
    Request,
    SendScheduler,
)
from kvps.protocol.stores import Status
from kvps.tensors import Private


def request(
    name: str = "", lane: int = 0, priority: int = 0, payload_bytes: int = 0, **more: object
) -> Request:
    return Request(
        0,
        Status(name),
        lane=lane,
        priority=priority,
        payload_bytes=payload_bytes,
        **more,  # type: ignore[arg-type]
    )


def ready() -> Connection:
    connection = Connection("server 0")
    connection.ready = True
    return connection


def names(link: Connection, now: float = 0.0) -> list[str]:
    """Send what is due."""
    return [name for _, name in sent(link._uplink, now)]


def sent(uplink: SendScheduler, now: float = 0.0) -> list[tuple[int, str]]:
    """Send what is due over all links; return to whom and what."""
    found: list[tuple[Connection, Request]] = []
    uplink.flow(now, lambda link, item: found.append((link, item)))
    return [
        (int(link.route[-1]), packet.message.store)
        for link, packet in found
        if isinstance(packet.message, Status)
    ]


def queued(link: Connection, *requests: Request) -> list[Request]:
    for request in requests:
        link.queue(request)
    return list(requests)


class TestPriority:
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2))))
    def test_against_a_model(self, given: list[tuple[int, int]]) -> None:
        """Each time the highest goes, after all that its lane has before it."""
        connection, left = ready(), []
        for index, (lane, priority) in enumerate(given):
            queued(connection, request(str(index), lane, priority))
            left.append((index, lane, priority))
        expected = []
        while left:
            first = max(left, key=lambda it: (it[2], -it[0]))
            lane = [it for it in left if it[1] == first[1] and it[0] <= first[0] and first[1]]
            for it in lane or [first]:
                expected.append(str(it[0]))
                left.remove(it)
        assert names(connection) == expected


def two(payload_bytes: int) -> tuple[SendScheduler, Connection, Connection]:
    """Two links whose requests were queued in turns."""
    uplink = SendScheduler()
    links = [Connection(f"server {server}", uplink=uplink) for server in (0, 1)]
    for index in range(3):
        for name, item in zip("ab", links, strict=True):
            item.ready = True
            item.queue(request(f"{name}{index}", payload_bytes=payload_bytes))
    return uplink, links[0], links[1]


class TestUplink:
    def test_does_not_count_what_a_silent_server_has_not_taken_in(self) -> None:
        """Nor what it is sent besides."""
        uplink, _, second = two(UPLINK_BYTES)
        second.ready = False
        assert sent(uplink, 0.0) == [(0, "a0"), (0, "a1"), (0, "a2")]
        for index in range(3):
            uplink.links[0].queue(request(f"c{index}", payload_bytes=1, priority=1))
        second.ready = True
        later = sent(uplink, PROBE_AFTER_S)
        assert later == [(0, "c0"), (0, "c1"), (0, "c2"), (1, "b0"), (1, "b1"), (1, "b2")]


LAST = [(0, "a2"), (1, "b2")]


def test_an_uplink_without_limits_has_room_for_all() -> None:
    uplink = SendScheduler(is_limited=False)
    connection = Connection("worker 1", uplink=uplink)
    connection.ready = True
    queued(connection, *[request(str(index), payload_bytes=WINDOW_BYTES) for index in range(5)])
    assert len(names(connection)) == 5


class TestWindow:
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two requests are few enough to show a window of bytes."""
        monkeypatch.setattr(link, "UPLINK_LEAST", 2)

    def test_missed_request_leaves_the_window(self) -> None:
        """The peer may not take it in before one that waits for room."""
        connection = ready()
        first, *_ = queued(connection, *[request(name, payload_bytes=UPLINK_BYTES) for name in "abc"])
        assert names(connection) == ["a", "b"]
        assert connection.miss(1) is first
        assert connection.miss(9) is None
        assert names(connection) == ["c"]
        assert list(connection.outstanding) == [1, 2, 3]

    def test_leaves_out_a_server_that_is_silent(self) -> None:
        uplink, _, second = two(UPLINK_BYTES // 2)
        sent(uplink)
        second.receive(1)
        assert sent(uplink, 1.9) == [(0, "a1")]
        assert sent(uplink, 2.0) == [(1, "b1"), (0, "a2"), (1, "b2")]

    def test_but_not_for_ever(self) -> None:
        """A silent server is given one window of its own, not all there is."""
        connection = ready()
        step = WINDOW_BYTES // 4
        queued(connection, *[request(str(index), payload_bytes=step) for index in range(9)])
        assert names(connection) == ["0", "1"]
        assert names(connection, 5.0) == ["2", "3"]
        assert names(connection, 9.0) == []

    def test_has_room_for_what_is_lent(self) -> None:
        class Lending(Private):
            def lends(self, route: str, pieces: Sequence[torch.Tensor]) -> bool:
                return route == "server 0"

        connection = Connection("server 0", memory=Lending())
        connection.ready = True
        queued(connection, *[request(str(index), payload_bytes=UPLINK_BYTES) for index in range(3)])
        assert names(connection) == ["0", "1", "2"]
        connection.receive(1)
        assert connection.bytes_away == 0
        assert not connection.is_late(99.0)

    def test_stops_what_a_higher_one_lifts_halfway(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(link, "WINDOW_BYTES", 2)
        connection = ready()
        queued(connection, *[request(name, 1, 0, 1) for name in "abc"], request("d", 1, 9, 1))
        queued(connection, request("e", 2, 5, 1))
        assert names(connection) == ["a", "b"]
        connection.answer(1)
        assert names(connection) == ["c"]
        connection.answer(2)
        connection.answer(3)
        assert names(connection) == ["d", "e"]


class TestDrop:
    def test_push_cannot_be_dropped(self) -> None:
        with pytest.raises(AssertionError, match="must arrive"):
            request(payload_bytes=1).drop()

    def test_dropped_request_that_was_not_sent_is_only_marked(self) -> None:
        """A neighbour, or this worker, collects more of its kind."""
        item = request()
        item.drop()
        assert item.dropped


class TestAbandon:
    def test_request_after_an_abandoned_connection_has_a_new_number(self) -> None:
        """The peer may live, and answer by the old numbers."""
        connection = ready()
        queued(connection, request("a", lane=1), request("b", lane=1))
        names(connection)
        connection.abandon()
        (new,) = queued(connection, request("c", lane=1))
        assert names(connection) == ["c"]
        assert new.seq == 3
        assert connection.answer(1) is None
        assert connection.answer(3) is new


class TestMiss:
    @pytest.mark.spec("R39")
    def test_request_to_be_repeated_leaves_the_window(self) -> None:
        """The peer may want another one before it."""
        connection = ready()
        (lost, _) = queued(
            connection, request("lost", payload_bytes=WINDOW_BYTES), request("next", payload_bytes=1)
        )
        assert names(connection) == ["lost"]
        assert connection.miss(1) is lost
        assert connection.miss(1) is lost
        assert names(connection) == ["next"]
        assert connection.answer(1) is lost
        assert connection.miss(1) is None


def test_payload_that_a_server_reads_in_place_is_not_under_way() -> None:
    connection = Connection("server 0", memory=Lending())
    connection.ready = True
    queued(connection, request("a", payload_bytes=8))
    assert names(connection, 10.0) == ["a"]
    connection.look(11.0)
    assert connection.sending_s(11.0) == 0.0


class Lending(Private):
    """Memory that all peers can read."""

    def lends(self, route: str, pieces: Sequence[torch.Tensor]) -> bool:
        return True
