"""The kernel's byte counts of a TCP connection."""

from __future__ import annotations

import math
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass

import zmq

from kvps.core.pulse import Moved, Pulse

if sys.platform == "linux":
    import fcntl
    import termios

CAN_COUNT = sys.platform == "linux"
_INFO = struct.Struct("@120xQQ")
"""Layout of struct tcp_info: tcpi_bytes_acked and tcpi_bytes_received, which Linux has since 4.1."""


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
    with suppress(OSError), socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as one:
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        if len(info) == _INFO.size:
            taken, received = _INFO.unpack(info)
            (waiting,) = struct.unpack("@i", fcntl.ioctl(one, termios.TIOCOUTQ, bytes(4)))
            return Moved(received, taken, waiting)
    return None
