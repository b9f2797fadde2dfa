"""Packets of a worker and a server of two hosts along a stream, and along ZeroMQ where there is none.

A server offers a stream to each worker that it has welcomed: a port and a secret, said inside CURVE. The
worker connects to that port, shows the pass of the secret, and knocks. When an end has heard the other's
knock, its packets to it go along the stream. When that ends they go along ZeroMQ as before; what was lost
with it counts as lost.

The core knows nothing of this: the route is that of the ZeroMQ connection, and what comes is judged as if it
had come along that. Of a party without the pass 32 bytes are read, and nothing else.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from kvps.core.effects import Connect, Hold, Route
from kvps.errors import ConfigError
from kvps.net import descriptors
from kvps.net.links.stream import Stream, hang_up
from kvps.net.streams.seals import PASS_BYTES, SECRET_BYTES, TO_SERVER, TO_WORKER, AesSeal, Seals, pass_of
from kvps.net.tcp_watch import moved
from kvps.net.transport import Disconnected
from kvps.net.zeromq import ZmqTransport
from kvps.protocol.envelope import Packet, Role
from kvps.protocol.membership import Welcome
from kvps.protocol.permissions import name_of
from kvps.protocol.transports import StreamAt

log = logging.getLogger("kvps")
MADE_S = 10.0
"""A stream that is not in service after so many seconds is closed."""
STRANGERS_MAX = 64
STRANGER_S = 5.0
"""How many connections may not have shown a pass yet, and for how long."""
PLACES_MAX = 4096
"""How many workers, the last ones, are known to have been welcomed."""
KNOCK_EVERY_S = 5.0
"""How often each end knocks along an idle stream."""


def _host_of(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


class StreamTransport(ZmqTransport):
    """ZeroMQ, and streams where there are some. Arguments are as of :class:`ZmqTransport`; it has keys."""

    _takes: Callable[[Route, Packet], bool]
    """A packet came along another connection: returns whether it ends here."""

    def poll(self, timeout_s: float | None) -> Iterator[tuple[Route, Packet | Disconnected]]:
        """Wait up to ``timeout_s`` and yield what came, along ZeroMQ and along streams."""
        for route, packet in super().poll(timeout_s):
            if isinstance(packet, Disconnected) or not self._takes(route, packet):
                yield route, packet

    # --- streams -----------------------------------------------------------------------------------

    def _stream(self, connection: socket.socket, route: Route, name: str, seals: Seals) -> Stream:
        stream = self._links.new(route, name, seals=seals, on_knock=self._knocked)
        self._links.open(stream, connection)
        return stream

    @property
    def _streams(self) -> list[Stream]:
        return [stream for stream in self._links.by_fd.values() if not stream.is_near]

    def _knocked(self, stream: Stream) -> None:
        """A stream is in service, or still is."""
        if not stream.is_up and isinstance(stream.route, bytes):
            stream.send(())
        stream.is_up = True
        self._links.by_route[stream.route] = stream

    def _look(self, now: float) -> None:
        """Close the streams that nobody needs, besides."""
        super()._look(now)
        for stream in self._streams:
            counted = moved(stream.fd)
            if not stream.is_up and now >= stream.since + MADE_S:
                self._links.end(stream, "it was not in service in time")
            elif counted is not None and stream.pulse.is_dead(now, counted):
                self._links.end(stream, "nothing moves along it")
            elif stream.is_up and not stream.waiting and now >= stream.knocked_at + KNOCK_EVERY_S:
                stream.knocked_at = now
                stream.send(())


class ServerStreams(StreamTransport):
    """The transport of a server."""

    def __init__(self, bind: str | None, **options: Any) -> None:
        descriptors.demand("a server with streams", descriptors.LEAST + STRANGERS_MAX + 2)  # port and epoll
        super().__init__(None, **options)
        self._places: dict[tuple[bytes, int, int], tuple[Route, bytes]] = {}
        """By job, rank and incarnation: the route by which a worker spoke last, and the pass of its offer."""
        self._offers: dict[bytes, tuple[bytes, Route, str, float]] = {}
        """By pass: the secret, the worker's route and name, and the time."""
        self._strangers: dict[int, float] = {}
        """Since when there are connections that have shown no pass, by descriptor."""
        if bind is not None:
            self.listen(bind)
            self._listen_for_streams(_host_of(self.endpoint))

    def _listen_for_streams(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, 0), family=family, backlog=STRANGERS_MAX)
        except OSError as error:
            self.close(0.0)
            raise ConfigError(
                f"cannot listen for streams at {host}: {error}. Bind to an address of this host, "
                "or start without KVPS_STREAMS"
            ) from error
        self.port: int = listener.getsockname()[1]
        self._links.listen(listener, self._took)

    def send(self, route: Route, packet: Packet, hold: Hold | None) -> None:
        """Send; a worker that is welcomed will be offered a stream."""
        super().send(route, packet, hold)
        envelope, message = packet.envelope, packet.message
        if type(message) is Welcome and isinstance(route, bytes):
            self._me = envelope._replace(seq=0)
            self._places.setdefault((envelope.job, message.rank, message.incarnation), (b"", b""))
            if len(self._places) > PLACES_MAX:
                del self._places[next(iter(self._places))]

    def _takes(self, route: Route, packet: Packet) -> bool:
        """Offer a stream to a worker, once along each connection by which it speaks."""
        envelope = packet.envelope
        life = envelope.job, envelope.rank, envelope.incarnation
        spoke, shown = self._places.get(life, (route, b""))
        if spoke != route and isinstance(route, bytes) and envelope.role is Role.WORKER:
            self._offers.pop(shown, None)
            secret = os.urandom(SECRET_BYTES)
            self._places[life] = route, pass_of(secret)
            name = name_of(envelope.node, envelope.incarnation)
            self._offers[pass_of(secret)] = secret, route, name, time.monotonic()
            super().send(route, Packet(self._me, StreamAt(self.port, secret.hex())), None)
        return False

    def _read_pass(self, fd: int) -> None:
        """Read the pass of a connection."""
        try:
            secret, route, name, _ = self._offers.pop(os.read(fd, PASS_BYTES))
        except BlockingIOError:  # the event was of a connection that had this descriptor before
            return
        except (OSError, KeyError):
            self._turn_away(fd)
            return
        seals = AesSeal(secret, TO_WORKER), AesSeal(secret, TO_SERVER)
        stranger = self._forget(fd)
        for stream in [stream for stream in self._streams if stream.name == name]:
            self._links.end(stream, "another takes its place")
        try:
            self._stream(stranger, route, name, seals)
        except (OSError, MemoryError):
            stranger.close()

    def _forget(self, fd: int) -> socket.socket:
        """A connection is no stranger any more."""
        del self._strangers[fd]
        return self._links.forget(fd)

    def _took(self, connection: socket.socket) -> None:
        """A stranger has connected."""
        if len(self._strangers) >= STRANGERS_MAX:
            self._turn_away(next(iter(self._strangers)))
        self._strangers[connection.fileno()] = time.monotonic()
        self._links.watch(connection, self._read_pass)

    def _turn_away(self, fd: int) -> None:
        hang_up(self._forget(fd), self._sockets.poll)
        self._incoming.failures["no_pass"] += 1

    def _look(self, now: float) -> None:
        super()._look(now)
        for fd in [fd for fd, since in self._strangers.items() if now >= since + STRANGER_S]:
            self._turn_away(fd)
        self._offers = {shown: offer for shown, offer in self._offers.items() if now < offer[3] + MADE_S}


