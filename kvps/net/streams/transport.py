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
from select import EPOLLIN, EPOLLOUT, epoll
from typing import Any

from kvps.core.effects import Connect, Hold, Route
from kvps.core.limits import Limits
from kvps.errors import ConfigError, ProtocolError
from kvps.net import descriptors
from kvps.net.inflow import data_limits
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
LOOK_EVERY_S = 1.0
MADE_S = 10.0
"""A stream that is not in service after so many seconds is closed."""
TURN, READS = 64, 16
"""How many streams are served before the timers get their turn, and how many pieces of each are read."""
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

    def __init__(self, bind: str | None, *, limits: Limits, **options: Any) -> None:
        super().__init__(bind, limits=limits, **options)
        self._unread_max_bytes, self._limits = limits.unread, data_limits()
        self._epoll = epoll()
        self._sockets.poller.register(self._epoll.fileno(), EPOLLIN)
        self._looked_at = time.monotonic()
        self._streams: dict[int, Stream] = {}
        """By descriptor."""
        self._by_route: dict[Route, Stream] = {}
        """The ones that are in service."""

    _takes: Callable[[Route, Packet], bool]
    """A packet came along ZeroMQ: returns whether it ends here."""

    def _is_ready(self, fd: int) -> None:
        """A descriptor that is no stream's is ready."""

    def send(self, route: Route, packet: Packet, hold: Hold | None) -> None:
        """Send, or drop if there is no peer, or if the peer does not read."""
        stream = self._by_route.get(route)
        if stream is None:
            super().send(route, packet, hold)
            return
        copied = sum([frame.nbytes for frame in packet.payload]) if hold is None else 0
        if isinstance(route, bytes) and stream.is_full(copied, self._unread_max_bytes):
            self._doorman.counts["unread"] += 1
            if hold is not None:
                hold.release()
            return
        frames = self.encoding.encode(packet, checked=self._checksums)
        try:
            stream.send(frames, hold, copied)
        except (OSError, MemoryError) as error:
            self._finish(stream, str(error))

    def poll(self, timeout_s: float | None) -> Iterator[tuple[Route, Packet | Disconnected]]:
        """Wait up to ``timeout_s`` and yield what came, along ZeroMQ and along streams."""
        for route, packet in super().poll(timeout_s):
            if isinstance(packet, Disconnected) or not self._takes(route, packet):
                yield route, packet
        if (now := time.monotonic()) >= self._looked_at + LOOK_EVERY_S:
            self._look(now)
        for fd, event in self._epoll.poll(0, TURN):
            stream = self._streams.get(fd)
            if stream is None:
                self._is_ready(fd)
                continue
            for _ in range(READS):
                if self._streams.get(fd) is not stream or not self._serve(stream, event):
                    break
                if stream.come:
                    frames = stream.come.popleft()
                    heard = self._doorman.decode(stream.route, stream.as_messages(frames))
                    del frames
                    if heard is not None:
                        yield stream.route, heard
                    del heard
                event = EPOLLIN

    def close(self, linger_s: float) -> None:
        """Close all connections, giving what is queued ``linger_s`` to leave."""
        for stream in self._streams.values():
            stream.close()
        super().close(linger_s)
        self._epoll.close()

    # --- streams -----------------------------------------------------------------------------------

    def _stream(self, connection: socket.socket, route: Route, name: str, seals: Seals) -> Stream:
        stream = Stream(connection, route, name, seals, self._limits.known, self._epoll)
        self._streams[stream.fd] = stream
        return stream

    def _finish(self, stream: Stream, why: str) -> None:
        """Close a stream; without effect on one that is closed."""
        if self._streams.get(stream.fd) is stream:
            del self._streams[stream.fd]
            if self._by_route.get(stream.route) is stream:
                del self._by_route[stream.route]
            stream.close()
            log.info("the stream of %s ended, its packets go along ZeroMQ: %s", stream.name, why)

    def _serve(self, stream: Stream, event: int) -> bool:
        """Send and receive what can be; return whether more may have come."""
        try:
            if event & EPOLLOUT:
                stream.flush()
            if not event & ~EPOLLOUT or not stream.take():
                return False
            if stream.come and not stream.come[0]:
                stream.come.clear()
                if not stream.is_up and isinstance(stream.route, bytes):
                    stream.send(())
                stream.is_up = True
                self._by_route[stream.route] = stream
        except (OSError, ProtocolError, MemoryError) as error:
            self._finish(stream, str(error))
            return False
        return True

    def _look(self, now: float) -> None:
        """Close the streams that nobody needs, or that take too much."""
        self._looked_at = now
        unfinished = 0
        for stream in sorted(self._streams.values(), key=lambda stream: stream.reader.unfinished):
            unfinished += stream.reader.unfinished
            counted = moved(stream.fd)
            if not stream.is_up and now >= stream.since + MADE_S:
                self._finish(stream, "it was not in service in time")
            elif unfinished > self._limits.members:
                self._finish(stream, f"{unfinished} bytes of unfinished packets lie here")
            elif counted is not None and stream.pulse.is_dead(now, counted):
                self._finish(stream, "nothing moves along it")
            elif stream.is_up and not stream.waiting and now >= stream.knocked_at + KNOCK_EVERY_S:
                stream.knocked_at = now
                with suppress(OSError):  # it is found broken when it is read
                    stream.send(())


