"""Near links between two transports of one host: what they carry, how they end, and what they cost who is idle."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any

import pytest

from kvps.core.effects import Connect
from kvps.core.key_roles import near_endpoint
from kvps.net.links import links
from kvps.net.links.framing import record_of
from kvps.net.links.stream import BATCH
from kvps.net.transport import Refused
from kvps.net.zap import Keys, new_pair
from kvps.net.zeromq import ZmqTransport
from kvps.protocol import wire
from kvps.protocol.envelope import Packet, Role
from kvps.protocol.membership import Probed
from tests.integration.processes import until
from tests.integration.transport_pair import NAME, SERVER, Hold, TransportPair, probe, values


class Pair(TransportPair):
    """A server and a worker of one host with keys."""

    def __init__(self) -> None:
        session = new_pair()
        keys = Keys(role=new_pair(), session=new_pair())
        self.server = ZmqTransport("tcp://127.0.0.1:0", role=Role.SERVER, keys=keys)
        self.worker = ZmqTransport(keys=Keys(("s" * 40,), session=session))
        self.introduce(keys, session.public, is_near=True)
        self.door = near_endpoint(keys.session.public).replace("ipc://@", "\0")

    def near(self) -> list[Any]:
        """Return the server's links."""
        return list(self.server._links.by_fd.values())


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(Pair()) as made:
        made.worker.connect(made.to)
        yield made


@pytest.mark.spec("R248", "R616")
def test_packets_go_along_the_link_in_their_order(pair: Pair) -> None:
    route = pair.ask()
    assert not pair.worker._outgoing.dealers
    pair.at_server.clear()
    hold, sizes = Hold(), [4, 4096, 2 << 20, 400_000, 4, 60_000, 66_000, 700_000]
    answers = [values(size) for size in sizes]
    for number, answer in enumerate(answers):
        pair.worker.send(NAME, probe(number), None)
        pair.server.send(route, answer, hold)
    pair.until(lambda: len(pair.at_worker) == len(pair.at_server) == len(sizes), "all packets")
    assert pair.at_server == [(route, probe(number)) for number in range(len(sizes))]
    assert pair.at_worker == [(NAME, answer) for answer in answers]
    assert all(not frame.readonly for _, answer in pair.at_worker for frame in answer.payload)
    assert hold.count == len(sizes)


@pytest.mark.spec("R616")
@pytest.mark.parametrize("end", ["worker", "server"])
def test_a_link_that_breaks_is_opened_again(pair: Pair, end: str) -> None:
    route = pair.ask()
    pair.server.send(route, Packet(SERVER, Probed((8,), ())), None)
    pair.until(lambda: pair.at_worker, "an answer")
    (broken,) = getattr(pair, end)._links.by_fd.values()
    broken._connection.shutdown(socket.SHUT_RDWR)
    pair.until(
        lambda: broken.fd < 0 and pair.worker._links.by_route and len(pair.near()) == 1, "another link"
    )
    for number in range(10, 20):
        pair.ask(number)
    assert pair.at_server[-1][0] != route
    assert pair.worker.reconnects == 1
    assert not pair.worker._outgoing.dealers


@pytest.mark.spec("R616")
def test_a_link_that_carried_nothing_is_followed_by_zeromq(pair: Pair) -> None:
    pair.until(pair.near, "the link")
    pair.server._links.end(pair.near()[0])
    pair.until(lambda: pair.worker._outgoing.dealers, "another connection")
    pair.ask(3)
    assert not pair.near()


@pytest.mark.spec("R616")
def test_a_peer_that_does_not_listen_there_is_reached_by_zeromq(pair: Pair) -> None:
    pair.server._links.close(0.0)
    pair.worker.connect(pair.to)
    pair.ask(3)
    assert pair.worker._outgoing.dealers


@pytest.mark.spec("R616")
def test_a_peer_that_is_not_near_gets_no_link(pair: Pair) -> None:
    pair.worker.connect(replace(pair.to, is_near=False))
    pair.ask(3)
    assert pair.worker._outgoing.dealers
    pair.until(lambda: not pair.near(), "the end of the link before")


@pytest.mark.spec("R95")
def test_packets_sent_before_a_neighbour_listens_reach_it() -> None:
    endpoint = f"ipc://@kvps-test-late-{os.getpid()}"
    with ExitStack() as ends:
        first, second = ZmqTransport(), ZmqTransport()
        ends.callback(first.close, 0.0)
        ends.callback(second.close, 0.0)
        first.connect(Connect("worker 0", endpoint, is_near=True))
        for number in range(3):
            first.send("worker 0", probe(number), None)
        list(first.poll(0.0))
        second.listen(endpoint)
        heard: list[Any] = []

        def has_heard() -> bool:
            list(first.poll(0.01))
            heard.extend(packet for _, packet in second.poll(0.01))
            return len(heard) == 3

        until(has_heard, "all packets")
        assert heard == [probe(number) for number in range(3)]


