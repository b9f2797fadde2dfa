"""The frames of messages: taken from a socket, counted, and dropped where a message has too many for a packet."""

from __future__ import annotations

from collections import Counter

import zmq

from kvps.core.effects import Route
from kvps.errors import ProtocolError
from kvps.net.doorman import descriptor_of, whence
from kvps.net.inflow import Inflow
from kvps.net.memory import give_back
from kvps.protocol import wire

SURPLUS_BATCH = 4096
"""Frames of a message that has too many for a packet which are dropped before the other sockets get their turn."""
SURPLUS_MAX = 1 << 16
"""The most frames of such a message whose memory is left in the heap: libzmq has 64 bytes for each."""
SEAL_OCTETS = 33
"""Bytes that CURVE adds to each frame."""


class SocketReader:
    """Takes the frames of messages from sockets.

    Args:
        inflow: counts the bytes that were taken out of each connection.
        is_sealed: whether frames travel encrypted.
    """

    def __init__(self, inflow: Inflow, is_sealed: bool) -> None:
        self._inflow = inflow
        self._seal_octets = SEAL_OCTETS if is_sealed else 0
        self._surplus: Counter[zmq.Socket[bytes]] = Counter()
        """Sockets in the middle of a message that has too many frames, and how many were taken out."""

    def take(self, socket: zmq.Socket[bytes], route: Route | None) -> list[zmq.Frame] | None:
        """Return the frames of the next message; None while a message with too many is dropped.

        Args:
            socket: where from.
            route: along which the message comes; None where its first frame is the route.

        Raises:
            zmq.Again: if there is no message.
            ProtocolError: at the start of a message that has too many frames.
        """
        if socket in self._surplus:
            if not self._drop_surplus(socket):
                return None
            if self._surplus.pop(socket) > SURPLUS_MAX:
                give_back()
        frames = [socket.recv(zmq.NOBLOCK, copy=False)]
        before = 1 if route is None else 0
        while frames[-1].more:
            if len(frames) > before + wire.PAYLOAD_FRAMES_MAX:
                self._surplus[socket] = len(frames)
                if (fd := descriptor_of(frames)) is not None and before:
                    self._inflow.took(fd, self.octets(frames))
                raise ProtocolError(
                    f"a message of more than {1 + wire.PAYLOAD_FRAMES_MAX} frames "
                    f"(from {whence(route or frames[0].bytes, frames[before:])})"
                )
            frames.append(socket.recv(zmq.NOBLOCK, copy=False))  # the rest of a message is there
        return frames

    def octets(self, frames: list[zmq.Frame]) -> int:
        """Return how many bytes a message took on its way, its route not counted."""
        sizes = [len(frame) + self._seal_octets for frame in frames[1:]]
        return sum(sizes) + sum([2 if size < 256 else 9 for size in sizes])

    def _drop_surplus(self, socket: zmq.Socket[bytes]) -> bool:
        """Take out some of a message that has too many frames; return whether that was the end of it."""
        fd, octets, is_over = None, 0, False
        self._surplus[socket] += SURPLUS_BATCH
        for _ in range(SURPLUS_BATCH):
            frame = socket.recv(zmq.NOBLOCK, copy=False)
            fd = descriptor_of([frame, frame]) if fd is None else fd
            octets += self.octets([frame, frame])
            if not frame.more:
                is_over = True
                break
        if fd is not None:
            self._inflow.took(fd, octets)
        return is_over
