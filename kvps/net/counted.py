"""The state of TCP connections: libzmq's events of them, and the kernel's counts of their bytes."""

from __future__ import annotations

import math
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import zmq

from kvps.net.pulse import Moved, Pulse

if sys.platform == "linux":
    import fcntl
    import termios

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


def moved(fd: int) -> Moved | None:
    """Return what has moved along the connection of a descriptor; None if that is none, or none any more."""
    with suppress(OSError), socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        if len(info) == _INFO.size:
            taken, received = _INFO.unpack(info)
            (waiting,) = struct.unpack("@i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
            return Moved(received, taken, waiting)
    return None