@pytest.mark.spec("R95")
def test_a_neighbour_that_closes_each_link_costs_a_few_attempts() -> None:
    endpoint = f"kvps-test-flaps-{os.getpid()}"
    with ExitStack() as ends:
        first, neighbour = ZmqTransport(), ends.enter_context(socket.socket(socket.AF_UNIX))
        ends.callback(first.close, 0.0)
        neighbour.bind(f"\0{endpoint}")
        neighbour.listen()
        neighbour.setblocking(False)
        first.connect(Connect("worker 0", f"ipc://@{endpoint}", is_near=True))
        end = time.monotonic() + 5 * links.AGAIN_S
        while time.monotonic() < end:
            with suppress(BlockingIOError):
                neighbour.accept()[0].close()
            list(first.poll(0.01))
        assert 1 <= first.reconnects <= 6


@pytest.mark.spec("R617")
@pytest.mark.parametrize(
    "octets",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        record_of([b"h" * ((1 << 20) + 1000)])[0],
        (6).to_bytes(4, "big") + (6 ^ 0xFFFFFFFF).to_bytes(4, "big") + b"\0\1" + b"\xff" * 4,
        (2).to_bytes(4, "big") + (2 ^ 0xFFFFFFFF).to_bytes(4, "big") + b"\0\0",
    ],
    ids=["http", "noise", "long head", "long frame", "no head"],
)
def test_bytes_that_are_no_record_end_their_link_alone(
    pair: Pair, octets: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    pair.ask()
    with caplog.at_level("INFO"), socket.socket(socket.AF_UNIX) as bad:
        bad.connect(pair.door)
        threading.Thread(target=send_all, args=(bad, octets)).start()
        pair.until(lambda: "a record " in caplog.text, "the end of the link")
        assert len(pair.near()) == 1
    pair.ask(2)


def send_all(connection: socket.socket, octets: bytes) -> None:
    """Send what a peer may have closed meanwhile."""
    with suppress(OSError):
        connection.sendall(octets)


@pytest.mark.spec("R617")
def test_a_packet_that_is_refused_ends_no_link(pair: Pair) -> None:
    with socket.socket(socket.AF_UNIX) as bad:
        bad.connect(pair.door)
        octets = b"".join(record_of(wire.encode(Packet(SERVER, Probed((1,), ())))))
        bad.sendall(octets + b"".join(record_of(wire.encode(probe(5)))))
        with pytest.raises(Refused):
            pair.until(lambda: False, "a refusal")
        pair.until(lambda: pair.at_server, "the packet behind")
    assert pair.at_server[-1][1] == probe(5)


@pytest.mark.spec("R617")
def test_many_small_packets_leave_others_their_turn(pair: Pair) -> None:
    count = 3 * BATCH
    with socket.socket(socket.AF_UNIX) as busy:
        busy.connect(pair.door)
        busy.sendall(b"".join(record_of(wire.encode(probe(7)))) * count)
        pair.worker.send(NAME, probe(1), None)
        turns = []

        def has_come() -> bool:
            turns.append([packet for _, packet in pair.server.poll(0.001)])
            return sum(map(len, turns)) == count + 1

        until(has_come, "all packets")
    assert max(map(len, turns)) <= BATCH + 1
    assert [probe(1) in turn for turn in turns if turn][:2].count(True) == 1, "it did not wait for all others"


@pytest.mark.spec("R617")
def test_of_unfinished_packets_the_largest_ends(pair: Pair) -> None:
    pair.ask()
    pair.server._links.limits = replace(pair.server._links.limits, members=9)
    with socket.socket(socket.AF_UNIX) as bad:
        bad.connect(pair.door)
        pair.until(lambda: len(pair.near()) == 2, "another link")
        mine, others = pair.near()
        mine.reader.unfinished, others.reader.unfinished = 4, 6
        pair.server._links.look()
        assert pair.near() == [mine]


@pytest.mark.spec("R617")
def test_a_peer_that_does_not_read_costs_no_more_than_the_limit(pair: Pair) -> None:
    route, unread = pair.ask(), pair.server._links._unread_max_bytes
    answer = values(unread // 4)
    for _ in range(40):
        pair.server.send(route, answer, None)
    (link,) = pair.near()
    assert link._copied_bytes <= unread
    assert pair.server.refused.packets["unread"] >= 30
    pair.until(lambda: not link.waiting, "all to leave")
    pair.server.send(route, values(8), None)
    pair.until(lambda: pair.at_worker and pair.at_worker[-1][1].payload[0].nbytes == 8, "the last")
    assert all(packet == answer for _, packet in pair.at_worker[:-1])


@pytest.mark.spec("R616")
def test_packets_that_wait_leave_before_a_process_ends(pair: Pair) -> None:
    route, answer, hold = pair.ask(), values(4 << 20), Hold()
    for _ in range(4):
        pair.server.send(route, answer, hold)
    (link,) = pair.near()
    assert link.waiting
    closing = threading.Thread(target=pair.server.close, args=(30.0,))
    closing.start()
    until(lambda: pair.at_worker.extend(pair.worker.poll(0.01)) or len(pair.at_worker) == 4, "all packets")
    closing.join()
    assert pair.at_worker == [(NAME, answer)] * 4
    assert hold.count == 4


@pytest.mark.spec("R616")
def test_a_peer_that_does_not_read_delays_no_end_for_longer_than_it_may(pair: Pair) -> None:
    pair.server.send(pair.ask(), values(4 << 20), None)
    began = time.monotonic()
    pair.server.close(0.2)
    assert 0.2 <= time.monotonic() - began < 20.0


@pytest.mark.spec("R616")
def test_packets_before_the_end_of_a_link_are_heard(pair: Pair) -> None:
    route, hold, heard = pair.ask(), Hold(), []
    pair.worker.send(NAME, probe(5), None)
    pair.worker.close(0.0)
    for count, size in enumerate((4, 4 << 20), start=1):
        pair.server.send(route, values(size), hold)
        assert hold.count == count
    until(lambda: heard.extend(pair.server.poll(0.01)) or not pair.near(), "the end of the link")
    assert heard == [(route, probe(5))]


@pytest.mark.spec("R617")
def test_holds_are_released_when_a_link_ends(pair: Pair) -> None:
    route, hold = pair.ask(), Hold()
    for _ in range(10):
        pair.server.send(route, values(4 << 20), hold)
    assert hold.count < 10
    pair.server._links.end(pair.near()[0], "it is over")
    assert hold.count == 10


@pytest.mark.spec("R617")
def test_a_process_without_descriptors_waits_for_one(pair: Pair) -> None:
    pair.ask()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as late:
        resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, hard))
        spare = []
        try:
            with suppress(OSError):
                while True:
                    spare.append(os.dup(0))
            late.connect(pair.door)
            turns, end = 0, time.monotonic() + 0.5
            while time.monotonic() < end:
                list(pair.server.poll(end - time.monotonic()))
                turns += 1
            assert turns < 10, "it asks now and then, and not without a pause"
            assert len(pair.near()) == 1
        finally:
            for fd in spare:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        pair.until(lambda: len(pair.near()) == 2, "the link")


