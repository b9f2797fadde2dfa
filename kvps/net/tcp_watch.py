"""TCP connections as the kernel sees them: whether bytes have moved lately, and how many have not left.

The opener of a connection asks for a sign of life every few seconds, and so does the far end of it
answer. On a slow link the question, or its answer, stands behind megabytes; so it is not the
answer that counts but any byte that comes, whatever it belongs to. And where megabytes go, and
nothing comes, each that the other end's kernel has taken is a sign, too. A few bytes are none:
whatever stands between the two may have taken those, and keep them.

Outflow
-------
libzmq queues what a peer does not read, and its water marks count messages. Values that lie in the server's
own buffers cost nothing there but their hold, and are released as soon as they have left, whatever other
peers do. What was copied for one answer, as rows are, takes memory until it has left: of a peer that has so
much of it unread, further answers are dropped. It probes for them when it reads again.
"""

from __future__ import annotations

import fcntl
import math
import socket
import struct
import sys
import termios
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from kvps.core.effects import Hold, Route
from kvps.core.limits import TABLE

MANY = 4096
"""Bytes that are under way, from which on it counts that some arrive: no heartbeat is as large."""
STILL_S = 5.0
"""Seconds between two looks after which this process itself was stopped, and could not ask for a
sign of life."""


class Moved(NamedTuple):
    """The kernel's counters of a connection."""

    received: int
    """Bytes that came."""
    taken: int
    """Bytes that went, and are known to have arrived."""
    waiting: int
    """Bytes that go, and are not."""


class Pulse:
    """One connection, from when it was made."""

    def __init__(self, silence_s: float, now: float) -> None:
        self._silence_s = silence_s
        self._last = Moved(0, 0, 0)
        self._moved_at = self._looked_at = now

    def is_dead(self, now: float, moved: Moved) -> bool:
        """Take in the counts at this time; return whether nothing has moved for too long."""
        last, self._last = self._last, moved
        comes = moved.received > last.received
        goes = moved.taken > last.taken and max(moved.waiting, last.waiting) >= MANY
        if comes or goes or now > self._looked_at + STILL_S:
            self._moved_at = now
        self._looked_at = now
        return now >= self._moved_at + self._silence_s


CAN_COUNT = sys.platform == "linux"
_INFO = struct.Struct("@120xQQ")
"""Layout of struct tcp_info: tcpi_bytes_acked and tcpi_bytes_received, which Linux has since 4.1."""


_EVENT = struct.Struct("=Hi")
"""The first frame of an event: its number, and a descriptor or a reason."""


def events_of(monitor: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the events that a monitor has: number and value.

    pyzmq can parse them, too, and loads asyncio for it, which takes a seventh of the start of a command.
    """
    while monitor.poll(0):
        event, _ = monitor.recv_multipart(zmq.NOBLOCK)
        yield _EVENT.unpack(event)


@dataclass(slots=True, eq=False)
class Watch:
    """The state of a connection that was opened here."""

    events: zmq.Socket[bytes]
    silence_s: float
    up: int | None = None
    """Its descriptor, while it is connected."""
    pulse: Pulse | None = None
    """Its pulse, since the first look."""
    connected_at: float = -math.inf


@contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """Give the connection of a descriptor, without a copy of that: there may be none left.

    Raises:
        OSError: if there is no such connection.
    """
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()


def moved(fd: int) -> Moved | None:
    """Return the bytes that the connection of a descriptor has moved; None if that is not known."""
    if not CAN_COUNT:
        return None
    with suppress(OSError), borrowed(fd) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        if len(info) == _INFO.size:
            taken, received = _INFO.unpack(info)
            (waiting,) = struct.unpack("@i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
            return Moved(received, taken, waiting)
    return None


COPIED_MIN_BYTES = 64 << 10
"""Smaller answers are not counted: their number is bounded."""


class _Leaving(NamedTuple):
    tracker: zmq.MessageTracker
    hold: Hold | None
    copied_bytes: int


class Outflow:
    """The sent messages that have not left yet, by connection.

    Args:
        unread_max_bytes: how much that was copied for it may wait to be read by one peer.
    """

    def __init__(self, unread_max_bytes: int = TABLE["unread"].default) -> None:
        self._unread_max_bytes = unread_max_bytes
        self.leaving: dict[Route, deque[_Leaving]] = {}
        self._unread: dict[Route, int] = {}

    def is_full(self, route: Route, copied_bytes: int) -> bool:
        """Whether a peer with unread bytes would exceed the limit with ``copied_bytes`` more."""
        unread = self._unread.get(route, 0)
        return unread > 0 and unread + copied_bytes > self._unread_max_bytes

    def sent(self, route: Route, tracker: zmq.MessageTracker, hold: Hold | None, copied_bytes: int) -> None:
        """Note a message that libzmq has taken; ``hold`` is released when it has left."""
        self.leaving.setdefault(route, deque()).append(_Leaving(tracker, hold, copied_bytes))
        self._unread[route] = self._unread.get(route, 0) + copied_bytes

    def look(self) -> None:
        """Release the holds of messages that have left."""
        for route in [gone for gone, queue in self.leaving.items() if queue[0].tracker.done]:
            queue = self.leaving[route]
            while queue and queue[0].tracker.done:
                _, hold, copied_bytes = queue.popleft()
                self._unread[route] -= copied_bytes
                if hold is not None:
                    hold.release()
            if not queue:
                del self.leaving[route], self._unread[route]
