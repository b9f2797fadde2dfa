"""Those who talk to a port of kvps and are no part of it: octets on a socket, and packets of anybody."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from contextlib import suppress

import zmq

from kvps.protocol import wire
from kvps.protocol.envelope import Envelope, Message, Packet, Role

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LAST = 1, 0


def connection(endpoint: str) -> socket.socket:
    """Return a socket that is connected there."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), 10.0)


def throw(endpoint: str, octets: bytes) -> bytes:
    """Send these octets, hang up, and return what was answered."""
    with connection(endpoint) as sock, suppress(OSError):
        sock.settimeout(2.0)
        sock.sendall(octets)
        sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(4096), b""))
    return b""


def command(name: bytes, content: bytes = b"") -> bytes:
    """Return a command of ZMTP as it goes over the wire."""
    body = bytes([len(name)]) + name + content
    if len(body) < 256:
        return b"\x04" + bytes([len(body)]) + body
    return b"\x06" + struct.pack("!Q", len(body)) + body


def greeted(endpoint: str, routing_id: bytes | None = None) -> socket.socket:
    """Return a socket behind the handshake of a DEALER, which may ask for a routing id."""
    sock = connection(endpoint)
    sock.sendall(GREETING)
    _exactly(sock, 64)
    properties = b"\x0bSocket-Type" + struct.pack("!I", 6) + b"DEALER"
    if routing_id is not None:
        properties += b"\x08Identity" + struct.pack("!I", len(routing_id)) + routing_id
    sock.sendall(command(b"READY", properties))
    _exactly(sock, _exactly(sock, 2)[1])
    return sock


def frame(content: bytes, flag: int = LAST) -> bytes:
    """Return one frame as it goes over the wire."""
    if len(content) < 256:
        return bytes([flag, len(content)]) + content
    return bytes([flag | 2]) + struct.pack("!Q", len(content)) + content


def pour(endpoint: str, octets: bytes, limit: int) -> int:
    """Send the same octets again and again, until somebody hangs up; return how many went out."""
    sent = 0
    with greeted(endpoint) as sock:
        sock.settimeout(10.0)
        with suppress(OSError):
            while sent < limit:
                sock.sendall(octets)
                sent += len(octets)
    return sent


class Liar:
    """Packets of anybody, to one endpoint."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(endpoint)

    def say(
        self, envelope: Envelope, message: Message, payload: Iterable[bytes] = (), limit_ms: int = 300
    ) -> Packet | None:
        """Say it, and return the first answer; None if there is none for a while."""
        views = tuple([memoryview(frame) for frame in payload])
        self._dealer.send_multipart(wire.encode(Packet(envelope, message, views)))
        return self.heard(limit_ms)

    def heard(self, limit_ms: int = 300) -> Packet | None:
        """Return what comes next; None if nothing does for a while."""
        if not self._dealer.poll(limit_ms):
            return None
        return wire.decode(self._dealer.recv_multipart())

    def asked(self, envelope: Envelope, message: Message, payload: Iterable[bytes] = ()) -> Packet | None:
        """Say what is always answered, if later on a busy machine; return the answer."""
        return self.say(envelope, message, payload, 10_000)

    def close(self) -> None:
        """Hang up."""
        self._context.destroy(0)


def nobody(role: Role = Role.WORKER) -> Envelope:
    """Return the envelope of one who knows nothing."""
    return Envelope(bytes(16), 0, role, 0, 0, 1)


def _exactly(sock: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        more = sock.recv(count - len(got))
        assert more, "hung up during the handshake"
        got += more
    return got
