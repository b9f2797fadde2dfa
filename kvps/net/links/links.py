"""The connections of one process that are not libzmq's: links within this host, and streams to other hosts.

A *near link* is a Unix socket between two processes of one user, who could read each other's memory. It takes
the place of a ZeroMQ connection: nothing is sealed, no thread stands between, and a packet takes one system
call at each end. The kernel says at both ends whose process is at the other. A process that listens for near
links has a name in the kernel, which is no file; where nobody of our own user listens, packets go by ZeroMQ.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from select import POLLIN, POLLOUT, poll
from typing import Any

from kvps.core.effects import Route
from kvps.core.key_roles import name_of_user
from kvps.errors import ProtocolError
from kvps.net.inflow import data_limits
from kvps.net.links.framing import memory
from kvps.net.links.stream import AHEAD_BYTES, BATCH, Stream, hang_up
from kvps.net.sockets import Sockets

READS = 16
"""How many pieces of one connection are received before the others get their turn."""
NEAR = "ipc://@"
"""The beginning of an endpoint where a process listens for near links alone."""
AGAIN_S = 0.1
"""How often it is tried again to reach a process that does not listen yet."""
BACKLOG = 1024
_CREDENTIALS = struct.Struct("@iii")
"""Format of ``struct ucred``: process, user and group of the other end."""


class Links:
    """The links and streams of one process.

    Args:
        sockets: of this process.
        unread_max_bytes: how much that was copied for it may wait to be read by one peer.
        on_end: is told of each that ended, and why.
    """

    def __init__(
        self, sockets: Sockets, unread_max_bytes: int, on_end: Callable[[Stream, str], None]
    ) -> None:
        self._poller, self._on_end, self.limits = sockets.poll, on_end, data_limits()
        self._unread_max_bytes = unread_max_bytes
        self.by_fd: dict[int, Stream] = {}
        self.by_route: dict[Route, Stream] = {}
        """The ones along which packets are sent."""
        self._others: dict[int, tuple[socket.socket, Callable[[int], None]]] = {}
        """By descriptor the connections that are none of these yet, and the sockets that listen, with what is
        called when one is ready."""
        self.behind: dict[Stream, None] = {}
        """Those of which packets have come that are not served yet."""
        self._ahead = memory(AHEAD_BYTES)
        self.refused: Counter[str] = Counter()
        """How many near links were refused: ``other_user``."""
        self._name = name_of_user(os.geteuid())
        self._count = 0
        """How many near links others have opened."""
        self._absent: dict[Stream, str] = {}
        """Near links to those that do not listen yet, and their endpoints."""
        self.due = math.inf
        """When it is tried again to reach those."""

    def new(self, route: Route, name: str, **options: Any) -> Stream:
        """Return a stream along no connection yet; arguments are as of :class:`Stream`."""
        known, unread = self.limits.known, self._unread_max_bytes
        return Stream(route, name, known, unread, self._poller, self._ahead, **options)

    def open(self, stream: Stream, connection: socket.socket) -> None:
        """Have a stream send and receive along a connection."""
        stream.open(connection)
        self.by_fd[stream.fd] = stream

    def end(self, stream: Stream, why: str = "") -> None:
        """Close a stream, and tell of it if there is a reason; without effect if it is closed."""
        was_open = self.by_fd.pop(stream.fd, None) is not None
        if self.by_route.get(stream.route) is stream:
            del self.by_route[stream.route]
        self.behind.pop(stream, None)
        stream.close()
        if was_open and why:
            self._on_end(stream, why)

    def listen(self, listener: socket.socket, took: Callable[[socket.socket], None]) -> None:
        """Give ``took`` each connection that others make to a socket, which listens."""
        listener.setblocking(False)
        self.watch(listener, lambda fd: self._accept(listener, took))

    def watch(self, source: socket.socket, ready: Callable[[int], None]) -> None:
        """Have ``ready`` called with the descriptor of a socket when there is something to read."""
        self._others[source.fileno()] = source, ready
        self._poller.register(source, POLLIN)

    def forget(self, fd: int) -> socket.socket:
        """Watch a socket no longer, and return it."""
        self._poller.unregister(fd)
        return self._others.pop(fd)[0]

    def _accept(self, listener: socket.socket, took: Callable[[socket.socket], None]) -> None:
        for _ in range(BATCH):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left; others may be free in a second
                self._poller.modify(listener, 0)
                return
            connection.setblocking(False)
            took(connection)

    def receive(self, events: list[tuple[int, int]]) -> None:
        """Serve the ready descriptors: send and receive what can be, up to a packet that is whole."""
        for fd, event in events:
            stream = self.by_fd.get(fd)
            if stream is None:
                if fd in self._others:
                    self._others[fd][1](fd)
                continue
            if stream in self.behind:
                continue
            try:
                if event & POLLOUT:
                    stream.flush()
                if event != POLLOUT:
                    for _ in range(READS):
                        if not stream.take() or stream.come:
                            break
                if stream.come:
                    self.behind[stream] = None
            except (OSError, ProtocolError, MemoryError) as error:
                self.end(stream, str(error))

    def look(self) -> None:
        """End those whose unfinished packets take too much, the largest first; take connections again."""
        for fd in self._others:
            self._poller.modify(fd, POLLIN)
        unfinished = 0
        for stream in sorted(self.by_fd.values(), key=lambda stream: stream.reader.unfinished):
            unfinished += stream.reader.unfinished
            if unfinished > self.limits.members:
                self.end(stream, f"{unfinished} bytes of unfinished packets lie here")

    def close(self, linger_s: float) -> None:
        """Close all, giving what waits ``linger_s`` to leave, and listen no more."""
        while self._others:
            hang_up(self._others.popitem()[1][0], self._poller)
        end = time.monotonic() + linger_s
        while leaving := [stream for stream in self.by_fd.values() if stream.waiting]:
            room, left_s = poll(), end - time.monotonic()
            for stream in leaving:
                room.register(stream.fd, POLLOUT)
            if left_s <= 0 or not (ready := room.poll(left_s * 1000)):
                break
            for fd, _ in ready:
                self.by_fd[fd].flush()
        for stream in [*self.by_fd.values(), *self.by_route.values()]:
            self.end(stream)

    # --- near links ---------------------------------------------------------------------------------

    def listen_near(self, endpoint: str) -> bool:
        """Take links at an endpoint; return whether that can be."""
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(_address(endpoint))
            listener.listen(BACKLOG)
        except OSError:  # another has it, or this is no Linux
            listener.close()
            return False
        self.listen(listener, self._took_near)
        return True

    def connect(self, route: Route, endpoint: str, waits: bool = False, at_once: bool = True) -> bool:
        """Open a link to the process of our own user that listens at an endpoint.

        Args:
            route: along which its packets come and go.
            endpoint: of the listener.
            waits: for a process that does not listen yet, which is tried again and again.
            at_once: it is tried now, too.

        Returns:
            Whether packets go along it from now on.
        """
        self.disconnect(route)
        stream = self.new(route, self._name)
        if not at_once or not self._reach(stream, endpoint):
            if not waits:
                return False
            self._absent[stream] = endpoint
            self.due = time.monotonic() + AGAIN_S
        self.by_route[route] = stream
        return True

    def disconnect(self, route: Route) -> None:
        """Close the link that was opened here, if there is one."""
        stream = self.by_route.get(route)
        if stream is not None and stream.is_near:
            self._absent.pop(stream, None)
            self.end(stream)

    def look_for(self, now: float) -> None:
        """Try again to reach those that do not listen yet."""
        self._absent = dict([entry for entry in self._absent.items() if not self._reach(*entry)])
        self.due = now + AGAIN_S if self._absent else math.inf

    def _reach(self, stream: Stream, endpoint: str) -> bool:
        """Have a link connected, if a process of our own user listens at its endpoint."""
        with suppress(OSError, ValueError):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                connection.connect(_address(endpoint))
                if is_ours(connection):
                    self.open(stream, connection)
                    return True
            finally:
                if stream.fd < 0:
                    connection.close()
        return False

    def _took_near(self, connection: socket.socket) -> None:
        """A process has connected."""
        if not is_ours(connection):
            self.refused["other_user"] += 1
            connection.close()
            return
        self._count += 1
        route = b"\0" + self._count.to_bytes(8, "big")  # of a ROUTER, those that begin so have 5 bytes
        stream = self.by_route[route] = self.new(route, self._name)
        self.open(stream, connection)


def _address(endpoint: str) -> str:
    return "\0" + endpoint.removeprefix(NEAR)


def is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is of our own user."""
    if not hasattr(socket, "SO_PEERCRED"):
        return False
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(told)[1] == os.geteuid())