@pytest.mark.spec("R248")
def test_a_system_that_does_not_tell_users_apart_has_no_links(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "SO_PEERCRED")
    pair.worker.connect(pair.to)
    pair.ask(3)
    assert pair.worker._outgoing.dealers


def test_a_child_that_was_forked_keeps_no_link(pair: Pair) -> None:
    pair.ask()
    (link,) = pair.worker._links.by_fd.values()
    fd, copy = link.fd, os.dup(link.fd)  # as fork does
    pair.worker.close(0.0)
    until(lambda: not list(pair.server.poll(0.01)) and not pair.near(), "the end of the link")
    assert fd not in dict(pair.worker._sockets.poll.poll(0))
    os.close(copy)


@pytest.mark.parametrize("is_near", [True, False])
def test_no_packet_waits_for_another_to_wake_its_reader(is_near: bool) -> None:
    with closing(Pair()) as pair:
        pair.worker.connect(replace(pair.to, is_near=is_near))
        route, longest, count = pair.ask(), 0.0, 1500
        is_over = threading.Event()

        def answer() -> None:
            while not is_over.is_set():
                for _, packet in pair.server.poll(30.0):
                    pair.server.send(route, Packet(SERVER, Probed(packet.message.seqs, ())), None)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            for number in range(count):
                asked = time.monotonic()
                for part in range(number % 3 + 1):
                    pair.worker.send(NAME, probe(part), None)
                answers = 0
                while answers <= number % 3:
                    answers += len(list(pair.worker.poll(30.0)))
                longest = max(longest, time.monotonic() - asked)
        finally:
            is_over.set()
            pair.server.wake()
            thread.join()
        assert longest < links.AGAIN_S * 100
