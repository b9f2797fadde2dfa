"""One stream: a connection that neither blocks the loop nor keeps more than its limits."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from select import EPOLLIN, EPOLLOUT, epoll
from types import SimpleNamespace
from typing import cast

import zmq

from kvps.core.effects import Hold, Route
from kvps.net.links.framing import Buffer, Reader, Writer, rest_of
from kvps.net.streams.seals import Seals
from kvps.net.tcp_watch import Pulse

WAITING_MAX = 16384
"""Packets that wait to leave to a worker."""
BATCH = 64
"""Pieces that leave along one stream before the loop goes on."""
SILENCE_S = 20.0
"""A stream is ended along which nothing moves for so long."""


def hang_up(connection: socket.socket, epoll: epoll) -> None:
    """Close a connection, also where a process that was forked has a copy of its descriptor.

    Such a copy keeps the connection open, and has ``epoll`` tell of it for ever, unless both are ended first.
    """
    with suppress(OSError, ValueError):
        epoll.unregister(connection)
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Stream:
    """One connection.

    Args:
        connection: made, or being made.
        route: along which its packets come and go, as far as the core is concerned.
        name: of the process at the other end, as the porter has it.
        seals: for what goes and what comes.
        payload_bytes_max: the most payload of one packet that comes.
        epoll: waits for it.
    """

    def __init__(
        self,
        connection: socket.socket,
        route: Route,
        name: str,
        seals: Seals,
        payload_bytes_max: int,
        epoll: epoll,
    ) -> None:
        self.route, self.name = route, name
        self.is_up = False
        """The other end has knocked."""
        self.since = self.knocked_at = time.monotonic()
        self.pulse = Pulse(SILENCE_S, self.since)
        self.come: deque[list[memoryview]] = deque()
        """The packets that came, as frames; no frames for a knock."""
        self.reader = Reader(seals[1], payload_bytes_max, self.come.append)
        self._connection, self._epoll, self._writer = connection, epoll, Writer(seals[0])
        self._pieces = self.reader.pieces()
        self._piece = next(self._pieces)
        """The part of the piece being received that is still to be filled."""
        self.waiting: deque[tuple[Sequence[Buffer], Hold | None, int]] = deque()
        """The packets that wait to leave, with their holds, and their bytes where there is none."""
        self._copied_bytes = 0
        """Bytes that wait to leave and have no hold."""
        self._record: Iterator[list[Buffer]] | None = None
        """The rest of the first packet that waits, if it has begun to leave."""
        self._leaving: list[Buffer] = []
        self._is_stuck = False
        """There is no room in the kernel."""
        self.fd = connection.fileno()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def is_full(self, copied_bytes: int, bytes_max: int) -> bool:
        """Whether a peer is not to get another packet, as it does not read what waits for it."""
        waits = self._copied_bytes
        return len(self.waiting) >= WAITING_MAX or (waits > 0 and waits + copied_bytes > bytes_max)

    def show(self, what: bytes) -> None:
        """Send the pass in clear text, and knock, when the connection is made."""
        self._leaving, self._record, self._is_stuck = [what], iter(()), True
        self._epoll.modify(self.fd, EPOLLIN | EPOLLOUT)
        self.waiting += ((), None, 0), ((), None, 0)

    def send(self, frames: Sequence[Buffer], hold: Hold | None = None, copied_bytes: int = 0) -> None:
        """Send a packet, or a knock if there are no frames: now or when there is room.

        Raises:
            OSError: if the connection is broken.
        """
        self.waiting.append((frames, hold, copied_bytes))
        self._copied_bytes += copied_bytes
        if not self._is_stuck:
            self.flush()

    def flush(self) -> None:
        """Send as much as there is room for.

        Raises:
            OSError: if the connection is broken.
        """
        with suppress(BlockingIOError):
            for _ in range(BATCH):
                if not self._leaving and not self._go_on():
                    break
                self._leaving = rest_of(self._leaving, self._connection.sendmsg(self._leaving))
        if self._is_stuck != bool(self.waiting):
            self._is_stuck = not self._is_stuck
            self._epoll.modify(self.fd, EPOLLIN | EPOLLOUT * self._is_stuck)

    def _go_on(self) -> bool:
        """Take the next bytes to send; return whether there are any."""
        while self.waiting:
            if self._record is None:
                self._record = self._writer.record(self.waiting[0][0])
            self._leaving = next(self._record, [])
            if self._leaving:
                return True
            self._record = None
            self._left()
        return False

    def _left(self) -> None:
        _, hold, copied_bytes = self.waiting.popleft()
        self._copied_bytes -= copied_bytes
        if hold is not None:
            hold.release()

    def take(self) -> bool:
        """Receive some bytes; return whether there were any.

        Raises:
            OSError: if the connection is broken.
            ProtocolError: if what came is no record.
        """
        try:
            count = self._connection.recv_into(self._piece)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionResetError("its other end has closed it")
        self._piece = self._piece[count:]
        if not len(self._piece):
            self._piece = next(self._pieces)
        return True

    def as_messages(self, frames: list[memoryview]) -> list[zmq.Frame]:
        """Return a packet's frames as those of a message along ZeroMQ."""
        said = {"User-Id": self.name, "Peer-Address": self.name}
        return cast(
            "list[zmq.Frame]", [SimpleNamespace(buffer=frame, get=said.__getitem__) for frame in frames]
        )

    def close(self) -> None:
        """End it; what waits is let go."""
        hang_up(self._connection, self._epoll)
        while self.waiting:
            self._left()
