"""Streams between a worker's and a server's transport with keys: what they carry, how they end, and strangers."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import pytest

import kvps
from kvps.core.limits import Limits
from kvps.errors import ConfigError
from kvps.net import zeromq
from kvps.net.links import links
from kvps.net.transport import Refused
from kvps.net.zap import Keys, new_pair
from kvps.net.zeromq import ZmqTransport
from kvps.protocol.envelope import Packet, Role
from kvps.protocol.membership import Probe, Probed, Welcome
from tests.faults.counting import PROBE_AFTER_S, train
from tests.faults.streams import Stream, TcpProxy
from tests.integration.transport_pair import NAME, SERVER, WORKER, Hold, TransportPair, values

pytest.importorskip("cryptography", reason="the extra kvps[aes] is not installed")
from kvps.net.streams import transport as streams  # it needs the extra
from kvps.net.streams.seals import PASS_BYTES, SECRET_BYTES, TO_SERVER, TO_WORKER, AesSeal  # as above
from kvps.net.streams.transport import ServerStreams, WorkerStreams  # as above


class Pair(TransportPair):
    """A server and a worker of two hosts with keys."""

    server: ServerStreams
    worker: WorkerStreams

    def __init__(self) -> None:
        session = new_pair()
        keys = Keys(role=new_pair(), session=new_pair())
        self.server = ServerStreams("tcp://127.0.0.1:0", role=Role.SERVER, keys=keys, limits=Limits())
        self.options: dict[str, Any] = {"keys": Keys(("s" * 40,), session=session), "limits": Limits()}
        self.worker = WorkerStreams(None, role=Role.WORKER, **self.options)
        self.introduce(keys, session.public, is_near=False)

    def meet(self) -> Any:
        """Have a stream in service; return the route of the worker."""
        self.worker.connect(self.to)
        route = self.ask()
        self.server.send(route, Packet(SERVER, Welcome(1, 7, 2, 1)), None)
        self.ask(2)
        self.until(lambda: self.is_up, "a stream")
        return route

    @property
    def is_up(self) -> bool:
        """Whether both ends send along a stream."""
        return bool(self.worker._links.by_route and self.server._links.by_route)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(Pair()) as made:
        yield made


def stranger(pair: Pair) -> socket.socket:
    """Return a connection to the server's port for streams."""
    return socket.create_connection(("127.0.0.1", pair.server.port), 5.0)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.spec("R453", "R456")