class WorkerStreams(StreamTransport):
    """The transport of a worker."""

    def connect(self, to: Connect) -> None:
        """Open a connection; the stream of its name ends."""
        descriptors.demand(f"the connection to {to.to} and its stream", descriptors.CONNECTION + 1)
        super().connect(to)
        self._replace(to.to)

    def _takes(self, route: Route, packet: Packet) -> bool:
        """Open a stream, if one is offered."""
        offer = packet.message
        if type(offer) is not StreamAt:
            return False
        to = self._outgoing.openings[str(route)]
        with suppress(ValueError, OSError, MemoryError):
            host, secret = ip_address(_host_of(to.endpoint)), bytes.fromhex(offer.secret)
            if to.is_near is False and len(secret) == SECRET_BYTES and 0 < offer.port < 1 << 16:
                self._open(str(route), (str(host), offer.port), secret)
        return True

    def _open(self, route: str, at: tuple[str, int], secret: bytes) -> None:
        self._replace(route)
        connection = socket.socket(socket.AF_INET6 if ":" in at[0] else socket.AF_INET)
        connection.setblocking(False)
        connection.connect_ex(at)
        seals = AesSeal(secret, TO_SERVER), AesSeal(secret, TO_WORKER)
        self._stream(connection, route, route, seals).show(pass_of(secret))

    def _replace(self, route: str) -> None:
        for stream in [stream for stream in self._streams if stream.route == route]:
            self._links.end(stream, "another takes its place")
