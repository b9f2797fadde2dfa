"""The rules of a process that reads publications: requests to the scheduler and the servers, until answered.

A reader has no seat, and nobody waits for it. It asks the scheduler where the servers are, says HELLO to
each, and then asks them. Each request may be made twice, so it is repeated until it is answered. If a server
is silent, the scheduler is asked again: another process may be in its place.

A server may answer that another reader has the bytes. That *relay* is asked then, and its bytes are taken if
they have the digest that the server has told. A request that a relay does not answer so goes back to the
server, and from a relay that is silent, all do.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from kvps import protocol as p
from kvps.core.effects import Connect, Core, CoreOutbox, Exit, Note, Route, Send
from kvps.core.membership_client import ASK_DOCTOR, EXIT_TEMPORARY, SCHEDULER, Identity
from kvps.core.relay import range_of
from kvps.errors import (
    KeyNotFound,
    KvpsError,
    Mismatch,
    SchedulerLost,
    ServerLost,
    Timeout,
    from_code,
)
from kvps.protocol.envelope import PROTOCOL, Envelope, Message, Packet, Role

AGAIN_S, WATCH_AGAIN_S = 1.0, 0.5
"""Seconds after which a request is repeated; a WATCH, whose answer is short, sooner."""
LATE_S = 3.0
"""Seconds of silence after which the scheduler is asked where the servers are."""
UNANSWERED_S = 0.3
"""Seconds after a request without a word, after which it is asked, too: another process may have the seat."""
LOST_S = 60.0
"""Seconds of silence after which a request is given up."""
RELAY_AGAIN_S, RELAY_SILENT_S, RELAY_LATE_S = 0.2, 0.8, 5.0
"""Seconds after which a relay is sent one of its requests again, is given up if it says nothing, and if it
only says to wait."""
RELAY_AVOIDED_S = 60.0
"""Seconds for which a relay that was silent is not asked, unless it is heard: it may be unreachable."""
RELAYS_MAX = 32
"""Relays that a reader is connected to."""
RELAY_TRIES = 2
"""Relays that are asked for the same bytes before the server is to give them itself."""
WINDOW = 3
"""Requests under way to one server, each of up to 8 MiB. With the answers that were read and are not given
back yet, they stay below what a server has on its way to one reader."""
ALONE_WINDOW, SHARED_WINDOW = 6, 4
"""The same, of requests for ranges that relays may have: they are small, and a server may be far away. Where
others read, too, what is under way to all waits for one link, and nobody can pass it on meanwhile."""
RELAY_WINDOW = 64
"""Requests under way to a relay: those for what it has must not wait for those for what has yet to come."""


@dataclass(slots=True, eq=False)
class Ask:
    """A request to one server."""

    server: int
    message: Message
    take: Callable[[Packet], bool]
    """Takes in an answer; False to wait for another one."""
    seq: int = 0
    sent_at: float = -math.inf
    digest: str = ""
    """The SHA-256 of the bytes that a relay is to give."""
    first_at: float = math.inf
    """When the relay was asked first."""
    tries: int = 0
    """Relays that did not give them."""

    @property
    def again_at(self) -> float:
        """When it is repeated."""
        if self.digest:
            return self.sent_at + RELAY_AGAIN_S
        return self.sent_at + (WATCH_AGAIN_S if type(self.message) is p.Watch else AGAIN_S)


@dataclass(slots=True)
class Link:
    """The connection to one server, or to a relay."""

    route: str
    endpoint: str = ""
    identity: int = 0
    """The incarnation of a server, or the number that a relay has among readers."""
    is_near: bool = False
    """It is on this host."""
    is_ready: bool = False
    greeted_at: float = -math.inf
    heard_at: float = 0.0
    avoided_until: float = 0.0
    """When this relay, which was silent, is asked again."""
    served_at: float = 0.0
    """When it last answered a request, other than by a refusal."""
    refusal: str = ""
    """The last refusal since then."""
    queued: deque[Ask] = field(default_factory=deque)
    sent: dict[int, Ask] = field(default_factory=dict)
    """By seq."""

    @property
    def late_at(self) -> float:
        """When the scheduler is to be asked where this server is."""
        said = [self.greeted_at] if not self.is_ready else [ask.sent_at for ask in self.sent.values()]
        unheard = [at for at in said if at >= self.heard_at]
        return min([self.heard_at + LATE_S, *[at + UNANSWERED_S for at in unheard]])

    @property
    def asks(self) -> list[Ask]:
        """The requests that are to be answered along it."""
        return [*self.sent.values(), *self.queued]

    @property
    def failed_at(self) -> float:
        """When this relay is to be given up."""
        first = min([ask.first_at for ask in self.sent.values()], default=math.inf)
        return min(max(first, self.heard_at) + RELAY_SILENT_S, first + RELAY_LATE_S)


class Reader(Core):
    """One process that reads; its doors are those of a core, and it exits when all requests are answered.

    Args:
        identity: this process; its rank and incarnation are numbers that no other reader has.
    """

    def __init__(self, identity: Identity) -> None:
        self.outbox = CoreOutbox()
        self.error: KvpsError | None = None
        """Why some requests were not answered."""
        self.servers = 0
        """How many there are; 0 while that is not known."""
        self._me = identity
        self.job = bytes(16)
        """Which job the servers are of; zeros while that is not known."""
        self._links: dict[int, Link] = {}
        self._relays: list[Link] = []
        """At most :data:`RELAYS_MAX`: each is called by its place here."""
        self.endpoint = ""
        """Where this process relays; empty if it does not, and is sent to no relay."""
        self.key = ""
        """The public key of all relays; empty without keys."""
        self.on_range: Callable[[p.Read, memoryview], None] = lambda place, octets: None
        """Hears of each range that others may have from here."""
        self._seq = 0
        self._is_connected = False
        self._is_begun = False
        """Requests were made: what comes before is of an earlier call, and ends nothing."""
        self._asked_at = -math.inf
        """When the scheduler was asked last."""
        self._located_at = -math.inf
        """When it last said where the servers are."""
        self._began_at = 0.0
        self._until = math.inf
        self._what = ""

    # --- doors --------------------------------------------------------------------------------------

    def begin(self, asks: Iterable[Ask], until: float, what: str, now: float) -> None:
        """Make requests; without any, only find the servers.

        Args:
            asks: the requests.
            until: when to give up.
            what: the call, for the text of an error.
            now: the time.
        """
        self.error, self._until, self._what, self._began_at = None, until, what, now
        self._is_begun = True
        for link in self._links.values():
            link.heard_at, link.served_at, link.refusal = now, now, ""
        for ask in asks:
            self._links[ask.server].queued.append(ask)
        if not self._is_connected:
            self._is_connected = True
            self.outbox.append(Connect("scheduler", self._me.scheduler))
        self._go_on(now)

    def is_near(self, server: int) -> bool:
        """Whether a server is on this host."""
        return self._links[server].is_near

    def forget(self) -> None:
        """Forget all requests: what still answers them is not heard."""
        self._is_begun, self._until = False, math.inf
        for link in (*self._links.values(), *self._relays):
            link.queued.clear()
            link.sent.clear()

    def cancel(self, now: float) -> None:
        """End the call that is under way, if there is one."""
        if self._is_begun and self.error is None:
            self._fail(Timeout(f"{self._what} was cancelled"), now)

    def on_packet(self, route: Route, packet: Packet, now: float) -> None:
        """The scheduler or a server said something."""
        message = packet.message
        if route == SCHEDULER:
            self._on_scheduler(packet, now)
        elif str(route).startswith("reader "):
            self._on_relay(self._relays[int(str(route).removeprefix("reader "))], packet, now)
        else:
            number = int(str(route).rpartition(" ")[2])
            link = self._links[number]
            link.heard_at = now
            match message:
                case p.Welcome():
                    link.is_ready = True
                case p.Error():
                    self._on_error(link, message, now)
                case p.Elsewhere() if message.seq in link.sent:
                    self._on_elsewhere(link.sent.pop(message.seq), message, now)
                case p.Answer() if message.seq in link.sent:
                    link.served_at, link.refusal = now, ""
                    ask = link.sent[message.seq]
                    self._share(ask, packet)
                    if ask.take(packet):
                        link.sent.pop(message.seq, None)
                case _:
                    self.outbox.append(Note("debug", f"unexpected {type(message).__name__} from {route!s}"))
        self._go_on(now)

    def on_timer(self, now: float) -> None:
        """Repeat what was not answered, or give up."""
        waits = self._waits()
        if now >= self._until:
            self._fail(Timeout(f"{self._what}: no answer in time{self._silence(now)}"), now)
            return
        since = self._began_at if self._located_at < self._began_at and not self.servers else math.inf
        if now >= since + LOST_S:
            self._fail(self._lost_scheduler(), now)
            return
        for number, link in waits.items():
            if now >= max(link.served_at, self._began_at) + LOST_S:
                self._fail(self._lost_server(number), now)
                return
        if not self.servers or any(now >= link.late_at for link in waits.values()):
            self._locate(now)
        for relay in self._relays:
            if now >= relay.failed_at:
                is_silent = now >= relay.heard_at + RELAY_SILENT_S
                relay.avoided_until = now + RELAY_AVOIDED_S if is_silent else 0.0
                self._give_up(relay, relay.asks)
        self._go_on(now)

    def deadline(self) -> float:
        """Return when to repeat the next request, or to give up."""
        times = [self._until]
        if not self.servers:
            times.append(self._asked_at + AGAIN_S)
        for link in self._waits().values():
            times += [ask.again_at for ask in link.sent.values()] if link.is_ready else []
            times += [link.greeted_at + AGAIN_S] if not link.is_ready else []
            times.append(max(link.late_at, self._asked_at + AGAIN_S))
        for relay in self._relays:
            times += [relay.failed_at, *[ask.again_at for ask in relay.sent.values()]]
        return min(times)

    # --- what happens ---------------------------------------------------------------------------------

    def _on_scheduler(self, packet: Packet, now: float) -> None:
        match packet.message:
            case p.ServersAre(members=members, keys=keys):
                if not members or not all(member.endpoint for member in members):
                    return  # the job is forming
                before, self.job, self._located_at = self.job, packet.envelope.job, now
                for index, member in enumerate(members):
                    name = f"server {member.rank}"
                    link = self._links.setdefault(member.rank, Link(name, heard_at=now))
                    place = member.endpoint, member.incarnation
                    if (link.endpoint, link.identity) != place:
                        link.endpoint, link.identity = place
                        link.is_ready, link.greeted_at = False, -math.inf
                        for ask in link.sent.values():
                            ask.sent_at = -math.inf
                        key = keys[index] if keys else ""
                        link.is_near = 0 != member.machine == self._me.machine
                        self.outbox.append(Connect(name, member.endpoint, link.is_near, key))
                self.servers = len(members)
                asked = [ask for link in (*self._links.values(), *self._relays) for ask in link.asks]
                if before not in (bytes(16), self.job) and any(type(a.message) is not p.Watch for a in asked):
                    text = (
                        f"{self._what}: another job is at {self._me.scheduler} by now, with its own versions"
                    )
                    self._fail(KeyNotFound(f"{text}. Call wait() for one"), now)
            case p.Error(code=code, text=text):
                self._fail(from_code(code, text), now)
            case p.Stop(reason=reason):
                self._fail(SchedulerLost(f"{self._what}: the job is over: {reason}"), now)
            case message:
                self.outbox.append(Note("debug", f"unexpected {type(message).__name__} from the scheduler"))

    def _on_error(self, link: Link, message: p.Error, now: float) -> None:
        error = from_code(message.code, message.text)
        ask = link.sent.pop(message.seq, None)
        if isinstance(error, Mismatch):  # it has forgotten us, or is of another job by now
            link.is_ready, link.refusal = False, message.text
            if ask is not None:
                link.queued.appendleft(ask)
            self._locate(now)
        elif ask is not None or not link.is_ready:
            self._fail(error, now)

    def _on_elsewhere(self, ask: Ask, message: p.Elsewhere, now: float) -> None:
        """A relay has what was asked for, or is about to."""
        place = message.endpoint, message.relay
        relay = next((link for link in self._relays if (link.endpoint, link.identity) == place), None)
        if relay is None:
            relay = self._free_relay()
            relay.endpoint, relay.identity, relay.is_ready = *place, True
            relay.avoided_until = 0.0
            self.outbox.append(Connect(relay.route, message.endpoint, False, self.key))
        ask = replace(ask, digest=message.digest, seq=0, sent_at=-math.inf, first_at=math.inf)
        relay.queued.append(ask)
        if now < relay.avoided_until:
            self._give_up(relay, [ask])

    def _free_relay(self) -> Link:
        """Return a new link, or that of the relay that was heard longest ago."""
        if len(self._relays) < RELAYS_MAX:
            self._relays.append(Link(f"reader {len(self._relays)}"))
            return self._relays[-1]
        relay = min(self._relays, key=lambda link: (len(link.queued) + len(link.sent), link.heard_at))
        self._give_up(relay, relay.asks)
        return relay

    def _on_relay(self, relay: Link, packet: Packet, now: float) -> None:
        """A relay has answered: with bytes, that it will have them, or that it will not."""
        message = packet.message
        relay.heard_at, relay.avoided_until = now, 0.0
        ask = relay.sent.get(message.seq) if isinstance(message, p.Answer) else None
        if ask is None or isinstance(message, p.Elsewhere):
            return
        if packet.payload and hashlib.sha256(packet.payload[0]).hexdigest() == ask.digest:
            del relay.sent[ask.seq]
            self._share(ask, packet)
            ask.take(packet)
        else:
            self._give_up(relay, [ask], lacks=isinstance(message, p.Error))

    def _give_up(self, relay: Link, asks: Iterable[Ask], *, lacks: bool = False) -> None:
        """Ask the server for what a relay did not give; one that only lacks it may give others more."""
        for ask in asks:
            if relay.sent.pop(ask.seq, None) is None:
                relay.queued.remove(ask)
            tries = RELAY_TRIES if lacks else ask.tries + 1
            without = 0 if lacks else relay.identity
            again = replace(range_of(0, ask.message), relays=tries < RELAY_TRIES, without=without)
            self._links[ask.server].queued.appendleft(Ask(ask.server, again, ask.take, tries=tries))

    def _share(self, ask: Ask, packet: Packet) -> None:
        """Keep bytes for others, if they may ask for them."""
        if isinstance(packet.message, p.Octets) and self.endpoint and not packet.loans:
            self.on_range(range_of(ask.server, ask.message), packet.payload[0])

    def _go_on(self, now: float) -> None:
        """Send what may be sent; exit if nothing is left to do."""
        if self.error is not None or not self._is_begun:
            return
        if not self.servers:
            self._locate(now)
            return
        waits = self._waits()
        for link in waits.values():
            if not link.is_ready:
                if now >= link.greeted_at + AGAIN_S:
                    link.greeted_at = now
                    self._send(link, self._hello(), self._next())
                continue
            self._send_due(link, now)
        for relay in self._relays:
            self._send_due(relay, now)
        if not waits and not any(relay.queued or relay.sent for relay in self._relays):
            self.outbox.append(Exit(0, "answered"))

    def _send_due(self, link: Link, now: float) -> None:
        """Send what is to be sent along a link now, again or for the first time."""
        due = [ask for ask in link.sent.values() if now >= ask.again_at]
        if due and due[0].digest:  # a relay keeps what waits: one request tells whether it lives
            del due[1:]
            link.sent[due[0].seq] = link.sent.pop(due[0].seq)
            for ask in link.sent.values():
                ask.sent_at = now
        while link.queued and len(link.sent) < self._window(link.queued[0]):
            ask = link.queued.popleft()
            ask.seq, ask.first_at = ask.seq or self._next(), now
            link.sent[ask.seq] = ask
            due.append(ask)
        for ask in due:
            ask.sent_at = now
            self._send(link, range_of(ask.server, ask.message) if ask.digest else ask.message, ask.seq)

    def _window(self, ask: Ask) -> int:
        """Return how many requests may be under way along a link with this one."""
        if ask.digest:
            return RELAY_WINDOW
        if not (isinstance(ask.message, p.Read | p.ReadChanges) and ask.message.relays):
            return WINDOW
        return SHARED_WINDOW if self._relays else ALONE_WINDOW

    def _waits(self) -> dict[int, Link]:
        """Return the links along which an answer is still to come."""
        return {number: link for number, link in self._links.items() if link.queued or link.sent}

    def _locate(self, now: float) -> None:
        if now >= self._asked_at + AGAIN_S:
            self._asked_at = now
            envelope = self.envelope(self._next())._replace(job=bytes(16))
            self.outbox.append(Send(SCHEDULER, Packet(envelope, p.Where())))

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _hello(self) -> p.Hello:
        me = self._me
        hello = p.Hello(*PROTOCOL, me.software, 0, Role.READER, me.rank, me.host, me.pid, self.endpoint)
        return replace(hello, machine=me.machine)

    def _send(self, link: Link, message: Message, seq: int) -> None:
        self.outbox.append(Send(link.route, Packet(self.envelope(seq), message)))

    def envelope(self, seq: int = 0) -> Envelope:
        """Return the envelope of what this process says."""
        assert self._me.rank is not None
        return Envelope(self.job, 0, Role.READER, self._me.rank, self._me.incarnation, seq)

    def _fail(self, error: KvpsError, now: float) -> None:
        self.error = error
        self.outbox.append(Exit(EXIT_TEMPORARY, str(error)))

    def _silence(self, now: float) -> str:
        """Return which server has said nothing lately, if one has, in words."""
        if not self.servers:
            return f". The scheduler at {self._me.scheduler} has not said where the servers are{ASK_DOCTOR}"
        late = [number for number, link in self._waits().items() if now >= link.heard_at + LATE_S]
        return f". Servers {late} are silent" if late else ""

    def _lost_scheduler(self) -> KvpsError:
        return SchedulerLost(
            f"{self._what}: the scheduler at {self._me.scheduler} has not said for {LOST_S:.0f} s where the "
            "servers are. Check that it runs and that all seats of servers are taken, and that scheduler= or "
            f"KVPS_SCHEDULER names its --bind address{ASK_DOCTOR}"
        )

    def _lost_server(self, number: int) -> KvpsError:
        link, doing = self._links[number], "said nothing"
        why = "It may have ended; in a job with keys it needs public/reader.pub in its --keys"
        if link.refusal:
            doing, why = "answered no request", f"It says: {link.refusal}"
        return ServerLost(
            f"{self._what}: server {number} at {link.endpoint} has {doing} for {LOST_S:.0f} s. {why}. "
            "Call again to wait on"
        )
