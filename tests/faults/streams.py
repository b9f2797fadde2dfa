"""A proxy between real workers and a real server, one byte stream for each TCP connection.

What becomes of the bytes of a connection, a :class:`Stream` says: they are carried in small pieces,
slowly, up to some number, or with a bit changed here and there. Afterwards the connection is cut, or
stays open and carries nothing any more.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

BUFFER_BYTES = 64 << 10
LINGER_NONE = struct.pack("ii", 1, 0)
"""Closing sends RST, and not FIN."""


@dataclass
class Stream:
    """What becomes of one connection; the bytes of both directions count together."""

    cut_after: int | None = None
    """Bytes after which both ends find it closed."""
    by_reset: bool = False
    mute_after: int | None = None
    """Bytes after which all further ones are taken and never arrive: nobody is told."""
    piece_bytes: int = BUFFER_BYTES
    """At most so many are given to the network at once."""
    bytes_per_s: float | None = None
    """In each direction."""
    flip_every: int | None = None
    """One bit of so many bytes, about, is changed; the framing may be hit, too."""
    flip_at: int | None = None
    """The byte of which one bit is changed."""
    dice: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.carried = 0
        self.flipped = 0
        self.is_mute = False
        self.is_cut = False
        self._lock = threading.Lock()

    def take(self, data: bytes) -> bytes:
        """Return what goes on of ``data``."""
        with self._lock:
            if self.cut_after is not None:
                data = data[: max(0, self.cut_after - self.carried)]
            if self.mute_after is not None:
                data = data[: max(0, self.mute_after - self.carried)]
            before = self.carried
            self.carried += len(data)
            self.is_cut = self.cut_after is not None and self.carried >= self.cut_after
            self.is_mute = self.mute_after is not None and self.carried >= self.mute_after
            return self._damaged(data, before)

    def _damaged(self, data: bytes, before: int) -> bytes:
        places = []
        if self.flip_at is not None and before <= self.flip_at < self.carried:
            places.append(self.flip_at - before)
        if self.flip_every is not None:
            whole, rest = divmod(len(data), self.flip_every)
            count = whole + (self.dice.random() * self.flip_every < rest)
            places += [self.dice.randrange(len(data)) for _ in range(count)]
        if not places:
            return data
        damaged = bytearray(data)
        for place in places:
            damaged[place] ^= 1 << self.dice.randrange(8)
        self.flipped += len(places)
        return bytes(damaged)


class TcpProxy:
    """Stands before one listener. ``endpoint`` is where others find it."""

    def __init__(self, target: str, plan: Callable[[int], Stream]) -> None:
        """Carry each connection to ``target``; the n-th, from 0, as ``plan`` of n has it."""
        host, port = target.removeprefix("tcp://").split(":")
        self._target = host, int(port)
        self._plan = plan
        self.streams: list[Stream] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="tcp proxy")]
        self._threads[0].start()

    def close(self) -> None:
        """Cut all connections and take no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            stream = self._plan(len(self.streams))
            self.streams.append(stream)
            for item in (client, server):
                item.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [client, server]
            for source, target in ((client, server), (server, client)):
                thread = threading.Thread(target=self._carry, args=(stream, source, target), name="tcp proxy")
                self._threads.append(thread)
                thread.start()

    def _carry(self, stream: Stream, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while not stream.is_cut and (data := source.recv(BUFFER_BYTES)):
                if stream.is_mute:
                    continue
                data = stream.take(data)
                for at in range(0, len(data), stream.piece_bytes):
                    piece = data[at : at + stream.piece_bytes]
                    target.sendall(piece)
                    if stream.bytes_per_s is not None:
                        time.sleep(len(piece) / stream.bytes_per_s)
            if stream.is_mute:
                return  # the one who closed it did; the other is not told
        for item in (source, target):
            with suppress(OSError):
                if stream.is_cut and stream.by_reset:
                    item.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
                item.shutdown(socket.SHUT_RDWR)
