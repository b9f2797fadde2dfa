"""The sockets of one process: their options, who may connect to them, and the wait for all of them
at once."""

from __future__ import annotations

import ctypes
import math
import os
import socket
import time
from functools import cache
from typing import Any

import zmq
import zmq.utils.garbage  # its exit handler refuses sends without a copy: it must be known before ours

from kvps.core.key_roles import Keyring
from kvps.net.zap import DOMAIN, Keys, Porter
from kvps.protocol.envelope import Role

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


class Sockets:
    """The sockets of one process, the poller that waits for them, and the pair of sockets that wakes it.

    Args:
        role: what the process is.
        keys: of the process; None if it has none.
        frame_bytes_max: the longest frame that is taken; libzmq checks it before it allocates.
    """

    def __init__(self, role: Role, keys: Keys | None, frame_bytes_max: int) -> None:
        self._role, self._keys = role, keys
        self._frame_bytes_max = frame_bytes_max
        self._context = zmq.Context()
        self.poller = zmq.Poller()
        self.porter: Porter | None = None
        """The authority that libzmq asks whether a connection is allowed; None while no socket has
        it asked."""
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._woken_fd = self._woken.fileno()
        self.poller.register(self._woken_fd, zmq.POLLIN)

    def new(self, kind: int) -> zmq.Socket[bytes]:
        """Return a new socket."""
        made = self._context.socket(kind)
        for option, value in (*_OPTIONS, (zmq.MAXMSGSIZE, self._frame_bytes_max)):
            made.setsockopt(option, value)
        return made

    def router(self) -> zmq.Socket[bytes]:
        """Return a new socket for the connections that others open."""
        _seed()
        return self.new(zmq.ROUTER)

    def checked(self, made: zmq.Socket[bytes]) -> Porter:
        """Have libzmq ask for each connection of a socket whether it is allowed; return the object
        that answers."""
        made.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        made.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if self.porter is None:
            opens, learns = self._keys.opens if self._keys else {}, self._role is Role.SERVER
            self.porter = Porter(self._context, Keyring(os.geteuid(), opens, learns))
            self.poller.register(self.porter.socket, zmq.POLLIN)
        return self.porter

    def wait(self, wait_s: float | None) -> dict[Any, int]:
        """Wait up to ``wait_s`` (None: for ever), answer libzmq's questions, and return the
        sockets that are ready."""
        porter = self.porter
        if porter is not None and porter.waiting:
            left_s = max(0.0, porter.waiting[0].until - time.monotonic())
            wait_s = left_s if wait_s is None else min(wait_s, left_s)
        limit_ms = -1 if wait_s is None else math.ceil(wait_s * 1000)
        ready = dict(zmq.zmq_poll(self.poller.sockets, limit_ms))
        if ready.pop(self._woken_fd, None):
            self._woken.recv(4096)
        if porter is not None:
            if porter.socket in ready:
                porter.answer()
            if porter.waiting:
                porter.look()
        return ready

    def wake(self) -> None:
        """Make a waiting :meth:`wait` return; any thread may call this, at any time."""
        try:  # noqa: SIM105  # suppress() is three calls
            self._waker.send(b"\0")
        except OSError:  # it is closed, or has been woken many times
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


def is_wire(endpoint: str) -> bool:
    """Whether packets to an endpoint travel outside this machine's memory, where they may be damaged."""
    return endpoint.startswith("tcp:")
