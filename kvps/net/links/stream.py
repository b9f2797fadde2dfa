"""One link or stream: a connection that neither blocks the loop nor keeps more than its limits."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from select import POLLIN, POLLOUT, poll
from typing import Any

from kvps.core.effects import Hold, Route
from kvps.net.links.framing import Buffer, Reader, pieces_of, record_of, rest_of, whole_record
from kvps.net.tcp_watch import Pulse

WAITING_MAX = 16384
"""Packets that wait to leave along one connection."""
BATCH = 64
"""Pieces that leave along one connection before the loop goes on."""
AHEAD_BYTES = 64 << 10
"""Bytes that are received at once where less is missing."""
SILENCE_S = 20.0
"""A stream is ended along which nothing moves for so long."""


def hang_up(connection: socket.socket, poller: poll) -> None:
    """Close a connection, also where a process that was forked has a copy of its descriptor.

    Such a copy keeps the connection open, unless it is ended first.
    """
    with suppress(KeyError, ValueError):
        poller.unregister(connection)
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Stream:
    """One connection.

    Args:
        route: along which its packets come and go, as far as the core is concerned.
        name: of the process at the other end, as packets are judged by it.
        payload_bytes_max: the most payload of one packet that comes.
        unread_max_bytes: how much that was copied for it may wait to be read by the other end.
        poller: waits for it.
        ahead: memory for what is received at once where less is missing.
        seals: for what goes and what comes; None for a link within this host.
        on_knock: is called with this object when the other end has knocked.
    """

    fd = -1
    """The descriptor of the connection; negative while there is none."""

    def __init__(
        self,
        route: Route,
        name: str,
        payload_bytes_max: int,
        unread_max_bytes: int,
        poller: poll,
        ahead: memoryview,
        seals: tuple[Any, Any] = (None, None),
        on_knock: Callable[[Stream], None] = lambda stream: None,
    ) -> None:
        self.route, self.name = route, name
        self.is_up = self.is_near = seals[1] is None
        """The other end has knocked, or is on this host, where nothing stands between."""
        self.since = self.knocked_at = time.monotonic()
        self.pulse = Pulse(SILENCE_S, self.since)
        self.come: deque[list[memoryview]] = deque()
        """The packets that came, as frames."""
        self.reader = Reader(seals[1], payload_bytes_max, self._came)
        self._poller, self._ahead, self._seal = poller, ahead, seals[0]
        self._unread_max_bytes, self._on_knock = unread_max_bytes, on_knock
        self.get = {"User-Id": name, "Peer-Address": name}.__getitem__
        """Returns what libzmq says of a message: by which name it came, and from where."""
        self.has_heard = False
        """Something has come along it."""
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
        self._is_stuck = True
        """There is no room in the kernel, or no connection yet."""

    def open(self, connection: socket.socket) -> None:
        """Send and receive along a connection, which is made or being made."""
        self._connection, self.fd = connection, connection.fileno()
        if not self.is_near:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._is_stuck = bool(self.waiting)
        self._poller.register(connection, POLLIN | POLLOUT * self._is_stuck)

    def _came(self, frames: list[memoryview]) -> None:
        if frames:
            self.come.append(frames)
        else:
            self._on_knock(self)

    def show(self, what: bytes) -> None:
        """Send the pass in clear text, and knock, when the connection is made."""
        self._leaving, self._record, self._is_stuck = [what], iter(()), True
        self._poller.modify(self.fd, POLLIN | POLLOUT)
        self.waiting += ((), None, 0), ((), None, 0)

    def send(self, frames: Sequence[Buffer], hold: Hold | None = None, copied_bytes: int = 0) -> bool:
        """Send a packet, or a knock if there are no frames: now or when there is room.

        Args:
            frames: of the packet.
            hold: is released when the packet has left, or is dropped.
            copied_bytes: of it, that are in memory of their own.

        Returns:
            False if it is dropped, as the other end does not read what waits for it.
        """
        if self._is_stuck:
            waits = self._copied_bytes
            if len(self.waiting) >= WAITING_MAX or 0 < waits > self._unread_max_bytes - copied_bytes:
                if hold is not None:
                    hold.release()
                return False
        elif self.is_near:
            leaving = record_of(frames)
            try:
                count = self._connection.sendmsg(leaving, (), socket.MSG_NOSIGNAL)
            except OSError:  # if this is more than a lack of room, the next attempt fails, too
                count = 0
            if count == sum(map(len, leaving)):
                if hold is not None:
                    hold.release()
                return True
            self._leaving, self._record = rest_of(leaving, count), iter(())
        self.waiting.append((frames, hold, copied_bytes))
        self._copied_bytes += copied_bytes
        if not self._is_stuck:
            self.flush()
        return True

    def flush(self) -> None:
        """Send as much as there is room for.

        Along a broken connection nothing leaves. What has come along it is still read, and then its end.
        """
        try:
            for _ in range(BATCH):
                if not self._leaving and not self._go_on():
                    break
                sent = self._connection.sendmsg(self._leaving, (), socket.MSG_NOSIGNAL)
                self._leaving = rest_of(self._leaving, sent)
        except BlockingIOError:
            pass
        except (OSError, MemoryError):
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._let_go()
        if self._is_stuck != bool(self.waiting):
            self._is_stuck = not self._is_stuck
            self._poller.modify(self.fd, POLLIN | POLLOUT * self._is_stuck)

    def _go_on(self) -> bool:
        """Take the next bytes to send; return whether there are any."""
        while self.waiting:
            if self._record is None:
                self._record = pieces_of(self.waiting[0][0], self._seal)
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
        """Receive some bytes; return whether there may be more.

        Raises:
            OSError: if the connection is broken.
            ProtocolError: if what came is no record.
        """
        piece = self._piece
        into = piece if len(piece) >= AHEAD_BYTES else self._ahead
        try:
            count = self._connection.recv_into(into)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionResetError("its other end has closed it")
        at, self.has_heard = 0, True
        if piece is self.reader.start and self.is_near:
            while found := whole_record(into, at, count):
                self.come.append(found[0])
                at = found[1]
                if at == count:
                    break
        while at < count:
            part = min(len(piece), count - at)
            if into is not piece:
                piece[:part] = into[at : at + part]
            at += part
            piece = piece[part:] if part < len(piece) else next(self._pieces)
        self._piece = piece
        return count == len(into)

    def close(self) -> None:
        """End it; what waits is let go."""
        if self.fd >= 0:
            hang_up(self._connection, self._poller)
            self.fd = -1
        self._let_go()

    def _let_go(self) -> None:
        self._leaving, self._record = [], None
        while self.waiting:
            self._left()