class ServerStreams(StreamTransport):
    """The transport of a server."""

    def __init__(self, bind: str | None, **options: Any) -> None:
        descriptors.demand("a server with streams", descriptors.LEAST + STRANGERS_MAX + 2)  # port and epoll
        super().__init__(None, **options)
        self._listeners: list[socket.socket] = []
        """The socket that listens for streams, once there is one."""
        self._places: dict[tuple[bytes, int, int], tuple[Route, bytes]] = {}
        """By job, rank and incarnation: the route by which a worker spoke last, and the pass of its offer."""
        self._offers: dict[bytes, tuple[bytes, Route, str, float]] = {}
        """By pass: the secret, the worker's route and name, and the time."""
        self._strangers: dict[int, tuple[socket.socket, float]] = {}
        """The connections that have shown no pass, and since when."""
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
        listener.setblocking(False)
        self._listeners.append(listener)
        self.port: int = listener.getsockname()[1]
        self._epoll.register(listener, EPOLLIN)

    def send(self, route: Route, packet: Packet, hold: Hold | None) -> None:
        """Send; a worker that is welcomed will be offered a stream."""
        super().send(route, packet, hold)
        envelope, message = packet.envelope, packet.message
        if type(message) is Welcome and isinstance(route, bytes):
            self._me = envelope._replace(seq=0)
            self._places.setdefault((envelope.job, message.rank, message.incarnation), (b"", b""))
            if len(self._places) > PLACES_MAX:
                del self._places[next(iter(self._places))]

    def close(self, linger_s: float) -> None:
        """Close all connections."""
        for connection in (*self._listeners, *[stranger for stranger, _ in self._strangers.values()]):
            hang_up(connection, self._epoll)
        super().close(linger_s)

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
            ZmqTransport.send(self, route, Packet(self._me, StreamAt(self.port, secret.hex())), None)
        return False

    def _is_ready(self, fd: int) -> None:
        """Accept connections, or read the pass of one."""
        for listener in self._listeners:
            if fd == listener.fileno():
                self._accept(listener)
        if (stranger := self._strangers.get(fd)) is None:
            return
        try:
            secret, route, name, _ = self._offers.pop(stranger[0].recv(PASS_BYTES))
            seals = AesSeal(secret, TO_WORKER), AesSeal(secret, TO_SERVER)
            made = self._stream(stranger[0], route, name, seals)
        except BlockingIOError:  # the event was of a connection that had this descriptor before
            return
        except (OSError, KeyError, MemoryError):
            self._turn_away(fd)
            return
        del self._strangers[fd]
        for stream in [stream for stream in self._streams.values() if stream.name == name]:
            if stream is not made:
                self._finish(stream, "another takes its place")

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(STRANGERS_MAX):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left; others may be free in a second
                self._epoll.modify(listener, 0)
                return
            connection.setblocking(False)
            if len(self._strangers) >= STRANGERS_MAX:
                self._turn_away(next(iter(self._strangers)))
            self._strangers[connection.fileno()] = connection, time.monotonic()
            try:
                self._epoll.register(connection, EPOLLIN)
            except OSError:  # no memory, or the kernel's limit of watches
                self._turn_away(connection.fileno())

    def _turn_away(self, fd: int) -> None:
        hang_up(self._strangers.pop(fd)[0], self._epoll)
        self._incoming.failures["no_pass"] += 1

    def _look(self, now: float) -> None:
        super()._look(now)
        for listener in self._listeners:
            self._epoll.modify(listener, EPOLLIN)
        for fd in [fd for fd, (_, since) in self._strangers.items() if now >= since + STRANGER_S]:
            self._turn_away(fd)
        self._offers = {shown: offer for shown, offer in self._offers.items() if now < offer[3] + MADE_S}


class WorkerStreams(StreamTransport):
    """The transport of a worker."""

    def __init__(self, bind: str | None, **options: Any) -> None:
        super().__init__(bind, **options)
        self._far: dict[str, str] = {}
        """By the name of a connection, the server's host if it is another."""

    def connect(self, to: Connect) -> None:
        """Open a connection; the stream of its name ends."""
        descriptors.demand(f"the connection to {to.to} and its stream", descriptors.CONNECTION + 1)
        super().connect(to)
        self._replace(to.to)
        self._far[to.to] = _host_of(to.endpoint) if to.is_near is False else ""

    def _takes(self, route: Route, packet: Packet) -> bool:
        """Open a stream, if one is offered."""
        offer = packet.message
        if type(offer) is not StreamAt:
            return False
        with suppress(ValueError, OSError, MemoryError):
            host, secret = ip_address(self._far[str(route)]), bytes.fromhex(offer.secret)
            if len(secret) == SECRET_BYTES and 0 < offer.port < 1 << 16:
                self._open(str(route), (str(host), offer.port), secret)
        return True

    def _open(self, route: str, at: tuple[str, int], secret: bytes) -> None:
        self._replace(route)
        connection = socket.socket(socket.AF_INET6 if ":" in at[0] else socket.AF_INET)
        connection.setblocking(False)
        connection.connect_ex(at)
        self._epoll.register(connection, EPOLLIN)
        seals = AesSeal(secret, TO_SERVER), AesSeal(secret, TO_WORKER)
        self._stream(connection, route, route, seals).show(pass_of(secret))

    def _replace(self, route: str) -> None:
        for stream in [stream for stream in self._streams.values() if stream.route == route]:
            self._finish(stream, "another takes its place")
