"""A proxy between real workers and a real server, one ZeroMQ message at a time.

It opens one connection to the server for each that a worker opens to it, so that the server sees as
many peers as there are. What becomes of a message, a :class:`Mischief` says: it goes on, is lost,
comes again, or goes on with a bit changed.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import zmq

from kvps.protocol import wire

Frames = list[bytes]
Connection = tuple[str, bytes]
"""A server, and the route of a worker to it."""
BATCH = 64


class Mischief:
    """What becomes of the messages of all connections; this one lets them pass."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        """How often it did something, by the name of the message to which."""

    def pass_on(self, frames: Frames, connection: Connection, to_server: bool) -> Sequence[Frames]:
        """Return what goes on in place of ``frames``."""
        return [frames]


class Lose(Mischief):
    """Loses every ``every``-th message of the kinds ``names``."""

    def __init__(self, *names: str, every: int) -> None:
        super().__init__()
        self._names, self._every = names, every
        self._seen: Counter[str] = Counter()

    def pass_on(self, frames: Frames, connection: Connection, to_server: bool) -> Sequence[Frames]:
        name = name_of(frames)
        self._seen[name] += 1
        if name not in self._names or self._seen[name] % self._every:
            return [frames]
        self.done[name] += 1
        return []


class Replay(Mischief):
    """Says again along a connection what was said there long ago, with every message of a worker."""

    def __init__(self, *names: str, seed: int) -> None:
        super().__init__()
        self._names = names
        self._random = random.Random(seed)
        self._kept: defaultdict[Connection, list[Frames]] = defaultdict(list)

    def pass_on(self, frames: Frames, connection: Connection, to_server: bool) -> Sequence[Frames]:
        if not to_server:
            return [frames]
        kept = self._kept[connection]
        if name_of(frames) in self._names:
            kept.append(frames)
        if not kept:
            return [frames]
        again = self._random.choice(kept)
        self.done[name_of(again)] += 1
        return self._random.sample([frames, again], 2)


class Flip(Mischief):
    """Changes one bit in a share of all messages, whatever they are: in the head, or in the payload."""

    def __init__(self, share: float, seed: int) -> None:
        super().__init__()
        self._share, self._seed = share, seed
        self._random = random.Random(seed)
        self._dice: dict[str, random.Random] = {}
        """By the name of a message: of so many of a kind the same number is changed, in whatever order all come."""

    def pass_on(self, frames: Frames, connection: Connection, to_server: bool) -> Sequence[Frames]:
        name = name_of(frames)
        if name not in self._dice:
            self._dice[name] = random.Random(f"{self._seed} {name}")
        if self._dice[name].random() >= self._share:
            return [frames]
        self.done[name] += 1
        damaged = [bytearray(item) for item in frames]
        frame = self._random.choice([item for item in damaged if item])
        frame[self._random.randrange(len(frame))] ^= 1 << self._random.randrange(8)
        return [[bytes(item) for item in damaged]]


def name_of(frames: Frames) -> str:
    """Return what kind of message these are."""
    return type(wire.decode(frames).message).__name__


class FrameProxy:
    """Stands before one server. ``endpoint`` is where workers find it."""

    def __init__(self, server: str, mischief: Mischief) -> None:
        self._server = server
        self._mischief = mischief
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind("tcp://127.0.0.1:0")
        self.endpoint = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="frame proxy")
        self._thread.start()
        self.error: Exception | None = None

    def close(self) -> None:
        """Stop, and raise what went wrong on the way."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._poll()
        except Exception as error:  # for close() to raise
            self.error = error

    def _poll(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        for item in self._backs.values():
            poller.register(item, zmq.POLLIN)
        ready = dict(poller.poll(50))
        if self._front in ready:
            for route, *frames in _waiting(self._front):
                for item in self._mischief.pass_on(frames, (self._server, route), True):
                    self._back(route).send_multipart(item)
        for route, back in self._backs.items():
            if back in ready:
                for frames in _waiting(back):
                    for item in self._mischief.pass_on(frames, (self._server, route), False):
                        self._front.send_multipart([route, *item])

    def _back(self, route: bytes) -> zmq.Socket[bytes]:
        if route not in self._backs:
            self._backs[route] = self._context.socket(zmq.DEALER)
            self._backs[route].connect(self._server)
        return self._backs[route]


def _waiting(source: zmq.Socket[bytes]) -> Iterator[Frames]:
    for _ in range(BATCH):
        try:
            yield source.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
