"""Packets over real sockets: routes, drops, holds, and bytes that are no packet."""

import contextlib
import socket
import threading
import time

import pytest
import torch
import zmq

from kvps.core.effects import Connect
from kvps.core.server.chunks.slab import Buffer
from kvps.errors import ConfigError, ProtocolError
from kvps.net.transport import Disconnected
from kvps.net.zeromq import ZmqTransport
from kvps.protocol.envelope import Envelope, Packet, Role
from kvps.protocol.membership import Beat, Probe, Probed, Stop
from kvps.protocol.publications import Octets, Read
from kvps.protocol.values import Pulled, Stand
from kvps.tensors import from_frame, to_frame
from tests.faults.streams import Stream, TcpProxy
from tests.integration.processes import until

ENVELOPE = Envelope(bytes(16), 0, Role.WORKER, 1, 1, 0)
SERVER = Envelope(bytes(16), 0, Role.SERVER, 0, 1, 0)
LOOPBACK = "tcp://127.0.0.1:0"


@pytest.fixture
def transports():
    opened: list[ZmqTransport] = []

    def make(*args, **options):
        opened.append(ZmqTransport(*args, **options))
        return opened[-1]

    yield make
    for item in opened:
        item.close(0.0)


def take(transport, deadline_s=10.0):
    """Return the next thing that ``transport`` receives."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        for item in transport.poll(0.05):
            return item
    raise AssertionError("nothing came")


def test_a_packet_goes_there_and_back(transports):
    server, worker = transports(LOOPBACK, role=Role.SERVER), transports()
    worker.connect(Connect("server 0", server.endpoint))
    worker.send("server 0", Packet(ENVELOPE, Probe((7,))), None)
    route, packet = take(server)
    assert packet == Packet(ENVELOPE, Probe((7,)))
    server.send(route, Packet(SERVER, Probed((8,), ())), None)
    name, answer = take(worker)
    assert name == "server 0"
    assert answer.message == Probed((8,), ())


class Left:
    """Counts what has left."""

    count = 0

    def release(self):
        self.count += 1


def test_relay_cannot_fill_the_memory_of_a_reader(transports):
    relay, reader = transports(LOOPBACK, role=Role.READER), transports(role=Role.READER)
    reader.connect(Connect("reader 0", relay.endpoint))
    envelope = Envelope(bytes(16), 0, Role.READER, 1, 1, 1)
    reader.send("reader 0", Packet(envelope, Read("policy", 1, 0, 0, 8)), None)
    route, _ = take(relay)
    size, left = 512 << 10, Left()
    for _ in range(200):  # of which the reader reads none
        relay.send(route, Packet(envelope, Octets(1, size), (memoryview(bytes(size)),)), left)
    end = time.monotonic() + 1.0
    while time.monotonic() < end and left.count < 150:
        assert not list(relay.poll(0.05))
    assert left.count < 150
    for _ in range(200):
        assert take(reader)[1].message == Octets(1, size)
        list(relay.poll(0.0))


def test_payload_is_held_until_it_is_read(transports):
    server, worker = transports(LOOPBACK, role=Role.SERVER), transports()
    worker.connect(Connect("server 0", server.endpoint))
    worker.send("server 0", Packet(ENVELOPE, Probe((1,))), None)
    route, _ = take(server)
    count = 1 << 18
    buffer = Buffer(torch.randn(count))
    message = Pulled(1, 1, 1, True, (Stand(0, count, 1, 1),))
    server.send(route, Packet(SERVER, message, (to_frame(buffer.tensor),)), buffer.hold())
    _, packet = take(worker)
    assert torch.equal(from_frame(packet.payload[0], "float32"), buffer.tensor)
    end = time.monotonic() + 10
    while buffer.holds and time.monotonic() < end:
        list(server.poll(0.01))
    assert buffer.holds == 0


def test_a_hold_is_released_where_nobody_listens(transports):
    server = transports(LOOPBACK, role=Role.SERVER)
    buffer = Buffer(torch.zeros(4))
    message = Pulled(1, 1, 1, True, (Stand(0, 4, 1, 1),))
    packet = Packet(SERVER, message, (to_frame(buffer.tensor),))
    server.send(b"nobody", packet, buffer.hold())
    server.send("server 9", packet, buffer.hold())
    assert buffer.holds == 0


def test_a_broken_connection_is_a_drop(transports):
    scheduler, member = transports(LOOPBACK, watch=True, role=Role.SCHEDULER), transports()
    member.connect(Connect("scheduler", scheduler.endpoint))
    member.send("scheduler", Packet(ENVELOPE, Beat(1)), None)
    route, _ = take(scheduler)
    member.close(0.0)
    dropped, what = take(scheduler)
    assert dropped == route
    assert isinstance(what, Disconnected)


def test_connecting_again_replaces(transports):
    first, two, worker = (
        transports(LOOPBACK, role=Role.SERVER),
        transports(LOOPBACK, role=Role.SERVER),
        transports(),
    )
    worker.connect(Connect("server 0", first.endpoint))
    worker.connect(Connect("server 0", two.endpoint))
    worker.send("server 0", Packet(ENVELOPE, Probe((1,))), None)
    take(two)
    assert list(first.poll(0.05)) == []


def test_message_along_the_former_connection_is_still_received(transports, monkeypatch):
    """The scheduler says STOP once, perhaps before it has heard the session's own connection."""
    monkeypatch.setattr("kvps.net.outgoing.FADE_S", 2.0)
    scheduler, member = transports(LOOPBACK, role=Role.SCHEDULER), transports()
    member.connect(Connect("scheduler", scheduler.endpoint))
    member.send("scheduler", Packet(ENVELOPE, Beat(1)), None)
    before, _ = take(scheduler)
    member.connect(Connect("scheduler", scheduler.endpoint, is_member=True))
    said = Packet(Envelope(bytes(16), 0, Role.SCHEDULER, 0, 0, 0), Stop(0, "the job is over"))
    scheduler.send(before, said, None)
    name, heard = take(member)
    assert (name, heard.message) == ("scheduler", said.message)
    member.send("scheduler", Packet(ENVELOPE, Beat(1)), None)
    after, _ = take(scheduler)
    assert after != before
    until(lambda: not list(member.poll(0.01)) and not member._outgoing._fading, "end of the first")
    scheduler.send(after, said, None)
    assert take(member)[0] == "scheduler"