def test_packets_go_along_the_stream_in_their_order(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    route = pair.meet()
    pair.at_server.clear()
    pair.at_worker.clear()
    monkeypatch.setattr(zeromq, "_send", None)  # nothing goes there any more
    hold, sizes = Hold(), [4, 4096, 2 << 20, 400_000, 4, 700_000]
    answers = [values(size) for size in sizes]
    for number, answer in enumerate(answers):
        pair.worker.send(NAME, Packet(WORKER, Probe((number,))), None)
        pair.server.send(route, answer, hold)
    pair.until(lambda: len(pair.at_worker) == len(pair.at_server) == len(sizes), "all packets")
    assert [(route, Packet(WORKER, Probe((number,)))) for number in range(len(sizes))] == pair.at_server
    assert [(NAME, answer) for answer in answers] == pair.at_worker
    assert all(not frame.readonly for _, answer in pair.at_worker for frame in answer.payload)
    assert hold.count == len(sizes)


@pytest.mark.spec("R457")
@pytest.mark.parametrize("end", ["worker", "server"])
def test_when_a_stream_breaks_packets_go_by_zeromq(pair: Pair, end: str) -> None:
    route = pair.meet()
    broken = getattr(pair, end)._streams[0]
    broken._connection.shutdown(socket.SHUT_RDWR)
    pair.until(lambda: not (pair.worker._streams or pair.server._streams), "the end of the stream")
    for number in range(10, 20):
        assert pair.ask(number) == route
    assert not pair.is_up


@pytest.mark.spec("R457")
@pytest.mark.parametrize("end", ["worker", "server"])
def test_a_descriptor_that_a_child_has_copied_keeps_no_stream(pair: Pair, end: str) -> None:
    pair.meet()
    (stream,) = pair.worker._streams
    fd, copy = stream.fd, os.dup(stream.fd)  # as fork does
    if end == "worker":
        pair.worker._links.end(stream, "it is over")
    else:
        (other,) = pair.server._streams
        pair.server._links.end(other, "it is over")
    pair.until(lambda: not (pair.worker._streams or pair.server._streams), "the end of the stream")
    assert fd not in dict(pair.worker._sockets.poll.poll(0))
    os.close(copy)


@pytest.mark.spec("R458")
def test_a_descriptor_that_a_child_has_copied_keeps_no_stranger(pair: Pair) -> None:
    with stranger(pair) as sock:
        pair.until(lambda: pair.server._strangers, "the stranger")
        fd = next(iter(pair.server._strangers))
        copy = os.dup(fd)
        sock.send(bytes(PASS_BYTES))
        pair.until(lambda: is_closed(sock), "its end")
        assert fd not in dict(pair.server._sockets.poll.poll(0))
        os.close(copy)


def test_a_port_that_is_busy_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(role=new_pair(), session=new_pair())
    with pytest.raises(ConfigError, match=f"{pair.server.endpoint}: Address already in use"):
        ServerStreams(pair.server.endpoint, role=Role.SERVER, keys=keys, limits=Limits())
    monkeypatch.setattr(socket, "create_server", lambda *_, **__: os.close(-1))
    with pytest.raises(ConfigError, match=r"for streams at 127\.0\.0\.1: .* without KVPS_STREAMS"):
        ServerStreams("tcp://127.0.0.1:0", role=Role.SERVER, keys=keys, limits=Limits())


@pytest.mark.spec("R457")
def test_a_member_has_one_stream(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerStreams, "_replace", lambda *_: None)  # its own streams it does not close
    pair.meet()
    other = WorkerStreams(None, role=Role.WORKER, **pair.options)
    other.connect(pair.to)
    for number in range(10, 20):
        before = list(pair.server._streams)
        ZmqTransport.send((other, pair.worker)[number % 2], NAME, Packet(WORKER, Probe((number,))), None)

        def is_replaced(before: list[Any] = before) -> bool:
            list(other.poll(0))
            streams_now = list(pair.server._streams)
            return streams_now != before and all(stream.is_up for stream in streams_now)

        pair.until(is_replaced, "another stream")
        assert len(pair.server._streams) == 1
    other.close(0.0)


@pytest.mark.spec("R459")
def test_where_no_memory_is_left_the_stream_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    route = pair.meet()

    def none_left(size: int) -> memoryview:
        raise MemoryError

    monkeypatch.setattr("kvps.net.links.framing.memory", none_left)
    pair.server.send(route, values(1 << 20), None)
    pair.until(lambda: not (pair.worker._streams or pair.server._streams), "the end of the stream")
    pair.ask(3)


@pytest.mark.spec("R203")
def test_of_unfinished_packets_the_largest_ends(pair: Pair) -> None:
    pair.server._links.limits = replace(pair.server._links.limits, members=9)
    streams_of = {}
    for size in (7, 1, 4, 3):
        connection, secret = stranger(pair), os.urandom(SECRET_BYTES)
        seals = AesSeal(secret, TO_WORKER), AesSeal(secret, TO_SERVER)
        made = pair.server._stream(connection, b"%d" % size, f"worker:{size}:1", seals)
        made.reader.unfinished = size
        streams_of[size] = made
    pair.server._links.look()
    assert list(pair.server._streams) == [streams_of[size] for size in (1, 4, 3)]


@pytest.mark.spec("R458")
def test_an_event_of_an_earlier_connection_turns_nobody_away(pair: Pair) -> None:
    with stranger(pair) as sock:
        pair.until(lambda: pair.server._strangers, "the stranger")
        pair.server._read_pass(next(iter(pair.server._strangers)))
        assert pair.server._strangers
        assert not is_closed(sock)


@pytest.mark.spec("R457")
def test_where_the_port_cannot_be_reached_packets_go_by_zeromq(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        pair.server.port = closed.getsockname()[1]
    pair.worker.connect(pair.to)
    route = pair.ask()
    pair.server.send(route, Packet(SERVER, Welcome(1, 7, 2, 1)), None)
    for number in range(2, 30):
        assert pair.ask(number) == route
    assert not pair.is_up
    assert not pair.worker._streams


@pytest.mark.spec("R457")
def test_a_connection_that_is_replaced_ends_its_stream(pair: Pair) -> None:
    pair.meet()
    first = pair.worker._streams[0]
    pair.worker.connect(pair.to)
    assert first not in pair.worker._streams
    pair.ask(3)
    pair.until(lambda: pair.is_up, "another stream")


@pytest.mark.spec("R455")
@pytest.mark.parametrize("harm", ["changed", "mute"])
def test_a_box_in_the_path_ends_the_stream_and_changes_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.setattr("kvps.net.links.stream.SILENCE_S", 1.0)
    monkeypatch.setattr(streams, "KNOCK_EVERY_S", 0.2)
    monkeypatch.setattr(zeromq, "LOOK_EVERY_S", 0.1)
    carried = Stream()
    with closing(TcpProxy(f"tcp://127.0.0.1:{pair.server.port}", lambda number: carried)) as box:
        pair.server.port = int(box.endpoint.rpartition(":")[2])
        pair.meet()
        if harm == "changed":
            carried.damage = True
            take = carried.take
            monkeypatch.setattr(carried, "take", lambda data: bytes([data[0] ^ 1]) + take(data)[1:])
        else:
            carried.is_mute = True
        pair.at_server.clear()
        pair.worker.send(NAME, Packet(WORKER, Probe((77,))), None)
        pair.until(lambda: not pair.worker._streams, "the end of the stream")
        assert not pair.at_server
        pair.worker.connect(pair.to)
        pair.ask(78)


@pytest.mark.spec("R458")
def test_a_thousand_strangers_stop_nobody(pair: Pair) -> None:
    pair.meet()
    said = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(PASS_BYTES), os.urandom(100_000), b"\0"]
    strangers = []
    for number in range(1000):
        sock = stranger(pair)
        sock.setblocking(False)
        sock.send(said[number % len(said)])
        strangers.append(sock)
        if number % 10 == 0:
            pair.poll()
    pair.ask(5)
    pair.until(lambda: len(pair.server._strangers) <= streams.STRANGERS_MAX, "most to be turned away")
    now = time.monotonic()
    pair.until(lambda: sum(map(is_closed, strangers)) == 1000, "all to be turned away")
    assert time.monotonic() < now + streams.STRANGER_S + 10
    assert pair.server.refused.connections["no_pass"] == 1000
    assert pair.is_up
    for sock in strangers:
        sock.close()


@pytest.mark.spec("R458")
def test_a_pass_is_good_for_one_connection(pair: Pair) -> None:
    pair.meet()
    ((_, shown),) = pair.server._places.values()
    with stranger(pair) as again:
        again.send(shown)
        pair.until(lambda: is_closed(again), "the end of the second")
    assert pair.is_up


@pytest.mark.spec("R455", "R458")
def test_a_pass_without_its_secret_opens_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerStreams, "_open", lambda *_: None)
    pair.worker.connect(pair.to)
    route = pair.ask()
    pair.server.send(route, Packet(SERVER, Welcome(1, 7, 2, 1)), None)
    pair.ask(2)
    ((_, shown),) = pair.server._places.values()
    with stranger(pair) as thief:
        thief.send(shown)
        pair.until(lambda: pair.server._streams, "a stream")
        thief.send((16).to_bytes(4, "big") + (16 ^ 0xFFFFFFFF).to_bytes(4, "big") + os.urandom(16))
        pair.until(lambda: is_closed(thief), "its end")
    assert not pair.server._links.by_route
    pair.ask(3)


