"""The rules of a reader that relays: it gives other readers the ranges of a version that it has just read.

The server sends readers here, also for ranges that are still on their way here: such a reader is told to
wait, and has the range as soon as it comes. Ranges stay for as long as there is room and somebody asks. All
else is refused, and read from the server.
"""

from __future__ import annotations

from collections import OrderedDict

from kvps import protocol as p
from kvps.core.effects import Core, CoreOutbox, Exit, Route, Send
from kvps.errors import KeyNotFound
from kvps.protocol.envelope import Envelope, Message, Packet

KEPT_BYTES_MAX = 256 << 20
"""Bytes that stay for others."""
KEPT_S = 10.0
"""Seconds for which they stay while nobody asks."""
WAITING_MAX, GIVEN_MAX = 1 << 12, 1 << 16
"""Ranges that others wait for, and requests that are known to have been answered."""

Place = tuple[str, int, int, int, int, int]
"""Publication, version, server, block, start and size."""


def place_of(server: int, message: p.Read | p.ReadChanges) -> Place:
    """Return which range of a server a request is for."""
    return message.publication, message.number, server, message.block, message.start, message.size


class Relay(Core):
    """The ranges that one reader gives others.

    Args:
        envelope: of its answers.
    """

    def __init__(self, envelope: Envelope) -> None:
        self.outbox = CoreOutbox()
        self._envelope = envelope
        self._version: tuple[str, int] = ("", 0)
        self._kept: OrderedDict[Place, memoryview] = OrderedDict()
        """By the time at which they came."""
        self._size = 0
        self._waiting: dict[Place, dict[Route, int]] = {}
        """The seq of the request of each reader that waits."""
        self._given: set[tuple[Route, int]] = set()
        """The requests that were answered: their repetitions say only that the reader still waits."""
        self._asked_at = 0.0

    def on_packet(self, route: Route, packet: Packet, now: float) -> None:
        """Another reader asks for a range."""
        message, seq = packet.message, packet.envelope.seq
        assert isinstance(message, p.Read), "the permissions say so"
        self._asked_at, place = now, place_of(message.server, message)
        if (route, seq) in self._given:
            self._say(route, p.Elsewhere(seq))
        elif place in self._kept:
            self._give(route, seq, place)
        elif place[:2] != self._version or len(self._waiting) >= WAITING_MAX:
            self._say(route, p.Error(seq, KeyNotFound.code, "this relay has another version"))
        else:
            self._waiting.setdefault(place, {})[route] = seq
            self._say(route, p.Elsewhere(seq))

    def on_version(self, publication: str, number: int, now: float) -> None:
        """This reader begins to read a version; if ``number`` is 0, it has read it, and no more will come."""
        for place, readers in self._waiting.items():
            for route, seq in readers.items():
                self._say(route, p.Error(seq, KeyNotFound.code, f"{place[0]!r} is read no more"))
        self._waiting.clear()
        self._given.clear()
        if number:
            self.on_timer(now)
        self._version = publication, number

    def on_range(self, place: Place, octets: memoryview, now: float) -> None:
        """A range came."""
        if place in self._kept:
            return
        self._asked_at = now
        self._kept[place] = octets
        self._size += octets.nbytes
        for route, seq in self._waiting.pop(place, {}).items():
            self._give(route, seq, place)
        while self._size > KEPT_BYTES_MAX:
            self._size -= self._kept.popitem(last=False)[1].nbytes

    def on_end(self, now: float) -> None:
        """This reader needs no relay any more."""
        self.outbox.append(Exit(0, "closed"))

    def on_timer(self, now: float) -> None:
        """Forget what nobody asks for."""
        self._kept.clear()
        self._size = 0

    def deadline(self) -> float | None:
        """Return when what is here is to be forgotten."""
        return self._asked_at + KEPT_S if self._kept else None

    def _give(self, route: Route, seq: int, place: Place) -> None:
        if len(self._given) >= GIVEN_MAX:
            self._given.clear()
        self._given.add((route, seq))
        self._say(route, p.Octets(seq, self._kept[place].nbytes), self._kept[place])

    def _say(self, route: Route, message: Message, *payload: memoryview) -> None:
        self.outbox.append(Send(route, Packet(self._envelope, message, payload)))
