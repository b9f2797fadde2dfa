"""A whole cluster in one thread: virtual time, one heap of events, one seed.

Every process is its core and a route table; every packet is encoded, lies around for a while, is
perhaps lost, doubled or overtaken, and is judged and decoded where it arrives, by the doorman that real
processes have. Payload is copied when it leaves, which is later than the core's Send, as with ZeroMQ's sends without copying: whoever writes
to memory that is on its way out is found out.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from kvps.core.effects import (
    Connect,
    Copied,
    Core,
    Disk,
    Exit,
    Finish,
    Hold,
    Listen,
    Note,
    Route,
    Save,
    Send,
    Trust,
)
from kvps.core.key_roles import Refusal
from kvps.errors import ProtocolError
from kvps.net.doorman import Doorman
from kvps.net.transport import Refused
from kvps.protocol import wire
from kvps.protocol.envelope import Loan, Packet, Role
from kvps.protocol.membership import View, ViewChanges
from tests.simulation.keys import Origin, ProcessKeys, doorman_of

T = TypeVar("T")
EVENTS_MAX = 300_000
"""Events at one moment; more are a deadline that is never met."""
HANDSHAKE_EVERY_S, HANDSHAKE_MAX_S = 0.1, 30.0
"""How often, and for how long, a connection is tried again whose key its listener does not know yet."""
ROUNDING_S = 1e-9
"""A clock that goes at a rate of its own rings so much late, and never too early."""


@dataclass(frozen=True)
class Faults:
    """What the network does to packets."""

    lose: float = 0.0
    double: float = 0.0
    flip: float = 0.0
    """Probabilities, for each packet; that one of its bits changes on the way."""
    latency_s: float = 0.001
    jitter_s: float = 0.0
    """Over the latency, packets overtake each other."""
    lent: bool = False
    """Payload is its sender's memory, and must not be written to."""
    in_order: bool = False
    """Keep the order on each connection, as one TCP connection does."""


@dataclass(eq=False)
class Connection:
    """What one process opened to an endpoint. ``back`` is how the other end calls it."""

    owner: Process
    name: str
    endpoint: str
    back: bytes
    key: str = ""
    """The public key by which it was opened; empty without keys, and by a near link."""
    expects: str = ""
    """The public key of the other end, where that is known."""
    title: str | Refusal | None = None
    """Its name at the other end; None before the handshake."""
    waiting: list[tuple[float, list[bytes], bytes]] = field(default_factory=list)
    """Packets that lie in its sender's queue until the handshake is made: since when, their frames, and the name of the
    connection that they were sent by."""
    busy_until: float = 0.0


@dataclass(eq=False)
class Process:
    """A core, with what a driver and a transport would know."""

    name: str
    core: Core
    endpoint: str
    doorman: Doorman
    keys: ProcessKeys | None = None
    routes: dict[Route, Connection] = field(default_factory=dict)
    fading: list[Connection] = field(default_factory=list)
    """Connections by the key of its role, of which it still hears the answers."""
    alive: bool = True
    rings_at: float | None = None
    exit: Exit | None = None
    more_endpoints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wakes_at: float = 0.0
    """Until then it is stopped, as SIGSTOP does: it hears and says nothing, then all at once."""
    on_finish: Callable[[Finish], None] = lambda effect: None
    on_copied: Callable[[Copied], None] = lambda effect: None
    on_save: Callable[[Save], None] = lambda effect: None
    on_order: Callable[[Disk], None] = lambda effect: None


