"""Packets within one process: a transport without sockets.

Packets are encoded and decoded as they would be on the wire, and payload is copied once, as a
network would: no end sees memory that another still writes to. The network counts what it
carries, and a test may put a filter between any two ends.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator

from kvps.core.effects import Connect, Hold, Route
from kvps.errors import ConfigError, KvpsError
from kvps.net.transport import DROPPED, Disconnected, Guard, Refusals, Refused
from kvps.protocol import wire
from kvps.protocol.envelope import Packet

Filter = Callable[[Packet], int]
"""How many copies of a packet arrive: 1, or 0 to lose it, or more."""


class MemoryNetwork:
    """All ends of one process, by endpoint."""

    def __init__(self) -> None:
        self.ends: dict[str, MemoryTransport] = {}
        self.carried: Counter[str] = Counter()
        """Packets by the name of their message."""
        self.filter: Filter = lambda packet: 1
        self.numbers = itertools.count(1)

    def transport(self, bind: str | None = None) -> MemoryTransport:
        """Return a new end, reachable at ``bind``.

        Raises:
            ConfigError: if that endpoint is taken.
        """
        if bind is not None and bind in self.ends:
            raise ConfigError(f"cannot listen on {bind}: Address already in use")
        return MemoryTransport(self, bind)


class MemoryTransport:
    """One end of a :class:`MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, bind: str | None) -> None:
        self.endpoint = bind or ""
        self._network = network
        self._admit: Guard = lambda route, envelope, kind: True
        self._arrived: deque[tuple[Route, list[bytes | bytearray] | Disconnected]] = deque()
        self._signal = threading.Event()
        self._peers: dict[Route, tuple[MemoryTransport, Route]] = {}
        if bind is not None:
            network.ends[bind] = self

    @property
    def reconnects(self) -> int:
        """Always 0: nothing breaks here."""
        return 0

    @property
    def refused(self) -> Refusals:
        """Nothing is counted here."""
        return Refusals(Counter(), Counter(), Counter())

    def guard(self, admit: Guard) -> None:
        """Have ``admit`` judge every packet by its envelope from now on."""
        self._admit = admit

    def listen(self, endpoint: str) -> None:
        """Take connections at ``endpoint``, too."""
        self._network.ends[endpoint] = self

    def trust(self, keys: dict[str, str]) -> None:
        """Every sender is accepted."""

    def connect(self, to: Connect) -> None:
        """Open a connection; to nobody, if nobody listens there."""
        peer = self._network.ends.get(to.endpoint)
        if peer is None:
            self._peers.pop(to.to, None)
            return
        back = next(self._network.numbers).to_bytes(4, "big")
        self._peers[to.to] = (peer, back)
        peer._peers[back] = (self, to.to)

    def send(self, route: Route, packet: Packet, hold: Hold | None) -> None:
        """Send, or drop if there is no peer."""
        copies = self._network.filter(packet)
        head, *payload = wire.encode(packet)
        if hold is not None:
            payload = [bytes(frame) for frame in payload]
            hold.release()
        peer = self._peers.get(route)
        if peer is None:
            return
        self._network.carried[type(packet.message).__name__] += 1
        for _ in range(copies):
            peer[0]._arrive(peer[1], [bytes(head), *(bytearray(frame) for frame in payload)])

    def _arrive(self, route: Route, frames: list[bytes | bytearray] | Disconnected) -> None:
        self._arrived.append((route, frames))
        self._signal.set()

    def poll(self, timeout_s: float | None) -> Iterator[tuple[Route, Packet | Disconnected]]:
        """Wait up to ``timeout_s`` and yield what came."""
        if not self._arrived:  # else the last poll ended early
            self._signal.wait(timeout_s)
        self._signal.clear()
        while self._arrived:
            route, frames = self._arrived.popleft()
            if isinstance(frames, Disconnected):
                yield route, frames
                continue
            packet = wire.decode([memoryview(frame) for frame in frames])
            try:
                is_heard = self._admit(route, packet.envelope, type(packet.message))
            except KvpsError as error:
                raise Refused(route, packet.envelope) from error
            if is_heard:
                yield route, packet

    def wake(self) -> None:
        """Make a waiting :meth:`poll` return; any thread may call this."""
        self._signal.set()

    def close(self, linger_s: float) -> None:
        """Break all connections."""
        if self._network.ends.get(self.endpoint) is self:
            del self._network.ends[self.endpoint]
        for peer, back in self._peers.values():
            peer._arrive(back, DROPPED)
        self._peers.clear()
