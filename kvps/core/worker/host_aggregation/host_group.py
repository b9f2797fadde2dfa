"""The workers of one host: the leader of each chunk, requests between them, failover.

Theory of operation
-------------------
The view says which workers are on this machine. For each chunk it makes one of them the leader, the
same for all who see that view: the one whose turn it is by the chunk's number, or the next that is
alive. Pushes and pulls that concern a server on another machine go to the leader, which makes bundles
of them (:mod:`kvps.core.worker.host_aggregation.merge_queue`); to a leader, the others speak as to a server.

What was asked of a leader that is lost is asked of the servers directly, each for itself; so is what one
has not answered that is held and says nothing, and until it speaks the next in turn leads for it. What
was asked of one that does not lead any more stays there. Either way a bundle may lack somebody who does
not come: he who waits asks after it, and it goes.

A leader answers nobody before the server has answered it. So it has nothing that others would miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvps.core.effects import Connect, Effects, Listen, Note, Route, Send
from kvps.core.gradients import DenseGradient
from kvps.core.membership_client import MembershipClient, check_protocol
from kvps.core.worker.connection import Connection, Request, SendScheduler
from kvps.core.worker.host_aggregation.merge_queue import (
    Bundles,
    MergedRequest,
    Participant,
    Reply,
    wants_values,
)
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_ID
from kvps.errors import Fenced, KvpsError, Mismatch, ProtocolError
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.protocol.membership import (
    Error,
    Hello,
    Join,
    Member,
    Pending,
    Probe,
    Probed,
    Return,
    Welcome,
)
from kvps.protocol.values import Ack, Pull, Pulled, Push, Receipt
from kvps.tensors import Memory, from_frame, to_frame

MUTE_AFTER_S = 6.0
"""A neighbour that was asked, and has said nothing for so long, is asked no more until it speaks: its
process may have ended while its guardian holds the seat, or may not have begun."""


class Own(Protocol):
    """What this worker does with answers to its own requests."""

    def answered(self, request: Request, packet: Packet, now: float) -> Effects:
        """It is done."""

    def refused(self, request: Request, error: KvpsError, now: float) -> Effects:
        """It cannot be done."""

    def taken_in(self, request: Request, now: float) -> Effects:
        """The server has it."""

    def probe(self, link: Connection) -> Effects:
        """Ask a peer after all that it has not answered."""


@dataclass(slots=True, eq=False)
class PeerSession:
    """A neighbour that asks something of this worker, in one of its lives."""

    rank: int
    incarnation: int
    route: Route
    asked: dict[int, Participant] = field(default_factory=dict)
    """By seq, what it has no answer to."""


@dataclass(frozen=True, slots=True, eq=False)
class PeerRequest:
    """One request of a neighbour."""

    caller: PeerSession
    seq: int


class HostGroup:
    """This worker among those of its machine."""

    def __init__(
        self, member: MembershipClient, memory: Memory, servers: list[Connection], own: Own
    ) -> None:
        self.links: dict[int, Connection] = {}
        """By rank, to those who may lead."""
        self._member = member
        self._memory = memory
        self._servers = servers
        self._own = own
        self._beside = SendScheduler(is_limited=False)
        """Without a window: what waits for others must not keep from them what they wait for."""
        self._mute: set[int] = set()
        """Who is held, and does not speak: it leads nothing until it does."""
        self._asked_at: dict[int, float] = {}
        """By rank, when one who owed nothing was asked something."""
        self._ranks: tuple[int, ...] = ()
        """All that were seen here, lost ones among them."""
        self._lives: dict[int, int] = {}
        """By rank, the incarnation that the view names."""
        self._alive: frozenset[int] = frozenset()
        self._away: dict[tuple[str, int], int] = {}
        """By store and rank, the last join of a neighbour that is not known to be over."""
        self._over: dict[str, int] = {}
        """By store, the last join that is."""
        self._far: frozenset[int] = frozenset()
        """The servers on other machines."""
        self._callers: dict[int, PeerSession] = {}
        self._bundles = Bundles(0, 1, memory)
        self._listens = False
        self._mine: dict[Request, Participant] = {}
        """What this worker asks of itself as a leader, and has no answer to."""

    # --- who they are -------------------------------------------------------------------------

    def learn(self, members: Iterable[Member]) -> Effects:
        """Take in who is where."""
        machine = self._member.identity.machine
        everybody = list(members)
        self._far = frozenset(
            one.rank
            for one in everybody
            if one.role == Role.SERVER and (one.machine != machine or not machine)
        )
        here = [one for one in everybody if one.role == Role.WORKER and one.machine == machine]
        for rank in self.links.keys() - {one.rank for one in here}:
            self._part(rank)  # its seat is taken by one of another machine
        if not machine or not self._far:
            return  # nobody to share a machine with, or nothing that leaves it
        if not self._listens:
            self._listens = True
            self._bundles = Bundles(self._member.rank, len(self._servers), self._memory)
            yield Listen(self._endpoint(self._member.rank, self._member.incarnation))
        self._ranks = tuple([one.rank for one in here])
        self._lives = {one.rank: one.incarnation for one in here}
        self._alive = frozenset(one.rank for one in here if one.state == "held")
        for one in here:
            yield from self._meet(one)
        self._expect()

    def _expect(self) -> None:
        """Let bundles wait for those who are here, and may push."""
        away = {rank for _, rank in self._away}
        self._post(self._bundles.expect(self._alive - away))

    def begin_epoch(self) -> None:
        """What was asked, here or of others, concerns values that are gone."""
        self._mine.clear()
        self._asked_at.clear()
        for caller in self._callers.values():
            caller.asked.clear()
        for link in self.links.values():
            link.abandon()
        if self._listens:
            self._bundles = Bundles(self._member.rank, len(self._servers), self._memory)
            self._bundles.expect(self._alive)

    def _meet(self, one: Member) -> Effects:
        """Connect to a neighbour; take back what was asked of one that is not there any more."""
        link = self.links.get(one.rank)
        is_here = one.state == "held" and one.rank != self._member.rank
        is_same = link is not None and link.incarnation == one.incarnation
        if link is not None and not (is_here and is_same):
            if is_same:  # it may come back, and knows the numbers that it was asked
                self._take_back(link)
            else:
                self._part(one.rank)
                link = None
        if link is None and is_here:
            endpoint = self._endpoint(one.rank, one.incarnation)
            route = f"worker {one.rank}"
            self.links[one.rank] = Connection(
                route, endpoint, one.incarnation, self._memory, self._beside
            )
            yield Connect(route, endpoint, is_near=True)
            yield Send(route, self._member.hello())

    def _part(self, rank: int) -> None:
        """This neighbour is no more."""
        link = self.links.pop(rank)
        self._beside.links.remove(link)
        self._mute.discard(rank)
        self._take_back(link)

    def _take_back(self, link: Connection) -> None:
        """Ask the servers for what a neighbour has not answered."""
        for request in link.abandon():
            assert request.server is not None
            self._servers[request.server].queue(request)

    def _endpoint(self, rank: int, incarnation: int) -> str:
        """Return where a worker of this machine listens: a name that the kernel keeps for it."""
        return f"ipc://@kvps-{self._member.job.hex()}-{rank}-{incarnation}"

    def leader(self, chunk: int) -> int:
        """Return which worker of this machine leads a chunk."""
        first = chunk % len(self._ranks)
        turn = (*self._ranks[first:], *self._ranks[:first])
        return next(rank for rank in turn if rank in self._alive and rank not in self._mute)

    def heard(self, link: Connection, now: float) -> None:
        """A neighbour has answered: it may lead (again)."""
        link.heard_at = now
        if link.ready:
            self._mute -= {rank for rank in self._mute if self.links[rank] is link}

    def _give_up_the_silent(self, now: float) -> None:
        for rank, link in self.links.items():
            since = max(self._asked_at.get(rank, now), link.heard_at or 0.0)
            if link.is_busy and now >= since + MUTE_AFTER_S:
                self._mute.add(rank)
                link.ready = False  # HELLO asks whether it is there again
                self._take_back(link)

    # --- what this worker asks -----------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many live workers this machine has, this one among them; 1 if nothing leaves it."""
        return max(1, len(self._alive))

    def collect(self, book: WorkerStore, request: Request) -> bool:
        """Whether ``request`` is one of those that neighbours make together.

        What is compressed is not: each worker has rests of its own, and what is added up is not what
        they leave out of it.
        """
        message = request.message
        return (
            not _is_compressed(message)
            and book.opened.bundles
            and len(self._alive) > 1
            and request.server in self._far
            and (isinstance(message, Push) or (isinstance(message, Pull) and message.values))
        )

    def ask(self, request: Request, now: float) -> Effects:
        """Have ``request`` made, together with those of others."""
        message = request.message
        assert isinstance(message, Push | Pull)
        leader = self.leader(message.chunk)
        if leader != self._member.rank:
            if not self.links[leader].is_busy:
                self._asked_at[leader] = now
            self.links[leader].queue(request)
            return
        asker = Participant(leader, message, request, priority=request.priority)
        if isinstance(message, Push):
            asker.gradient = lambda: DenseGradient(request.peek())
        self._mine[request] = asker
        yield from self._take(asker, now)

    def tell(self, message: Join | Return) -> Effects:
        """This worker joins, or is back, and with it all others.

        A neighbour that misses it makes bundles that wait a while for nobody, or go without somebody.
        """
        if isinstance(message, Join):
            for link in self.links.values():
                yield Send(link.route, self._member.packet(replace(message, waits=False)))
            return
        self._over[message.store] = message.call
        self._away = {
            place: call
            for place, call in self._away.items()
            if place[0] != message.store or call > message.call
        }
        self._expect()

    def ask_after(self, requests: Iterable[Request], now: float) -> Effects:
        """Somebody waits for these requests of this worker: let them not wait for others."""
        mine = [self._mine[request] for request in requests if request in self._mine]
        yield from self._ask_after(mine, now)

    def link_of(self, request: Request) -> Connection | None:
        """Return along which link a request of this worker was asked; None while it was not."""
        asker = self._mine.get(request)
        if asker is None:
            return request.link
        assert asker.bundle is not None, "who asks is in a bundle"
        return None if asker.bundle.request is None else asker.bundle.request.link

    def due(self, now: float) -> Iterator[tuple[Connection, Request]]:
        """Yield what may be sent to neighbours now."""
        return self._beside.due(now)

    # --- what neighbours ask -------------------------------------------------------------------

    def admit(self, envelope: Envelope, kind: type[Message]) -> bool:
        """Judge a packet by its envelope: from a neighbour as the view names it, that has said HELLO.

        One of an incarnation that no view has named yet is told nothing: it asks again.

        Raises:
            KvpsError: what its sender is to be told.
        """
        self._fence(envelope)
        if envelope.incarnation > self._lives.get(envelope.rank, 0):
            return False
        caller = self._callers.get(envelope.rank)
        is_known = caller is not None and caller.incarnation == envelope.incarnation
        if kind is not Hello and not is_known:
            raise ProtocolError(f"worker {self._member.rank} expects HELLO first")
        return True

    def on_packet(self, route: Route, packet: Packet, now: float) -> Effects:
        """A neighbour asks something."""
        envelope, message = packet.envelope, packet.message
        view = self._member.view
        try:
            if not self.admit(envelope, type(message)):
                return
            if isinstance(message, Hello):
                yield self._hello(route, envelope, message)
                return
            if view is not None and envelope.view < view.since:
                return  # of an epoch that is over; who asked will know, and asks anew
            caller = self._callers[envelope.rank]
            caller.route = route
            yield from self._on_request(caller, packet, now)
        except KvpsError as error:
            yield self._send(route, Error(envelope.seq, error.code, str(error)))

    def _fence(self, envelope: Envelope) -> None:
        is_near = envelope.role is Role.WORKER and envelope.rank in self._ranks
        if envelope.job != self._member.job or not is_near:
            raise Mismatch(
                f"{envelope.node} of job {envelope.job.hex()[:8]} is no neighbour of worker "
                f"{self._member.rank} of job {self._member.job.hex()[:8]}"
            )
        life = self._lives.get(envelope.rank, 0)
        if envelope.incarnation < life:
            raise Fenced(
                f"{envelope.node} incarnation {envelope.incarnation} was replaced by incarnation "
                f"{life}. This process must stop"
            )

    def _hello(self, route: Route, envelope: Envelope, message: Hello) -> Send:
        check_protocol(message, f"worker {self._member.rank}")
        rank, incarnation = envelope.rank, envelope.incarnation
        caller = self._callers.get(rank)
        if caller is None or caller.incarnation < incarnation:
            self._callers[rank] = caller = PeerSession(rank, incarnation, route)
            self._bundles.replaced(rank)
        caller.route = route
        welcome = self._member.welcome
        assert welcome is not None, "who listens is a member"
        return self._send(route, Welcome(rank, incarnation, welcome.workers, welcome.servers))

    def _on_request(self, caller: PeerSession, packet: Packet, now: float) -> Effects:
        message, seq = packet.message, packet.envelope.seq
        if isinstance(message, Probe):
            yield from self._probed(caller, message, now)
            return
        if isinstance(message, Join):
            if message.call > self._over.get(message.store, 0):
                self._away[message.store, caller.rank] = message.call
                self._expect()
            return
        if seq in caller.asked:
            return  # it came twice
        if _is_compressed(message):
            raise ProtocolError(
                f"worker {caller.rank} sent what is compressed to a worker: it goes to the server"
            )
        if isinstance(message, Push):
            if message.ranks != (caller.rank,):
                raise ProtocolError(f"worker {caller.rank} pushes for ranks {message.ranks!s:.60}")
            strip = DenseGradient.of(packet.payload, message.dtype)
            asker = Participant(caller.rank, message, PeerRequest(caller, seq), lambda: strip)
        elif isinstance(message, Pull) and message.values:
            asker = Participant(caller.rank, message, PeerRequest(caller, seq))
        else:
            raise ProtocolError(f"a worker may not send {type(message).__name__} to a worker")
        caller.asked[seq] = asker
        yield from self._take(asker, now)

    def _probed(self, caller: PeerSession, message: Probe, now: float) -> Effects:
        missing = tuple([seq for seq in message.seqs if seq not in caller.asked])
        yield self._send(caller.route, Probed(missing, ()))
        askers = [caller.asked[seq] for seq in message.seqs if seq in caller.asked]
        yield from self._ask_after(askers, now)

    def _take(self, asker: Participant, now: float) -> Effects:
        if isinstance(asker.message, Push):
            self._post(self._bundles.push(asker, now))
            return
        found = self._bundles.pull(asker)
        if isinstance(found, Request):
            self._post([found])
        elif found is not None:
            yield from self._give(asker, found, now)

    def _ask_after(self, askers: Iterable[Participant], now: float) -> Effects:
        links: dict[Connection, None] = {}
        for asker in askers:
            bundle = asker.bundle
            assert bundle is not None, "who asks is in a bundle"
            self._bundles.ask_after(bundle, now)
            request = bundle.request
            if request is not None and request.seq and request.link is not None:
                links[request.link] = None
        for link in links:
            yield from self._own.probe(link)

    def _post(self, requests: Iterable[Request]) -> None:
        for request in requests:
            assert request.server is not None
            self._servers[request.server].queue(request)

    # --- what servers answer ---------------------------------------------------------------------

    def taken_in(self, bundle: MergedRequest, now: float) -> Effects:
        """A server has the pushes of ``bundle``."""
        told = self._bundles.taken_in(bundle)
        for asker in told:
            yield from self._acknowledge(asker, now)
        request = bundle.request
        assert request is not None, "a server has it"
        is_answered_later = wants_values(request.message)
        if told and bundle.is_asked_after and is_answered_later and request.link is not None:
            yield from self._own.probe(request.link)  # who asked wants to know why

    def waits(self, bundle: MergedRequest, reason: str) -> Effects:
        """A server said what ``bundle`` waits for: tell those who asked."""
        for asker in bundle.askers.values():
            if isinstance(asker.who, Request):
                asker.who.waits_for = reason
            elif bundle.is_asked_after and wants_values(asker.message):
                letter = asker.who
                assert isinstance(letter, PeerRequest)
                pending = (Pending(letter.seq, reason),)
                yield self._send(letter.caller.route, Probed((), pending))

    def answered(self, bundle: MergedRequest, packet: Packet, now: float) -> Effects:
        """A server answered ``bundle``."""
        message = packet.message
        new = self._bundles.taken_in(bundle)
        for asker in new:
            if not wants_values(asker.message):
                yield from self._acknowledge(asker, now)
        if not isinstance(message, Pulled):
            return
        values = from_frame(packet.payload[0], BY_ID[message.dtype].name)
        answer = self._bundles.answered(bundle, message, values)
        mine: list[Participant] = []
        for asker in bundle.askers.values():
            if asker.rank == self._member.rank:
                mine.append(asker)  # the others need not wait while its values are copied
            elif wants_values(asker.message):
                yield from self._give(asker, answer, now)
        for asker in mine:
            if wants_values(asker.message):
                yield from self._give(asker, answer, now)

    def refused(self, bundle: MergedRequest, error: KvpsError, now: float) -> Effects:
        """A server refused ``bundle``: ask for each by itself, or tell them."""
        again = self._bundles.refused(bundle)
        self._post(again)
        if again:
            yield Note("debug", f"a bundle was refused, and is pushed one by one: {error}")
            return
        for asker in bundle.askers.values():
            if bundle.is_taken_in and not wants_values(asker.message):
                continue  # it was told that all is well, and it is
            if isinstance(asker.who, Request):
                del self._mine[asker.who]
                yield from self._own.refused(asker.who, error, now)
            else:
                letter = self._done(asker)
                refusal = Error(letter.seq, error.code, str(error))
                yield self._send(letter.caller.route, refusal)

    def _acknowledge(self, asker: Participant, now: float) -> Effects:
        """Tell an asker that its push is in."""
        who, is_done = asker.who, not wants_values(asker.message)
        ack = Ack((Receipt(0, 0),))
        if isinstance(who, Request):
            who.forget()
            if is_done:
                del self._mine[who]
                yield from self._own.answered(who, self._member.packet(ack), now)
            else:
                yield from self._own.taken_in(who, now)
            return
        assert isinstance(who, PeerRequest)
        if is_done:
            self._done(asker)
        yield self._send(who.caller.route, Ack((Receipt(who.seq, 0),)))

    def _give(self, asker: Participant, answer: Reply, now: float) -> Effects:
        """Give an asker the values."""
        frame = to_frame(answer.values)
        if isinstance(asker.who, Request):
            request = asker.who
            del self._mine[request]
            request.forget()
            if not request.dropped:
                packet = Packet(self._member.envelope(), answer.message, (frame,))
                yield from self._own.answered(request, packet, now)
            return
        letter = self._done(asker)
        message = replace(answer.message, seq=letter.seq)
        packet = Packet(self._member.envelope(), message, (frame,))
        yield Send(letter.caller.route, packet)

    def _done(self, asker: Participant) -> PeerRequest:
        letter = asker.who
        assert isinstance(letter, PeerRequest)
        del letter.caller.asked[letter.seq]
        return letter

    # --- time ------------------------------------------------------------------------------------

    def on_timer(self, now: float) -> None:
        """Let go what was asked after, and give up who does not speak."""
        self._post(self._bundles.overdue(now))
        self._give_up_the_silent(now)

    def deadline(self) -> float | None:
        """When :meth:`on_timer` has something to do."""
        return self._bundles.deadline()

    def _send(self, route: Route, message: Message) -> Send:
        return Send(route, self._member.packet(message))

    def check(self) -> None:
        """Assert the invariants."""
        self._bundles.check()
        assert self._beside.links == list(self.links.values())
        for caller in self._callers.values():
            for seq, asker in caller.asked.items():
                assert isinstance(asker.who, PeerRequest)
                assert asker.who.seq == seq
                assert asker.bundle is not None


def _is_compressed(message: Message) -> bool:
    """Whether a push is written by a codec, or values may be answered by one."""
    if isinstance(message, Push) and message.code is not None:
        return True
    return isinstance(message, Push | Pull) and bool(message.held)
