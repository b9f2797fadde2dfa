"""Bytes that a connection has sent and this process has not read yet, and their limits.

libzmq reads a message part by part and shows it when its last part is there. No option of it bounds what
lies there until then: its water marks count whole messages, and its size limit holds for each part alone. So
a peer that never ends a message would grow this process without a limit. The kernel counts what every
connection has carried; less the bytes of messages taken out, that is its backlog here. A connection with too
large a backlog is closed: an honest peer opens it again, probes for lost packets, and sends them once more.

Only connections by TCP are counted; the kernel has no such number for others.
"""

from __future__ import annotations

import ctypes
import logging
import math
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvps.core.limits import TABLE
from kvps.net.memory import PAGE_BYTES, give_back, memory_bytes
from kvps.net.tcp_watch import borrowed, moved
from kvps.protocol import wire
from kvps.protocol.values import ROWS_FRAMES_MAX

log = logging.getLogger("kvps")
LOOK_EVERY_S = 0.1
"""How often connections are looked at, and so the longest wait of a process that has any. A peer on this
machine sends some 100 MiB in that time."""
EACH_S = 0.2e-3
"""How much later for each of them: to look at one takes 4 µs, and should not take more than 2 % of
the time."""
DRIFT_PER_S = 32
GREETING = 1024
"""Bytes that a connection carries besides messages: heartbeats, per second, and the handshake."""
SWELL, SWELL_BYTES = 2, 256 << 20
"""The process may grow by this multiple of the bytes that have come meanwhile, and by so many bytes in any
case. A part takes 64 bytes of memory and more, however short it is."""
GIVE_BACK_S, GIVE_BACK_EVERY_S = 10.0, 1.0
"""How long after a connection that had much here memory is given back, and how often: libzmq frees
the parts of a message one by one, in a thread of its own."""
IDLE_S = 5.0
"""Seconds that a connection may carry nothing that is a packet. Of more such connections than the
limit ``idle``, the oldest are closed, before they take all file descriptors."""
TELL_EVERY_S = 2.0
"""Shortest time between two log lines about a connection that was closed, in seconds."""
PETTY_BYTES = 64 << 10
"""A connection with a smaller backlog is never closed for the backlogs of others."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many bytes of one connection may wait to be taken out."""

    strange: int
    """While nothing that is a packet was taken out of it."""
    known: int
    """From then on."""
    crowd: int
    """The limit of all connections together that have not sent a packet yet."""
    members: int
    """The limit of all others together."""


CONTROL = Limits(strange=2 << 20, known=4 << 20, crowd=32 << 20, members=256 << 20)
"""The limits of a scheduler, which receives only the heads of a few packets."""


