"""Packets over ZeroMQ: one ROUTER for those who come to us, one DEALER for each we go to.

What libzmq does not promise is not relied on here: a send that succeeded says nothing (only an
answer does), a routing id is an address (identity is in the envelope), and a queue is bounded by
the windows of the protocol, not by a water mark. What it does know first is that a connection
broke: with ``watch`` the events of the ROUTER's monitor are turned into drops, told apart by the
file descriptor that libzmq names on every message.

A network may do worse than to break. Packets that go by TCP have a checksum, and what does not
agree with its own is no packet. A connection that looks open and carries nothing is closed and
opened again by the one who opened it, who hears no answer to libzmq's heartbeats; its peer does not
judge by them, since a process that stands still is not lost for that. And a connection of which
libzmq could not read the framing it gives up for good, so that is opened again, too.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections import deque
from collections.abc import Iterator

import zmq
import zmq.utils.garbage  # its exit handler refuses sends without a copy: it must be known before ours
import zmq.utils.monitor

from kvps import wire
from kvps.core.effects import Hold, Route
from kvps.errors import ConfigError, ProtocolError
from kvps.messages import Packet
from kvps.net.driver import DROPPED, Dropped

BATCH = 64
"""Packets taken from one socket before the others, and the timers, get their turn."""

_OPTIONS: tuple[tuple[int, int], ...] = (
    (zmq.LINGER, 0),
    (zmq.SNDHWM, 0),  # the protocol's windows bound what is under way
    (zmq.RCVHWM, 0),
    (zmq.MAXMSGSIZE, wire.FRAME_BYTES_MAX),  # per frame, checked by libzmq before it allocates
    (zmq.HANDSHAKE_IVL, 5_000),
    (zmq.CONNECT_TIMEOUT, 5_000),
    (zmq.RECONNECT_IVL, 100),
    (zmq.RECONNECT_IVL_MAX, 2_000),
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 30),
    (zmq.BACKLOG, 1024),
)
CONTROL_HEARTBEAT_S = 2.0, 4.0
DATA_HEARTBEAT_S = 5.0, 15.0
"""How often the opener of a TCP connection asks whether it carries anything, and how long nothing may
come then. To the scheduler both together leave room before the silence for which it gives a member up;
with payload they allow for a frame that takes as long, and for megabytes that are under way before."""


class ZmqTransport:
    """The sockets of one process. ``endpoint`` is where it can be reached, if it listens."""

    def __init__(
        self, bind: str | None = None, watch: bool = False, *, checksums: bool = True
    ) -> None:
        """Open none yet, but a place to listen if one is given.

        Args:
            bind: as :meth:`listen` has it.
            watch: as :meth:`listen` has it.
            checksums: whether what leaves by TCP has one. What comes with one is checked anyway.

        Raises:
            ConfigError: if that cannot be.
        """
        self._checksums = checksums
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._names: dict[zmq.Socket[bytes], str] = {}
        self._openings: dict[str, tuple[str, bool | None]] = {}
        """To where each connection was opened, and whether that is near."""
        self._router: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._routes: dict[int, Route] = {}
        self._held: deque[tuple[zmq.MessageTracker, Hold]] = deque()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._poller.register(self._woken, zmq.POLLIN)
        self.endpoint = ""
        if bind is not None:
            self.listen(bind, watch)

    def listen(self, endpoint: str, watch: bool = False) -> None:
        """Take connections at ``endpoint``; ``watch`` those that break. Once for each transport.

        Raises:
            ConfigError: if that cannot be.
        """
        assert self._router is None, "one place to listen is enough"
        router = self._socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if watch:
            self._monitor = router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._poller.register(self._monitor, zmq.POLLIN)
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            router.disable_monitor()
            self.close(0.0)
            raise ConfigError(
                f"cannot listen on {endpoint}: {os.strerror(error.errno or 0)}. Is another kvps process running "
                "there? Choose another port with --bind, or port 0 for a free one"
            ) from error
        self.endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._router = router
        self._poller.register(router, zmq.POLLIN)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        one = self._context.socket(kind)
        for option, value in _OPTIONS:
            one.setsockopt(option, value)
        return one

    def connect(self, name: str, endpoint: str, is_near: bool | None = None) -> None:
        """Open a connection that is called ``name`` from now on; replaces one of that name."""
        old = self._dealers.pop(name, None)
        if old is not None:
            self._poller.unregister(old)
            del self._names[old]
            old.close(0)
        dealer = self._socket(zmq.DEALER)
        if _is_wire(endpoint):
            every_s, silence_s = CONTROL_HEARTBEAT_S if is_near is None else DATA_HEARTBEAT_S
            dealer.setsockopt(zmq.HEARTBEAT_IVL, int(every_s * 1000))
            dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(silence_s * 1000))
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            dealer.close(0)
            raise ConfigError(
                f"{endpoint!r} is no address of {name}: {error.strerror}. Write it as "
                "tcp://HOST:PORT"
            ) from error
        self._openings[name] = endpoint, is_near
        self._dealers[name] = dealer
        self._names[dealer] = name
        self._poller.register(dealer, zmq.POLLIN)

    def send(self, route: Route, packet: Packet, hold: Hold | None) -> None:
        """Send, or drop if there is nobody."""
        if isinstance(route, bytes):
            target, endpoint = self._router, self.endpoint
        else:
            target, (endpoint, _) = self._dealers.get(route), self._openings.get(route, NOWHERE)
        frames = wire.encode(packet, checked=self._checksums and _is_wire(endpoint))
        if isinstance(route, bytes):
            frames.insert(0, route)
        tracker = None
        if target is not None:
            try:
                tracker = target.send_multipart(
                    frames, zmq.NOBLOCK, copy=not packet.payload, track=hold is not None
                )
            except zmq.Again:  # no queue is ever full: there is none, as libzmq has given up
                if isinstance(route, str):
                    self.connect(route, *self._openings[route])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
        if hold is not None:
            if tracker is None or tracker.done:
                hold.release()
            else:
                self._held.append((tracker, hold))

    def poll(self, timeout_s: float | None) -> Iterator[tuple[Route, Packet | Dropped]]:
        """Wait up to ``timeout_s`` and yield what came."""
        ready = dict(self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))
        self._release()
        if ready.pop(self._woken.fileno(), None):
            with contextlib.suppress(BlockingIOError):
                while self._woken.recv(4096):
                    pass
        if self._monitor is not None and self._monitor in ready:
            yield from self._drops()
        if self._router is not None and self._router in ready:
            yield from self._receive(self._router, None)
        for one in ready:
            name = self._names.get(one) if isinstance(one, zmq.Socket) else None
            if name is not None:
                yield from self._receive(one, name)

    def _receive(self, one: zmq.Socket[bytes], name: str | None) -> Iterator[tuple[Route, Packet]]:
        for _ in range(BATCH):
            if one.closed:  # what came before led to a new connection in its place
                return
            try:
                frames = one.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if name is not None:
                yield name, self._decode(name, frames)
                continue
            route = frames[0].bytes
            if self._monitor is not None and len(frames) > 1:
                self._routes[frames[1].get(zmq.SRCFD)] = route
            yield route, self._decode(route, frames[1:])

    def _decode(self, route: Route, frames: list[zmq.Frame]) -> Packet:
        try:
            return wire.decode([frame.buffer for frame in frames])
        except ProtocolError as error:
            whence = route if isinstance(route, str) else _address_of(frames)
            raise type(error)(f"{error} (from {whence})") from None

    def _drops(self) -> Iterator[tuple[Route, Dropped]]:
        assert self._monitor is not None
        while self._monitor.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self._monitor, zmq.NOBLOCK)
            route = self._routes.pop(event["value"], None)
            if route is not None:
                yield route, DROPPED

    def _release(self) -> None:
        while self._held and self._held[0][0].done:
            self._held.popleft()[1].release()

    def wake(self) -> None:
        """Make a waiting :meth:`poll` return; any thread may call this."""
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")

    def close(self, linger_s: float) -> None:
        """Close all sockets, giving what is queued ``linger_s`` to leave."""
        if self._monitor is not None and self._router is not None:
            self._router.disable_monitor()
            self._monitor = None
        self._context.destroy(linger=int(linger_s * 1000))
        self._waker.close()
        self._woken.close()


NOWHERE = "", None


def _is_wire(endpoint: str) -> bool:
    """Whether what goes there leaves this process's memory for good, and may come out changed."""
    return endpoint.startswith("tcp:")


def _address_of(frames: list[zmq.Frame]) -> str:
    """Return the address of the host that sent these, as far as libzmq tells."""
    try:
        return str(frames[0].get("Peer-Address"))
    except (IndexError, zmq.ZMQError):
        return "an unknown host"