@pytest.mark.spec("R454")
def test_a_member_speaks_for_itself_alone(pair: Pair) -> None:
    pair.meet()
    pair.worker.send(NAME, Packet(WORKER._replace(rank=3), Probe((9,))), None)
    with pytest.raises(Refused):
        pair.until(lambda: False, "a refusal")


@pytest.mark.spec("R459")
def test_a_peer_that_does_not_read_costs_no_more_than_the_limit(pair: Pair) -> None:
    route = pair.meet()
    unread = pair.server._links._unread_max_bytes
    answer = values(unread // 4)
    began = time.monotonic()
    for _ in range(40):
        pair.server.send(route, answer, None)
    (stream,) = pair.server._streams
    assert stream._copied_bytes <= unread
    assert pair.server.refused.packets["unread"] >= 30
    assert time.monotonic() < began + 20
    pair.at_worker.clear()
    pair.until(lambda: not stream.waiting, "all to leave")
    pair.server.send(route, values(8), None)
    pair.until(lambda: pair.at_worker and pair.at_worker[-1][1].payload[0].nbytes == 8, "the last")
    assert all(packet == answer for _, packet in pair.at_worker[:-1])


@pytest.mark.spec("R459")
def test_holds_are_released_when_a_stream_ends(pair: Pair) -> None:
    route, hold = pair.meet(), Hold()
    for _ in range(10):
        pair.server.send(route, values(4 << 20), hold)
    assert hold.count < 10
    (stream,) = pair.server._streams
    pair.server._links.end(stream, "it is over")
    assert hold.count == 10


@pytest.mark.spec("R458")
def test_an_offer_that_nobody_takes_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerStreams, "_open", lambda *_: None)
    monkeypatch.setattr(streams, "MADE_S", 0.2)
    monkeypatch.setattr(zeromq, "LOOK_EVERY_S", 0.1)
    pair.worker.connect(pair.to)
    pair.server.send(pair.ask(), Packet(SERVER, Welcome(1, 7, 2, 1)), None)
    pair.ask(2)
    assert pair.server._offers
    pair.until(lambda: not pair.server._offers, "its end")