def test_bytes_that_are_no_packet(transports):
    server = transports(LOOPBACK, role=Role.SERVER)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(server.endpoint)
        for frames in ([b"GET / HTTP/1.1"], [b"", b""], [b"x"] * 1000):
            stranger.send_multipart(frames)
            with pytest.raises(ProtocolError):
                take(server)
            assert [*server.poll(0.05)] == []  # the rest is dropped, and nothing is behind it


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
UNREADABLE = {
    "a greeting of another mechanism": (GREETING.replace(b"NULL", b"NUML"), b""),
    "a frame of 2^63 octets": (GREETING + READY, b"\x02\x7f" + b"\xff" * 7),
    "a frame over the limit": (GREETING + READY, b"\x02" + (1 << 30).to_bytes(8, "big")),
}
"""What a listener says to open a ZMTP connection, and after it has heard the other side."""


@pytest.mark.spec("R113")
@pytest.mark.parametrize("what", UNREADABLE)
def test_a_connection_whose_framing_cannot_be_read_is_opened_again(transports, what):
    """libzmq itself gives it up for good, and says so to nobody."""
    begins, breaks = UNREADABLE[what]
    member = transports()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        member.connect(Connect("server 0", f"tcp://127.0.0.1:{listener.getsockname()[1]}"))
        opened = []

        def is_opened_again():
            member.send("server 0", Packet(ENVELOPE, Probe((1,))), None)
            list(member.poll(0.01))
            with contextlib.suppress(TimeoutError):
                opened.append(listener.accept()[0])
                opened[-1].sendall(begins)
                opened[-1].recv(len(GREETING), socket.MSG_WAITALL)
                opened[-1].sendall(breaks)
            return len(opened) > 1

        until(is_opened_again, "second connection", 20.0)
        for item in opened:
            item.close()


@pytest.mark.spec("R222")
def test_a_frame_may_take_longer_than_a_silence(transports, monkeypatch):
    """libzmq hears nothing until all of it is there, and its heartbeat stands behind it."""
    monkeypatch.setattr("kvps.net.outgoing.DATA_HEARTBEAT_S", (0.2, 1.8))
    server, worker = transports(LOOPBACK, role=Role.SERVER), transports()
    slow = TcpProxy(server.endpoint, lambda place: Stream(bytes_per_s=1 << 20, piece_bytes=1 << 14))
    with contextlib.closing(slow):
        worker.connect(Connect("server 0", slow.endpoint, is_near=False))
        worker.send("server 0", Packet(ENVELOPE, Probe((7,))), None)
        route, _ = take(server)
        values = to_frame(torch.arange(1 << 20, dtype=torch.float32))
        answer = Pulled(1, 0, 1, True, (Stand(0, 1 << 20, 0, 0),))
        server.send(route, Packet(SERVER, answer, (values,)), None)
        _, packet = take(worker, 60.0)
        assert bytes(packet.payload[0]) == bytes(values)
        assert len(slow.streams) == 1, "it was cut, and opened again"


def test_a_busy_port_is_named(transports):
    server = transports(LOOPBACK, role=Role.SERVER)
    with pytest.raises(ConfigError, match=f"{server.endpoint}.*another kvps process"):
        ZmqTransport(server.endpoint)


@pytest.mark.parametrize("bind", ["127.0.0.1:80", "tcp://nohost.invalid:x", ""])
def test_an_address_that_is_none(bind):
    with pytest.raises(ConfigError, match="cannot listen"):
        ZmqTransport(bind)


def test_an_address_that_cannot_be_connected_to(transports):
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        transports().connect(Connect("scheduler", "here"))


def test_another_thread_wakes_a_waiting_poll(transports):
    server = transports(LOOPBACK, role=Role.SERVER)
    thread = threading.Thread(target=server.wake)
    thread.start()
    assert list(server.poll(10.0)) == []
    thread.join()
