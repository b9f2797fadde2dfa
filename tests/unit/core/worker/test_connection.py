"""Links: windows, priorities, lanes, probes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.core.worker import connection as link
from kvps.core.worker.connection import (
    PROBE_AFTER_S,
    PROBE_SEQS_MAX,
    UPLINK_BYTES,
    WINDOW_BYTES,
    Connection,
    Request,
    SendScheduler,
)
from kvps.core.worker.plan import HERE
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
    one = Connection("server 0")
    one.ready = True
    return one


def names(link: Connection, now: float = 0.0) -> list[str]:
    """Send what is due."""
    return [name for _, name in sent(link._uplink, now)]


def sent(uplink: SendScheduler, now: float = 0.0) -> list[tuple[int, str]]:
    """Send what is due over all links; return to whom and what."""
    return [
        (int(link.route[-1]), one.message.store)
        for link, one in uplink.due(now)
        if isinstance(one.message, Status)
    ]


def queued(link: Connection, *requests: Request) -> list[Request]:
    for one in requests:
        link.queue(one)
    return list(requests)


def test_nothing_is_sent_before_the_server_has_answered_hello() -> None:
    one = Connection("server 0")
    queued(one, request("a"))
    assert names(one) == []
    one.ready = True
    assert names(one) == ["a"]
    assert names(one) == []


def test_requests_are_numbered_as_they_are_sent() -> None:
    one = ready()
    low, high = queued(one, request("low"), request("high", priority=1))
    assert names(one, 3.0) == ["high", "low"]
    assert [(sent.seq, sent.sent_at) for sent in (high, low)] == [(1, 3.0), (2, 3.0)]
    assert list(one.outstanding) == [1, 2]


class TestPriority:
    def test_the_higher_goes_first_and_equals_keep_their_order(self) -> None:
        one = ready()
        queued(
            one,
            request("a"),
            request("b", lane=2, priority=1),
            request("c", lane=3, priority=2),
            request("d", lane=4, priority=1),
        )
        assert names(one) == ["c", "b", "d", "a"]

    def test_requests_for_one_chunk_keep_their_order(self) -> None:
        one = ready()
        queued(one, request("a", lane=1, priority=2), request("b", lane=1, priority=1))
        queued(one, request("c", lane=1, priority=2))
        assert names(one) == ["a", "b", "c"]

    def test_a_higher_one_lifts_all_those_before_it_in_its_lane(self) -> None:
        one = ready()
        queued(
            one,
            request("a1", lane=1),
            request("b1", lane=2, priority=1),
            request("a2", lane=1),
            request("a3", lane=1, priority=5),
            request("a4", lane=1),
        )
        assert names(one) == ["a1", "a2", "a3", "b1", "a4"]

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2))))
    def test_against_a_model(self, given: list[tuple[int, int]]) -> None:
        """Each time the highest goes, after all that its lane has before it."""
        one, left = ready(), []
        for index, (lane, priority) in enumerate(given):
            queued(one, request(str(index), lane, priority))
            left.append((index, lane, priority))
        expected = []
        while left:
            first = max(left, key=lambda it: (it[2], -it[0]))
            lane = [it for it in left if it[1] == first[1] and it[0] <= first[0] and first[1]]
            for it in lane or [first]:
                expected.append(str(it[0]))
                left.remove(it)
        assert names(one) == expected


def two(payload_bytes: int) -> tuple[SendScheduler, Connection, Connection]:
    """Two links whose requests were queued in turns."""
    uplink = SendScheduler()
    links = [Connection(f"server {server}", uplink=uplink) for server in (0, 1)]
    for index in range(3):
        for name, one in zip("ab", links, strict=True):
            one.ready = True
            one.queue(request(f"{name}{index}", payload_bytes=payload_bytes))
    return uplink, links[0], links[1]


class TestUplink:
    def test_keeps_the_order_over_all_links(self) -> None:
        uplink, _, second = two(1)
        second.queue(request("high", priority=1))
        assert sent(uplink) == [(1, "high"), (0, "a0"), (1, "b0"), (0, "a1"), (1, "b1"), *LAST]
        assert sent(uplink) == []

    def test_does_not_wait_for_a_server_that_is_not_ready(self) -> None:
        uplink, first, _ = two(1)
        first.ready = False
        assert [server for server, _ in sent(uplink)] == [1, 1, 1]

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


@pytest.mark.parametrize(("sharers", "first"), [(1, "abc"), (2, "ab")])
def test_some_requests_have_room_however_large(sharers: int, first: str) -> None:
    one = ready()
    one._uplink.sharers = sharers
    queued(one, *[request(name, payload_bytes=UPLINK_BYTES) for name in "abcd"])
    assert names(one) == list(first)
    one.receive(1)
    assert names(one) == ["abcd"[len(first)]]


def test_an_uplink_without_limits_has_room_for_all() -> None:
    uplink = SendScheduler(is_limited=False)
    one = Connection("worker 1", uplink=uplink)
    one.ready = True
    queued(one, *[request(str(index), payload_bytes=WINDOW_BYTES) for index in range(5)])
    assert len(names(one)) == 5


class TestWindow:
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two requests are few enough to show a window of bytes."""
        monkeypatch.setattr(link, "UPLINK_LEAST", 2)

    def test_is_three_mebibytes_of_payload(self) -> None:
        one = ready()
        half = 1 << 19
        assert 6 * half == UPLINK_BYTES
        queued(one, *[request(str(index), payload_bytes=half) for index in range(20)])
        assert len(names(one)) == 6
        one.answer(3)
        assert names(one) == ["6"]
        one.receive(5)
        one.receive(5)
        assert names(one) == ["7"]
        one.answer(5)
        assert names(one) == []

    def test_is_divided_among_those_who_share_it(self) -> None:
        uplink, _, _ = two(UPLINK_BYTES // 6)
        uplink.sharers = 2
        assert len(sent(uplink)) == 3
        uplink.sharers = 1
        assert len(sent(uplink)) == 3

    def test_missed_request_leaves_the_window(self) -> None:
        """The peer may not take it in before one that waits for room."""
        one = ready()
        first, *_ = queued(one, *[request(name, payload_bytes=UPLINK_BYTES) for name in "abc"])
        assert names(one) == ["a", "b"]
        assert one.miss(1) is first
        assert one.miss(9) is None
        assert names(one) == ["c"]
        assert list(one.outstanding) == [1, 2, 3]

    def test_is_shared_by_all_links(self) -> None:
        uplink, first, second = two(UPLINK_BYTES // 2)
        assert sent(uplink) == [(0, "a0"), (1, "b0")]
        second.receive(1)
        assert sent(uplink) == [(0, "a1")]
        first.answer(1)
        assert sent(uplink) == [(1, "b1")]

    def test_leaves_out_a_server_that_is_silent(self) -> None:
        uplink, _, second = two(UPLINK_BYTES // 2)
        sent(uplink)
        second.receive(1)
        assert sent(uplink, 1.9) == [(0, "a1")]
        assert sent(uplink, 2.0) == [(1, "b1"), (0, "a2"), (1, "b2")]

    def test_but_not_for_ever(self) -> None:
        """A silent server is given one window of its own, not all there is."""
        one = ready()
        step = WINDOW_BYTES // 4
        queued(one, *[request(str(index), payload_bytes=step) for index in range(9)])
        assert names(one) == ["0", "1"]
        assert names(one, 5.0) == ["2", "3"]
        assert names(one, 9.0) == []

    def test_has_room_for_what_is_lent(self) -> None:
        class Lending(Private):
            def lends(self, route: str, pieces: Sequence[torch.Tensor]) -> bool:
                return route == "server 0"

        one = Connection("server 0", memory=Lending())
        one.ready = True
        queued(one, *[request(str(index), payload_bytes=UPLINK_BYTES) for index in range(3)])
        assert names(one) == ["0", "1", "2"]
        one.receive(1)
        assert one.bytes_away == 0
        assert not one.is_late(99.0)

    def test_stops_what_a_higher_one_lifts_halfway(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(link, "WINDOW_BYTES", 2)
        one = ready()
        queued(one, *[request(name, 1, 0, 1) for name in "abc"], request("d", 1, 9, 1))
        queued(one, request("e", 2, 5, 1))
        assert names(one) == ["a", "b"]
        one.answer(1)
        assert names(one) == ["c"]
        one.answer(2)
        one.answer(3)
        assert names(one) == ["d", "e"]


class TestPayload:
    def test_is_made_when_it_is_sent(self) -> None:
        source = torch.zeros(2)
        one = ready()
        (late,) = queued(one, request("late", fill=lambda route: (source.clone(),)))
        source.fill_(3)
        assert names(one) == ["late"]
        source.fill_(4)
        assert late.payload[0].tolist() == [3, 3]

    def test_or_before_when_its_source_may_change(self) -> None:
        source = torch.zeros(2)
        early = request("early", fill=lambda route: (source.clone(),))
        early.freeze()
        source.fill_(3)
        early.freeze()
        assert early.payload[0].tolist() == [0, 0]

    def test_is_given_up_with_the_answer(self) -> None:
        one = ready()
        (sent,) = queued(one, request(payload_bytes=8, fill=lambda route: (torch.zeros(2),)))
        names(one)
        assert one.receive(1) is sent
        assert sent.payload
        assert one.answer(1) is sent
        assert not sent.payload
        assert one.answer(1) is None
        assert one.receive(1) is None
        assert not one.outstanding


class TestProbes:
    def test_come_two_seconds_after_the_oldest_was_sent_and_again(self) -> None:
        one = ready()
        assert one.probe_at() is None
        assert not one.is_overdue(99.0)
        queued(one, request())
        names(one, 10.0)
        queued(one, request())
        names(one, 11.5)
        assert one.probe_at() == 10.0 + PROBE_AFTER_S
        assert not one.is_overdue(11.9)
        assert one.is_overdue(12.0)
        assert one.unanswered() == [(1, 2)]
        assert one.probe_at() == 14.0
        one.answer(1)
        assert one.is_overdue(14.0)
        assert one.unanswered() == [(2,)]
        one.answer(2)
        assert one.probe_at() is None

    def test_ask_for_all_in_batches(self) -> None:
        one = ready()
        queued(one, *[request() for _ in range(PROBE_SEQS_MAX + 1)])
        names(one)
        first, second = one.unanswered()
        assert (len(first), second) == (PROBE_SEQS_MAX, (PROBE_SEQS_MAX + 1,))


class TestDrop:
    def test_dropped_request_is_not_sent(self) -> None:
        one = ready()
        requests = queued(one, request("a", 1), request("b", 1), request("c"), request("d", 1))
        requests[0].drop()
        requests[2].drop()
        assert names(one) == ["b", "d"]

    def test_also_if_it_would_be_lifted(self) -> None:
        one = ready()
        requests = queued(one, request("a", 1), request("b", 1, priority=1))
        requests[0].drop()
        assert names(one) == ["b"]

    def test_dropped_request_is_not_probed(self) -> None:
        one = ready()
        (sent,) = queued(one, request("a"))
        names(one)
        sent.drop()
        assert one.probe_at() is None
        assert one.answer(1) is None

    def test_push_cannot_be_dropped(self) -> None:
        with pytest.raises(AssertionError, match="must arrive"):
            request(payload_bytes=1).drop()

    def test_dropped_request_that_was_not_sent_is_only_marked(self) -> None:
        """A neighbour, or this worker, collects more of its kind."""
        one = request()
        one.drop()
        assert one.dropped


class TestAbandon:
    @pytest.mark.spec("R96")
    def test_returns_all_that_has_no_answer_as_if_it_had_not_been_asked(self) -> None:
        one = ready()
        requests = queued(one, *[request(name, lane=1, payload_bytes=8) for name in "abcd"])
        assert names(one) == ["a", "b", "c", "d"]
        requests += queued(one, *[request(name, lane=1) for name in "efg"])
        one.answer(2)
        one.receive(3)
        requests[4].drop()
        left = one.abandon()
        assert left == [requests[index] for index in (0, 2, 3, 5, 6)]
        assert not any(request.seq or request.received or request.link for request in left)
        assert one.probe_at() is None
        assert one.bytes_away == 0
        assert one.head() is None

    def test_request_after_an_abandoned_connection_has_a_new_number(self) -> None:
        """The peer may live, and answer by the old numbers."""
        one = ready()
        queued(one, request("a", lane=1), request("b", lane=1))
        names(one)
        one.abandon()
        (new,) = queued(one, request("c", lane=1))
        assert names(one) == ["c"]
        assert new.seq == 3
        assert one.answer(1) is None
        assert one.answer(3) is new


class TestMiss:
    @pytest.mark.spec("R39")
    def test_request_to_be_repeated_leaves_the_window(self) -> None:
        """The peer may want another one before it."""
        one = ready()
        (lost, _) = queued(one, request("lost", payload_bytes=WINDOW_BYTES), request("next", payload_bytes=1))
        assert names(one) == ["lost"]
        assert one.miss(1) is lost
        assert names(one) == ["next"]
        assert one.answer(1) is lost
        assert one.miss(1) is None


def test_a_payload_is_looked_at_here_without_being_made() -> None:
    routes: list[str] = []
    values = torch.ones(2)

    def fill(route: str) -> tuple[torch.Tensor, ...]:
        routes.append(route)
        return (values,)

    one = request(payload_bytes=8, fill=fill)
    assert one.peek() == (values,)
    assert not one.payload
    one.freeze()
    assert one.peek() is one.payload
    assert routes == [HERE, "server 0"]
    one.forget()
    assert (one.payload, one.fill) == ((), None)


def test_the_time_in_which_payload_is_away() -> None:
    one = ready()
    first, second, bare = queued(
        one, request("a", payload_bytes=8), request("b", payload_bytes=8), request("c")
    )
    one._uplink.is_limited = True
    assert names(one, 10.0) == ["a", "b", "c"]
    assert one.sending_s(11.0) == 1.0
    one.receive(first.seq)
    one.look(12.0)
    assert one.sending_s(12.0) == 2.0
    one.receive(second.seq)
    one.look(13.0)
    assert one.sending_s(20.0) == 3.0, "a request without payload does not count"
    one.answer(bare.seq)
    one.look(21.0)
    queued(one, request("d", payload_bytes=8))
    assert names(one, 30.0) == ["d"]
    assert one.sending_s(30.5) == 3.5
    one.abandon()
    one.look(31.0)
    assert one.sending_s(40.0) == 3.0, "nobody knows whether it arrived"


def test_payload_that_a_server_reads_in_place_is_not_under_way() -> None:
    one = Connection("server 0", memory=Lending())
    one.ready = True
    queued(one, request("a", payload_bytes=8))
    assert names(one, 10.0) == ["a"]
    one.look(11.0)
    assert one.sending_s(11.0) == 0.0


class Lending(Private):
    """Memory that all peers can read."""

    def lends(self, route: str, pieces: Sequence[torch.Tensor]) -> bool:
        return True