@pytest.mark.spec("R458")
def test_nobody_who_was_not_welcomed_is_offered_a_stream(pair: Pair) -> None:
    pair.worker.connect(pair.to)
    for number in range(5):
        pair.ask(number)
    assert not pair.server._offers
    assert not pair.worker._streams


def test_answers_that_wait_leave_when_a_server_closes(pair: Pair) -> None:
    route = pair.meet()
    answer = Packet(SERVER, Probed((8,), ()))
    pair.server.send(route, answer, None)
    pair.server.close(1.0)
    pair.at_worker += list(pair.worker.poll(5.0))
    assert (NAME, answer) in pair.at_worker


@pytest.mark.spec("R457")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_push_counts_once_while_streams_break(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    for name, value in (("KVPS_STREAMS", "1"), ("KVPS_TRANSPORT", "tcp"), ("KVPS_CHUNK_BYTES", "64K")):
        monkeypatch.setenv(name, value)
    for module in ("connection", "call_table"):
        monkeypatch.setattr(f"kvps.core.worker.{module}.PROBE_AFTER_S", PROBE_AFTER_S)
    monkeypatch.setattr(links, "is_ours", lambda connection: False)
    servers, counts, ended = [], Counter[str](), threading.Event()
    create = ServerStreams.__init__

    def created(self: ServerStreams, *given: Any, **named: Any) -> None:
        create(self, *given, **named)
        servers.append(self)

    monkeypatch.setattr(ServerStreams, "__init__", created)

    def harm() -> None:
        chance = random.Random(3)
        while not ended.wait(chance.uniform(0.001, 0.02)):
            up = [stream for server in servers for stream in list(server._links.by_route.values())]
            if up:
                counts["broken"] += 1
                with suppress(OSError):
                    broken = chance.choice(up)
                    broken._connection.shutdown(socket.SHUT_RDWR)

    with kvps.LocalCluster(workers=2, servers=2) as cluster:
        thread = threading.Thread(target=harm)
        thread.start()
        try:
            cluster.run(lambda rank: train(mode, 12, rank))
        finally:
            ended.set()
            thread.join()
    assert counts["broken"] >= 2
