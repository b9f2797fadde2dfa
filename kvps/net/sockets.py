"""The sockets of one process: their options, who may connect to them, and the wait for all of them
at once.

The wait
--------
libzmq gives each of its sockets a descriptor that becomes readable when something has happened to the socket.
It says no more: whether a message is there is asked of the socket, and that takes the event in. Any other
use of the socket takes it in, too. So a socket that was used since it was asked last is asked before the
process sleeps, and all others are left alone until their descriptor is readable. ``zmq_poll`` asks each
socket twice for each wait.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from functools import cache
from io import FileIO
from select import POLLIN, poll

import zmq
import zmq.utils.garbage  # its exit handler refuses sends without a copy: it must be known before ours

from kvps.core.key_roles import Keyring
from kvps.net.zap import Porter

_OPTIONS: tuple[tuple[int, int], ...] = (
    (zmq.LINGER, 0),
    (zmq.SNDHWM, 0),  # the protocol's windows bound what is under way; of answers, QUEUE_MAX
    (zmq.RCVHWM, 0),
    (zmq.HANDSHAKE_IVL, 5_000),
    (zmq.CONNECT_TIMEOUT, 5_000),
    (zmq.RECONNECT_IVL, 100),
    (zmq.RECONNECT_IVL_MAX, 2_000),
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 30),
    (zmq.BACKLOG, 1024),
)
_POLLIN = int(zmq.POLLIN)
"""Without the flags of :mod:`enum`, whose operators are functions of Python."""


class Sockets:
    """The sockets of one process, the poller that waits for them, and the pipe that wakes it.

    Args:
        frame_bytes_max: the longest frame that is taken; libzmq checks it before it allocates.
    """

    def __init__(self, frame_bytes_max: int) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._context = zmq.Context()
        self._zmq: dict[int, zmq.Socket[bytes]] = {}
        """The watched sockets of libzmq, by descriptor."""
        self.poll = poll()
        """Waits for those, and for descriptors of others."""
        self.used: set[zmq.Socket[bytes]] = set()
        """The watched sockets of libzmq that were used since they were asked last, and some others."""
        self.porter: Porter | None = None
        """The authority that libzmq asks whether a connection is allowed; None while no socket has
        it asked."""
        self._woken_fd, waker_fd = os.pipe()  # which takes half the time of a pair of sockets
        self._woken, self._waker = FileIO(self._woken_fd), FileIO(waker_fd, "w")
        os.set_blocking(self._woken_fd, False)
        os.set_blocking(waker_fd, False)
        self.poll.register(self._woken_fd, POLLIN)

    def watch(self, source: zmq.Socket[bytes]) -> None:
        """Have :meth:`wait` tell when there is something to receive from a socket."""
        fd = int(source.getsockopt(zmq.FD))
        self._zmq[fd] = source
        self.used.add(source)
        self.poll.register(fd, POLLIN)

    def unwatch(self, source: zmq.Socket[bytes]) -> None:
        """Have :meth:`wait` tell nothing more of a socket, which is still open."""
        fd = int(source.getsockopt(zmq.FD))
        del self._zmq[fd]
        self.used.discard(source)
        self.poll.unregister(fd)

    def new(self, kind: int) -> zmq.Socket[bytes]:
        """Return a new socket."""
        if kind == zmq.ROUTER:  # for the connections that others open
            _seed()
        made = self._context.socket(kind)
        for option, value in (*_OPTIONS, (zmq.MAXMSGSIZE, self._frame_bytes_max)):
            made.setsockopt(option, value)
        return made

    def ask(self, ring: Keyring) -> None:
        """Answer libzmq from now on, by the keys of ``ring``."""
        self.porter = Porter(self._context, ring)
        self.watch(self.porter.socket)

    def wait(self, wait_s: float | None) -> tuple[list[zmq.Socket[bytes]], list[tuple[int, int]]]:
        """Wait up to ``wait_s`` (None: for ever), and answer libzmq's questions.

        Returns:
            The sockets of libzmq that have something to receive; and the ready descriptors of others, with
            their events as of :func:`select.poll`.
        """
        porter = self.porter
        if porter is not None and porter.waiting:
            left_s = max(0.0, porter.waiting[0].until - time.monotonic())
            wait_s = left_s if wait_s is None else min(wait_s, left_s)
        ready = list(filter(has_come, self.used)) if self.used else []
        events = []
        limit_ms = 0 if ready else None if wait_s is None else math.ceil(wait_s * 1000)
        for fd, event in self.poll.poll(limit_ms):
            told = self._zmq.get(fd)
            if told is not None:
                if told not in ready and has_come(told):
                    ready.append(told)
            elif fd == self._woken_fd:
                self._woken.read(4096)
            else:
                events.append((fd, event))
        if ready or self.used:
            self.used = set(ready)  # a caller may leave some for the next time
        if porter is not None:
            if porter.socket in ready:
                ready.remove(porter.socket)
                porter.answer()
            if porter.waiting:
                porter.look()
                self.used.add(porter.socket)
        return ready, events

    def wake(self) -> None:
        """Make a waiting :meth:`wait` return; any thread may call this, at any time."""
        try:  # noqa: SIM105  # suppress() is three calls
            self._waker.write(b"\0")  # without effect where it was woken many times
        except ValueError:  # it is closed
            pass

    def close(self, linger_s: float) -> None:
        """Close all sockets, giving what is queued ``linger_s`` to leave."""
        self._context.destroy(linger=int(linger_s * 1000))
        self._waker.close()
        self._woken.close()


@cache
def _seed() -> None:
    """Have libzmq number connections from an unforeseeable number on.

    A ROUTER gives each connection the next number as its routing id, the first one drawn by C's ``rand()``,
    which is the same in every process that does not seed it. libzmq aborts the process if a peer has claimed
    the number that comes next as a routing id of its own.
    """
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))


def has_come(source: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive from a socket of libzmq."""
    return bool(int(source.getsockopt(zmq.EVENTS)) & _POLLIN)
