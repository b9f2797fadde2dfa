"""Packets over ZeroMQ: one ROUTER for those who come to us, one DEALER for each we go to.

What libzmq does not promise is not relied on here: a send that succeeded says nothing (only an
answer does), a routing id is an address (identity is in the envelope), and a queue is bounded by
the windows of the protocol, not by a water mark. What it does know first is that a connection
broke: with ``watch`` the events of the ROUTER's monitor are turned into drops, told apart by the
file descriptor that libzmq names on every message.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections import deque
from collections.abc import Iterator

import zmq
import zmq.utils.monitor

from kvps import wire
from kvps.core.effects import Hold, Route
from kvps.errors import ConfigError
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


class ZmqTransport:
    """The sockets of one process. ``endpoint`` is where it can be reached, if it listens."""

    def __init__(self, bind: str | None = None, watch: bool = False) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._names: dict[zmq.Socket[bytes], str] = {}
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
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            dealer.close(0)
            raise ConfigError(
                f"{endpoint!r} is no address of {name}: {error.strerror}. Write it as "
                "tcp://HOST:PORT"
            ) from error
        self._dealers[name] = dealer
        self._names[dealer] = name
        self._poller.register(dealer, zmq.POLLIN)

    def send(self, route: Route, packet: Packet, hold: Hold | None) -> None:
        """Send, or drop if there is nobody."""
        frames = wire.encode(packet)
        target = self._dealers.get(route) if isinstance(route, str) else self._router
        if isinstance(route, bytes):
            frames.insert(0, route)
        tracker = None
        if target is not None:
            with contextlib.suppress(zmq.Again):
                try:
                    tracker = target.send_multipart(
                        frames, zmq.NOBLOCK, copy=not packet.payload, track=hold is not None
                    )
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
            try:
                frames = one.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if name is not None:
                yield name, wire.decode([frame.buffer for frame in frames])
                continue
            route = frames[0].bytes
            if self._monitor is not None and len(frames) > 1:
                self._routes[frames[1].get(zmq.SRCFD)] = route
            yield route, wire.decode([frame.buffer for frame in frames[1:]])

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