class Network:
    """All processes, the packets between them, and the clock."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.random = random.Random(seed)
        self._lent: list[tuple[bytearray, bytes]] = []
        """What was lent, and what it was then."""
        self.faults = faults
        self.now = 0.0
        self.carried: Counter[str] = Counter()
        """Packets that were sent, by the name of their message."""
        self.damaged = 0
        """Of those, how many were changed on the way."""
        self.lose: Callable[[Process, Process, Packet], bool] = lambda source, target, packet: False
        """Losses besides the random ones."""
        self.delays: Callable[[Process, Process, Packet], Sequence[float]] = lambda *_: (0.0,)
        """How much later than usual each copy of a packet arrives; one of none is lost."""
        self.overhears: Callable[[Process, Packet], None] = lambda source, packet: None
        """Sees each packet as its sender has it, in the order in which it says them."""
        self.checks = True
        """Whether every core checks itself after every event."""
        self.clock_ns: Callable[[], int] | None = None
        """Tells processor time, if somebody wants to know what each role takes."""
        self.spent_ns: Counter[str] = Counter()
        """By role, what its rules took, and to encode and decode its packets."""
        self._is_spending = False
        self.rates: dict[str, float] = {}
        """How fast the clocks of these processes go; 1 is right."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._by_endpoint: dict[str, Process] = {}
        self._backs = itertools.count(1)
        self._to: defaultdict[str, list[Connection]] = defaultdict(list)
        self._view: tuple[bytes, Packet] | None = None
        """The head that was last decoded to a view: all members get the same."""

    # --- time -----------------------------------------------------------------------------------

    def time(self, name: str) -> float:
        """What the clock of the process ``name`` shows."""
        return self.now * self.rates.get(name, 1.0)

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Have ``event`` happen at ``time``."""
        heapq.heappush(self._heap, (time, next(self._order), event))

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Let things happen until ``until()`` holds."""
        since, events = self.now, 0
        while not until():
            assert self._heap, "nothing will ever happen again"
            self.now, _, event = heapq.heappop(self._heap)
            assert self.now <= limit_s, f"not done after {limit_s:.0f} s"
            events = events + 1 if self.now == since else 0
            assert events < EVENTS_MAX, "time stands still"
            since = self.now
            event()
        assert all(memory == frame for memory, frame in self._lent), "lent memory was written to"

    # --- processes ------------------------------------------------------------------------------

    def add(
        self, name: str, role: Role, core: Core, endpoint: str, keys: ProcessKeys | None = None
    ) -> Process:
        """Start a process; its core's ``start`` is for the caller to perform."""
        doorman = doorman_of(role, lambda: self.time(name), keys)
        doorman.admit = core.admit
        process = Process(name, core, endpoint, doorman, keys)
        self._by_endpoint[endpoint] = process
        for connection in self._to[endpoint]:  # what was on its way to a former process is lost
            self._renew(connection)
        return process

    def pause(self, process: Process, seconds: float) -> None:
        """Stop a process for a while. Its clock goes on, and its connections stay whole."""
        process.wakes_at = max(process.wakes_at, self.now + seconds)

    def listens(self, endpoint: str) -> bool:
        """Whether a process listens at an endpoint."""
        return endpoint in self._by_endpoint

    def kill(self, process: Process, is_noticed: bool = True) -> None:
        """End a process as kill -9 does, or (not noticed) as a lost host does."""
        process.alive = False
        for endpoint in (process.endpoint, *process.more_endpoints):
            if self._by_endpoint.get(endpoint) is process:
                del self._by_endpoint[endpoint]
        if is_noticed:
            for connection in process.routes.values():
                if connection.owner is process:
                    self._break(connection)

    def reset(self, first: Process, other: Process) -> None:
        """Break the connections between two processes. What is under way there is lost.

        They are whole again at once, but under other routing ids.
        """
        for source, target in ((first, other), (other, first)):
            for connection in source.routes.values():
                if connection.owner is source and self._other_end(source, connection) is target:
                    self._break(connection)
                    self._renew(connection)

    def _renew(self, connection: Connection) -> None:
        """Give a connection that is made again another routing id, and another handshake."""
        connection.back, connection.title = self._back(), None

    def _back(self) -> bytes:
        return next(self._backs).to_bytes(4, "big")

    def _break(self, connection: Connection) -> None:
        """Tell the one to whom a connection was opened, a little later, that it is broken."""
        back = connection.back

        def tell() -> None:
            peer = self._by_endpoint.get(connection.endpoint)
            if peer is None or back not in peer.routes:
                return
            if self.now < peer.wakes_at:
                self.at(peer.wakes_at, tell)
            else:
                self.perform(peer, peer.core.on_drop(back, self.time(peer.name)))

        self.at(self.now + 0.01, tell)

    def _spend(self, process: Process, act: Callable[..., T], *args: Any) -> T:
        """Count processor time for a role. What a script does when its call ends counts for its worker."""
        if self.clock_ns is None or self._is_spending:
            return act(*args)
        self._is_spending, began = True, self.clock_ns()
        done = act(*args)
        self._is_spending = False
        self.spent_ns[process.name.partition(" ")[0]] += self.clock_ns() - began
        return done

    def perform(self, process: Process, door: None) -> None:
        """Do what a core asks for, of which a door was just called."""
        self._spend(process, self._perform, process)

    def _perform(self, process: Process) -> None:
        for effect in process.core.outbox.take():
            match effect:
                case Send():
                    self._send(process, effect.to, effect.packet, effect.hold)
                case Connect():
                    self.connect(process, effect)
                case Trust():
                    if process.keys is not None:
                        process.keys.ring.sessions = effect.keys
                case Listen():
                    process.more_endpoints.append(effect.endpoint)
                    self._by_endpoint[effect.endpoint] = process
                case Finish():
                    process.on_finish(effect)
                case Copied():
                    process.on_copied(effect)
                case Exit():
                    process.exit = process.exit or effect
                case Note():
                    process.notes.append(f"{effect.level}: {effect.text}")
                case Save():
                    process.on_save(effect)
                    if not process.alive:
                        return  # killed while it wrote
                case Disk():
                    process.on_order(effect)
        if process.exit is not None:
            self.kill(process)
            return
        check = getattr(process.core, "check", None)
        if check is not None and self.checks:
            check()
        self._wind(process)

    def connect(self, process: Process, to: Connect) -> None:
        """Open a connection, in place of an older one of that name."""
        connection = Connection(process, to.to, to.endpoint, self._back())
        keys, old = process.keys, process.routes.get(to.to)
        if keys is not None and not to.endpoint.startswith("ipc:"):
            connection.key = keys.session if to.is_member else keys.role
            connection.expects = to.key
        if old is not None and to.is_member and old.key != connection.key:
            process.fading.append(old)
        process.routes[to.to] = connection
        self._to[to.endpoint].append(connection)

    def _wind(self, process: Process) -> None:
        due = process.core.deadline()
        if due is None:
            process.rings_at = None
            return
        due = self._moment(process, due)
        if process.rings_at is None or due < process.rings_at:
            process.rings_at = at = max(due, self.now)
            self.at(at, lambda: self._ring(process, at))

    def _moment(self, process: Process, due: float) -> float:
        """When the clock of ``process`` shows ``due``."""
        rate = self.rates.get(process.name, 1.0)
        return due if rate == 1.0 else due / rate + ROUNDING_S

    def _ring(self, process: Process, at: float) -> None:
        if not process.alive or process.rings_at != at:
            return
        if self.now < process.wakes_at:
            self.at(process.wakes_at, lambda: self._ring(process, at))
            return
        process.rings_at = None
        due, now = process.core.deadline(), self.time(process.name)
        if due is not None and due <= now:
            self.perform(process, process.core.on_timer(now))
        else:
            self._wind(process)

    # --- packets --------------------------------------------------------------------------------

    def _send(self, source: Process, route: Route, packet: Packet, hold: Hold | None) -> None:
        connection = source.routes.get(route)
        assert connection is not None, f"{source.name} knows no way to {route!r}"
        head, *payload = wire.encode(packet)
        self.carried[type(packet.message).__name__] += 1
        self.overhears(source, packet)
        delay = 1.0 if self.faults.in_order else self.random.random()
        leaves = self.now + delay * self.faults.latency_s
        is_lost = self.random.random() < self.faults.lose
        copies = 1 + (self.random.random() < self.faults.double)

        def leave() -> None:
            if self.now < source.wakes_at and source.alive:
                self.at(source.wakes_at, leave)
                return
            frames = [bytes(head), *(bytes(frame) for frame in payload)]
            if self.faults.flip:
                now = packet._replace(payload=tuple([memoryview(frame) for frame in frames[1:]]))
                frames = [bytes(item) for item in wire.encode(now, checked=True)]
                if self.random.random() < self.faults.flip:
                    self._flip_bit_of(frames)
            if hold is not None:
                hold.release()
            target = self._other_end(source, connection)
            if target is None or is_lost or self.lose(source, target, packet):
                return
            back = connection.back
            if route not in (connection.name, back):
                return  # to a routing id that is nobody's any more
            for late_s in [*self.delays(source, target, packet)] * copies:
                jitter = self.random.random() * self.faults.jitter_s
                arrives = self.now + self.faults.latency_s + jitter + late_s
                if self.faults.in_order and not late_s:
                    arrives = connection.busy_until = max(arrives, connection.busy_until + 1e-9)
                self.at(arrives, lambda: self._arrive(source, connection, frames, back))

        self.at(leaves, leave)

    def _flip_bit_of(self, frames: list[bytes]) -> None:
        place = self.random.choice([at for at, item in enumerate(frames) if item])
        frame = bytearray(frames[place])
        frame[self.random.randrange(len(frame))] ^= 1 << self.random.randrange(8)
        frames[place] = bytes(frame)
        self.damaged += 1

    def _other_end(self, source: Process, connection: Connection) -> Process | None:
        if connection.owner is source:
            return self._by_endpoint.get(connection.endpoint)
        owner = connection.owner
        is_open = owner.routes.get(connection.name) is connection or connection in owner.fading
        return owner if owner.alive and is_open else None

    def _shake_hands(self, connection: Connection, listener: Process) -> str | Refusal:
        """Return the name of a connection at the process that it leads to, if that accepts it."""
        if listener.keys is None or isinstance(connection.title, str):
            return connection.title or ""
        if connection.expects and connection.expects != listener.keys.session:
            return Refusal.NEVER
        connection.title = listener.keys.name(connection.key)
        return connection.title

    def _arrive(self, source: Process, connection: Connection, frames: list[bytes], back: bytes) -> None:
        target = self._other_end(source, connection)
        if target is None or not target.alive or back != connection.back:
            return
        if self.now < target.wakes_at:
            self.at(target.wakes_at, lambda: self._arrive(source, connection, frames, back))
            return
        route: Route = connection.name
        title = ""
        if connection.owner is source:
            match self._shake_hands(connection, target):
                case Refusal.NEVER:
                    return
                case Refusal.NOT_YET:
                    if not connection.waiting:
                        self._try_again(source, connection, self.now + HANDSHAKE_EVERY_S)
                    connection.waiting.append((self.now, frames, back))
                    return
                case str(title):
                    pass
            route = connection.back
            target.routes.setdefault(route, connection)
        memory = [bytearray(frame) for frame in frames]
        if self._view is not None and self._view[0] == frames[0]:
            packet = self._view[1]
        else:
            received = [memoryview(item) for item in memory]
            packet = self._spend(target, self._judged, target, route, received, Origin(title))
            if packet is None:
                return
            if type(packet.message) in (View, ViewChanges):
                self._view = frames[0], packet
        if self.faults.lent and packet.payload:
            loans = tuple(Loan(1, 1, 0, len(frame)) for frame in packet.payload)
            packet = packet._replace(loans=loans)
            self._lent.extend(zip(memory, frames, strict=True))
        self.perform(target, target.core.on_packet(route, packet, self.time(target.name)))

    def _try_again(self, source: Process, connection: Connection, time: float) -> None:
        """Make the handshake of a connection at ``time``; what waits for it then arrives."""

        def make() -> None:
            target = self._other_end(source, connection)
            waiting, connection.waiting = connection.waiting, []
            if target is None or not target.alive:
                return
            if self.now < target.wakes_at:
                connection.waiting = waiting
                self._try_again(source, connection, target.wakes_at)
            elif self._shake_hands(connection, target) is Refusal.NOT_YET:
                oldest = self.now - HANDSHAKE_MAX_S
                connection.waiting = [item for item in waiting if item[0] > oldest]
                if connection.waiting:
                    self._try_again(source, connection, self.now + HANDSHAKE_EVERY_S)
            else:
                for _, frames, back in waiting:
                    self._arrive(source, connection, frames, back)

        self.at(time, make)

    def _judged(
        self, target: Process, route: Route, frames: list[memoryview], origin: Origin
    ) -> Packet | None:
        """Return the packet that a process hears, if it does; else its sender may be told why."""
        try:
            return target.doorman.decode(route, frames, origin)
        except ProtocolError:
            if not self.faults.flip and target.keys is None:
                raise  # what was sent is a packet
        except Refused as refused:
            cause = cast(Exception, refused.__cause__)
            now = self.time(target.name)
            self.perform(target, target.core.on_failure(route, refused.envelope, cause, now))
        return None
