"""The rules of a reader that relays: it gives other readers the ranges of a version that it has just read.

The server sends readers here, also for ranges that are still on their way here: such a reader is told to
wait, and has the range as soon as it comes. Ranges stay for as long as there is room and somebody asks. All
else is refused, and read from the server.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

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
WAITERS_MAX = 64
"""Readers that wait for one range."""
AWAY_BYTES_MAX = 64 << 20
"""Bytes on their way to others: those that do not read keep them in memory."""


def range_of(server: int, message: Message) -> p.Read:
    """Return the range of a server that a request is for, as another reader asks for it."""
    assert isinstance(message, p.Read | p.ReadChanges)
    name, number, block = message.publication, message.number, message.block
    return p.Read(name, number, block, message.start, message.size, server=server)


@dataclass(frozen=True, slots=True)
class Away:
    """Bytes on their way to a reader."""

    release: Callable[[], None]
    """They have been read, or nobody will read them."""


class Relay(Core):
    """The ranges that one reader gives others.

    Args:
        envelope: of its answers.
    """

    def __init__(self, envelope: Envelope) -> None:
        self.outbox = CoreOutbox()
        self._envelope = envelope
        self._version: tuple[str, int] = ("", 0)
        self._kept: OrderedDict[p.Read, memoryview] = OrderedDict()
        """By the time at which they came."""
        self._size = 0
        self._gone: dict[int, tuple[int, ...]] = {}
        """By server, the block and start of the last range that was forgotten: they come in order."""
        self.away_bytes = 0
        self._waiting: dict[p.Read, dict[Route, int]] = {}
        """The seq of the request of each reader that waits."""
        self._given: set[tuple[Route, int]] = set()
        """The requests that were answered: their repetitions say only that the reader still waits."""
        self._asked_at = 0.0

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for a range; any thread may ask."""
        return bool(self._waiting)

    def on_packet(self, route: Route, packet: Packet, now: float) -> None:
        """Another reader asks for a range."""
        message, seq = packet.message, packet.envelope.seq
        assert isinstance(message, p.Read), "the permissions say so"
        self._asked_at, place = now, range_of(message.server, message)
        if (route, seq) in self._given:
            self._say(route, p.Elsewhere(seq))
        elif place in self._kept:
            self._give(route, seq, place)
        elif (
            (place.publication, place.number) != self._version
            or (place.block, place.start) <= self._gone.get(place.server, ())
            or len(self._waiting) >= WAITING_MAX
            or len(self._waiting.get(place, ())) >= WAITERS_MAX
        ):
            self._refuse(route, seq, "does not have it, or not any more")
        else:
            self._waiting.setdefault(place, {})[route] = seq
            self._say(route, p.Elsewhere(seq))

    def on_version(self, publication: str, number: int, now: float) -> None:
        """This reader begins to read a version; if ``number`` is 0, it has read it, and no more will come."""
        for place, readers in self._waiting.items():
            for route, seq in readers.items():
                self._refuse(route, seq, f"reads no more of {place.publication!r}")
        self._waiting.clear()
        self._given.clear()
        if number:
            self.on_timer(now)
            self._gone.clear()
        self._version = publication, number

    def on_range(self, place: p.Read, octets: memoryview, now: float) -> None:
        """A range came."""
        if place in self._kept:
            return
        self._asked_at = now
        self._kept[place] = octets
        self._size += octets.nbytes
        for route, seq in self._waiting.pop(place, {}).items():
            self._give(route, seq, place)
        while self._size > KEPT_BYTES_MAX:
            self._forget()

    def on_end(self, now: float) -> None:
        """This reader needs no relay any more."""
        self.outbox.append(Exit(0, "closed"))

    def on_timer(self, now: float) -> None:
        """Forget what nobody asks for."""
        while self._kept:
            self._forget()

    def deadline(self) -> float | None:
        """Return when what is here is to be forgotten."""
        return self._asked_at + KEPT_S if self._kept else None

    def _forget(self) -> None:
        """Forget the range that came first."""
        place, octets = self._kept.popitem(last=False)
        self._size -= octets.nbytes
        at = place.block, place.start
        self._gone[place.server] = max(self._gone.get(place.server, at), at)

    def _give(self, route: Route, seq: int, place: p.Read) -> None:
        octets = self._kept[place]
        if self.away_bytes + octets.nbytes > AWAY_BYTES_MAX:
            self._refuse(route, seq, "has readers that do not read")
            return
        if len(self._given) >= GIVEN_MAX:
            self._given.clear()
        self._given.add((route, seq))

        def release() -> None:
            self.away_bytes -= octets.nbytes

        self.away_bytes += octets.nbytes
        packet = Packet(self._envelope, p.Octets(seq, octets.nbytes), (octets,))
        self.outbox.append(Send(route, packet, Away(release)))

    def _refuse(self, route: Route, seq: int, why: str) -> None:
        self._say(route, p.Error(seq, KeyNotFound.code, f"this relay {why}"))

    def _say(self, route: Route, message: Message) -> None:
        self.outbox.append(Send(route, Packet(self._envelope, message)))