def data_limits() -> Limits:
    """Return what may lie in a server or worker of one connection to it.

    One packet may have 2 GiB of rows. A peer that sends this much along a new connection has to begin with a
    smaller packet, such as a probe for what was lost.
    """
    known = min(wire.FRAME_BYTES_MAX * (ROWS_FRAMES_MAX // 2 + 2), memory_bytes() // 8)
    known = max(known, 64 << 20)
    return Limits(8 << 20, known, crowd=64 << 20, members=max(known, memory_bytes() // 2))


@dataclass(slots=True)
class _Connection:
    since: float
    taken: int = GREETING
    is_known: bool = False
    base: tuple[float, int] | None = None
    """How much lay here, and how large this process was, when it first was more than a stranger may have."""

    def is_swelling(self, rest: float, limit: int) -> bool:
        """Whether this process has grown by far more than the bytes that have come: by small parts."""
        if rest <= limit:
            self.base = None
            return False
        if self.base is None:
            self.base = rest, _resident_bytes()
        before, size = self.base
        return _resident_bytes() - size > SWELL_BYTES + SWELL * max(0.0, rest - before)


class Inflow:
    """The unread bytes of each connection to one listening port.

    Args:
        limits: the largest amounts.
        clock: seconds.
        idle_max: connections that may carry nothing.
    """

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        idle_max: int = TABLE["idle"].default,
    ) -> None:
        self._limits = limits
        self._idle_max = idle_max
        self._clock = clock
        self.connections: dict[int, _Connection] = {}
        """By file descriptor."""
        self._look_at, self.due = 0.0, math.inf
        """When :meth:`look` has something to do."""
        self._quiet_until, self._unsaid = 0.0, 0
        self._give_back_at, self._give_back_until = 0.0, 0.0
        self.closings: Counter[str] = Counter()
        """How many connections were closed: ``unfinished`` (too much of a message), or ``idle``."""
        self.port = 0
        """Where they were accepted: by this a descriptor that is another's by now is told apart."""

    def opened(self, fd: int) -> None:
        """A connection was accepted."""
        self.connections[fd] = _Connection(self._clock())
        self.due = min(self.due, self._look_at)

    def closed(self, fd: int) -> None:
        """A connection broke."""
        connection = self.connections.pop(fd, None)
        if connection is not None and connection.base is not None:
            self._give_back_until = self._clock() + GIVE_BACK_S

    def took(self, fd: int, octets: int) -> None:
        """So many bytes of messages were taken out, framing included."""
        connection = self.connections.get(fd)
        if connection is not None:
            connection.taken += octets

    def know(self, fd: int) -> None:
        """A packet was received along a connection."""
        connection = self.connections.get(fd)
        if connection is not None:
            connection.is_known = True

    def look(self, began: float) -> None:
        """Close connections of which too much lies here; it is time to look."""
        rests: dict[int, float] = {}
        for fd, connection in list(self.connections.items()):
            counted = moved(fd)
            if counted is None:
                self.closed(fd)
            else:
                rests[fd] = counted.received - connection.taken - DRIFT_PER_S * (began - connection.since)
        for fd, limit in self._excessive(rests):
            self._close(
                fd, f"it has sent {rests[fd]:.0f} bytes of an incomplete message, and the limit is {limit}"
            )
            del self.connections[fd]
            self.closings["unfinished"] += 1
            self._give_back_until = began + GIVE_BACK_S
        for fd in self._idle(began):
            self._close(fd, f"it has sent nothing, like more than {self._idle_max} others")
            del self.connections[fd]
            self.closings["idle"] += 1
        if self._give_back_at <= began < self._give_back_until:
            give_back()
            self._give_back_at = began + GIVE_BACK_EVERY_S
        self._look_at = began + LOOK_EVERY_S + EACH_S * len(self.connections)
        self.due = self._look_at if self.connections or began < self._give_back_until else math.inf

    def _excessive(self, rests: dict[int, float]) -> Iterator[tuple[int, int]]:
        """Yield of which connections too much lies here, and how much may."""
        strange, known = self._limits.strange, self._limits.known
        strangers: list[tuple[float, int]] = []
        members: list[tuple[float, int]] = []
        for fd, rest in rests.items():
            connection = self.connections[fd]
            limit = known if connection.is_known else strange
            if rest > limit or (connection.is_known and connection.is_swelling(rest, strange)):
                yield fd, limit
            elif rest > PETTY_BYTES:
                (members if connection.is_known else strangers).append((rest, fd))
        for some, most in ((strangers, self._limits.crowd), (members, self._limits.members)):
            together = sum([rest for rest, _ in some])
            for rest, fd in sorted(some, reverse=True):
                if together <= most:
                    break
                together -= rest
                yield fd, PETTY_BYTES

    def _idle(self, now: float) -> list[int]:
        """Return the oldest of those that carry nothing, where there are too many."""
        idle = [
            fd
            for fd, connection in self.connections.items()  # in the order in which they were opened
            if not connection.is_known and now >= connection.since + IDLE_S
        ]
        return idle[: max(0, len(idle) - self._idle_max)]

    def _close(self, fd: int, why: str) -> None:
        with suppress(OSError):
            with borrowed(fd) as connection:
                if connection.getsockname()[1] != self.port:
                    return  # it broke just now, and the number is another's already
                peer = connection.getpeername()
            if _dissolve(fd):
                self._tell(f"{peer[0]}:{peer[1]}", why)

    def _tell(self, whence: str, why: str) -> None:
        """Say in the log that a connection was closed, unless that was said of another just now."""
        now = self._clock()
        if now < self._quiet_until:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more were closed since the last line of this kind)" if self._unsaid else ""
        self._quiet_until, self._unsaid = now + TELL_EVERY_S, 0
        log.warning(
            "closed the connection from %s: %s%s. If it is a member of the job, it reconnects",
            whence,
            why,
            more,
        )


def _dissolve(fd: int) -> bool:
    """End a connection at once: what was not read is gone, and its peer is told that it was reset.

    A mere ``shutdown`` lets libzmq go on to read for as long as there is more, and from a fast peer there
    always is. To connect to nothing is how the kernel ends a connection that someone else has open.
    """
    connect = getattr(ctypes.CDLL(None, use_errno=True), "connect", None)
    nothing = struct.pack("=H14x", socket.AF_UNSPEC)
    return connect is not None and connect(fd, nothing, len(nothing)) == 0


def _resident_bytes() -> int:
    """Return how much memory this process has; 0 where that is not known."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except OSError:
        return 0
