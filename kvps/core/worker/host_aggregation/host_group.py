"""The workers of one host: the leader of each chunk, requests between them, failover.

Theory of operation
-------------------
The view says which workers are on this machine. For each chunk it makes one of them the leader, the same on
all of them: the worker whose turn it is by the chunk's number, or the next that is alive. Pushes and pulls
for a server on another machine go to the leader, which merges them
(:mod:`kvps.core.worker.host_aggregation.merge_queue`). The others speak to a leader as to a server.

Requests to a leader that is lost go to the servers directly, each by itself. So do requests to a
leader that holds its seat and says nothing; until it speaks, the next in turn leads for it.
Requests to a worker that does not lead any more stay there. Either way a merged request may lack a
rank that does not come: a participant that waits asks after it, and it goes.

A leader answers no neighbour before the server has answered it. So it has nothing that others would miss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from kvps import protocol as p
from kvps.core.effects import Connect, Listen, Note, Outbox, Route, Send
from kvps.core.gradients import DenseGradient
from kvps.core.key_roles import near_endpoint
from kvps.core.membership_client import MembershipClient
from kvps.core.worker.connection import Connection, Request, SendScheduler
from kvps.core.worker.host_aggregation.merge_queue import (
    MergedRequest,
    MergedRequests,
    Participant,
    Reply,
    wants_values,
)
from kvps.core.worker.host_aggregation.peer_sessions import PeerRequest, PeerSession, PeerSessions
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_ID
from kvps.errors import KvpsError, ProtocolError
from kvps.protocol.envelope import Envelope, Message, Node, Packet, Role
from kvps.tensors import Memory, from_frame, to_frame

MUTE_AFTER_S = 6.0
"""Seconds after which a neighbour that owes an answer is asked no more, until it speaks: its
process may have ended while its supervisor holds the seat, or may not have begun."""


class Own(Protocol):
    """The calls of this worker, which take the answers to its own requests."""

    def answered(self, request: Request, packet: Packet, now: float) -> None:
        """``request`` was answered by ``packet``."""

    def refused(self, request: Request, error: KvpsError, now: float) -> None:
        """``request`` was refused."""

    def taken_in(self, request: Request, now: float) -> None:
        """The server has the push of ``request``."""

    def probe(self, link: Connection) -> None:
        """Ask a peer after all requests that it has not answered."""


class HostGroup:
    """This worker among the workers of its machine."""

    def __init__(
        self, member: MembershipClient, memory: Memory, servers: list[Connection], own: Own, outbox: Outbox
    ) -> None:
        self._outbox = outbox
        self.links: dict[int, Connection] = {}
        """Rank -> the connection to a worker that may lead."""
        self._member = member
        self._memory = memory
        self._servers = servers
        self._own = own
        self.beside = SendScheduler(is_limited=False)
        """Without a window: a request that waits for other workers must not hold back theirs."""
        self._mute: set[int] = set()
        """Ranks that hold their seat and do not speak: they lead nothing until they do."""
        self._asked_at: dict[int, float] = {}
        """Rank -> when it was asked something while it owed no answer."""
        self._ranks: tuple[int, ...] = ()
        """All workers that were seen on this machine, lost ones too."""
        self._alive: frozenset[int] = frozenset()
        self._away: dict[tuple[str, int], int] = {}
        """(store, rank) -> the last join of a neighbour that is not known to be over."""
        self._over: dict[str, int] = {}
        """Store -> the last join that is over."""
        self._far: frozenset[int] = frozenset()
        """The servers on other machines."""
        self._peers = PeerSessions(member)
        self._merged = MergedRequests(0, 1, memory)
        self.is_active = False
        """Pushes and pulls may be made together: this worker listens to others of its machine."""
        self._mine: dict[Request, Participant] = {}
        """This worker's own requests that it leads, without an answer."""

    # --- who they are -------------------------------------------------------------------------

    def learn(self, members: Iterable[p.Member]) -> None:
        """Take in which member is on which machine."""
        machine = self._member.identity.machine
        everybody = list(members)
        self._far = frozenset(
            member.rank
            for member in everybody
            if member.role == Role.SERVER and (member.machine != machine or not machine)
        )
        here = [member for member in everybody if member.role == Role.WORKER and member.machine == machine]
        for rank in self.links.keys() - {member.rank for member in here}:
            self._part(rank)  # its seat is taken by one of another machine
        if not machine or not self._far:
            return  # nobody to share a machine with, or nothing that leaves it
        if not self.is_active:
            self.is_active = True
            self._merged = MergedRequests(self._member.rank, len(self._servers), self._memory)
            self._outbox.append(Listen(self._endpoint(self._member.rank, self._member.incarnation)))
        self._ranks = tuple([member.rank for member in here])
        self._peers.learn({member.rank: member.incarnation for member in here})
        self._alive = frozenset(member.rank for member in here if member.state == "held")
        for member in here:
            self._meet(member)
        self._expect()

    def _expect(self) -> None:
        """Let merged requests wait for the ranks that are here, and may push."""
        away = {rank for _, rank in self._away}
        self._post(self._merged.expect(self._alive - away))

    def begin_epoch(self) -> None:
        """Forget all requests, here and at others: they concern values that are gone."""
        self._mine.clear()
        self._asked_at.clear()
        for peer in self._peers:
            peer.asked.clear()
        for link in self.links.values():
            link.abandon()
        if self.is_active:
            self._merged = MergedRequests(self._member.rank, len(self._servers), self._memory)
            self._merged.expect(self._alive)

    def _meet(self, worker: p.Member) -> None:
        """Connect to a neighbour, or take requests back from a neighbour that is gone."""
        link = self.links.get(worker.rank)
        is_here = worker.state == "held" and worker.rank != self._member.rank
        is_same = link is not None and link.incarnation == worker.incarnation
        if link is not None and not (is_here and is_same):
            if is_same:  # it may come back, and knows the numbers that it was asked
                self._take_back(link)
            else:
                self._part(worker.rank)
                link = None
        if link is None and is_here:
            endpoint = self._endpoint(worker.rank, worker.incarnation)
            route = f"worker {worker.rank}"
            self.links[worker.rank] = Connection(
                route, endpoint, worker.incarnation, self._memory, self.beside
            )
            self._outbox.append(Connect(route, endpoint, is_near=True))
            self._member.greet(route)

    def _part(self, rank: int) -> None:
        """Forget a neighbour that is no more."""
        link = self.links.pop(rank)
        self.beside.links.remove(link)
        self._mute.discard(rank)
        self._take_back(link)

    def _take_back(self, link: Connection) -> None:
        """Ask the servers what a neighbour has not answered."""
        for request in link.abandon():
            assert request.server is not None
            self._servers[request.server].queue(request)

    def _endpoint(self, rank: int, incarnation: int) -> str:
        """Return the address at which a worker of this machine listens: a name in the kernel, not a file."""
        key = self._member.key_of(Node(Role.WORKER, rank))
        # Every user of the host sees the names of such sockets, and only members may know the job's.
        return near_endpoint(key or f"{self._member.job.hex()}-{rank}-{incarnation}")

    def leader(self, chunk: int) -> int:
        """Return the rank of the worker of this machine that leads a chunk."""
        first = chunk % len(self._ranks)
        turn = (*self._ranks[first:], *self._ranks[:first])
        return next(rank for rank in turn if rank in self._alive and rank not in self._mute)

    def heard(self, link: Connection) -> None:
        """A neighbour has answered: it may lead (again)."""
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
        """Number of live workers on this machine, this one among them; 1 if no push leaves it."""
        return max(1, len(self._alive))

    def collect(self, store: WorkerStore, request: Request) -> bool:
        """Whether ``request`` is made together with those of neighbours.

        Compressed pushes are not: each worker keeps the residual of its own encoding, and the sum
        of gradients would be encoded anew. Pushes of a step that is clipped are not: a merged
        request has the elements of several pushes.
        """
        message = request.message
        return (
            not _goes_alone(message)
            and store.opened.bundles
            and len(self._alive) > 1
            and request.server in self._far
            and (isinstance(message, p.Push) or (isinstance(message, p.Pull) and message.values))
        )

    def ask(self, request: Request, now: float) -> None:
        """Make ``request`` together with those of neighbours: merge it, or send it to the leader."""
        message = request.message
        assert isinstance(message, p.Push | p.Pull)
        leader = self.leader(message.chunk)
        if leader != self._member.rank:
            if not self.links[leader].is_busy:
                self._asked_at[leader] = now
            self.links[leader].queue(request)
            return
        participant = Participant(leader, message, request, priority=request.priority)
        if isinstance(message, p.Push):
            participant.gradient = lambda: DenseGradient(request.peek())
        self._mine[request] = participant
        self._take(participant, now)

    def tell(self, message: p.Join | p.Return) -> None:
        """Tell neighbours that this worker joins; or note that it is back, and with it all others.

        A neighbour that misses it makes merged requests that wait in vain for a while, or go without a rank.
        """
        if isinstance(message, p.Join):
            for link in self.links.values():
                self._member.send(link.route, replace(message, waits=False))
            return
        self._over[message.store] = message.call
        self._away = {
            place: call
            for place, call in self._away.items()
            if place[0] != message.store or call > message.call
        }
        self._expect()

    def ask_after(self, requests: Iterable[Request], now: float) -> None:
        """Note that a call waits for these requests of this worker: they are not to wait for other
        workers."""
        mine = [self._mine[request] for request in requests if request in self._mine]
        self._ask_after(mine, now)

    def led(self) -> Iterable[Request]:
        """Return the requests of this worker that it leads, and that have no answer."""
        return self._mine.keys()

    def link_of(self, request: Request) -> Connection | None:
        """Return the connection along which a request of this worker was sent; None while it was not."""
        participant = self._mine.get(request)
        if participant is None:
            return request.link
        assert participant.merged is not None, "a participant is in a merged request"
        return None if participant.merged.request is None else participant.merged.request.link

    # --- what neighbours ask -------------------------------------------------------------------

    def admit(self, envelope: Envelope, kind: type[Message]) -> bool:
        """Judge a packet by its envelope: from a neighbour as the view names it, that has said HELLO.

        A neighbour of an incarnation that no view has named yet is told nothing: it asks again.

        Raises:
            KvpsError: what its sender is to be told.
        """
        return self._peers.admit(envelope, kind)

    def on_packet(self, route: Route, packet: Packet, now: float) -> None:
        """A neighbour asks something."""
        envelope, message = packet.envelope, packet.message
        view = self._member.view
        try:
            if not self.admit(envelope, type(message)):
                return
            if isinstance(message, p.Hello):
                if self._peers.begin(route, envelope, message):
                    self._merged.replaced(envelope.rank)
                known = self._member.seat  # a worker that listens is a member
                seat = envelope.rank, envelope.incarnation
                self._member.send(route, p.Welcome(*seat, known.workers, known.servers))
                return
            if view is not None and envelope.view < view.since:
                return  # of an epoch that is over; the neighbour will know, and asks anew
            self._on_request(self._peers.of(route, envelope), packet, now)
        except KvpsError as error:
            self._member.send(route, p.Error(envelope.seq, error.code, str(error)))

    def _on_request(self, peer: PeerSession, packet: Packet, now: float) -> None:
        message, seq = packet.message, packet.envelope.seq
        if isinstance(message, p.Probe):
            self._probed(peer, message, now)
            return
        if isinstance(message, p.Join):
            if message.call > self._over.get(message.store, 0):
                self._away[message.store, peer.rank] = message.call
                self._expect()
            return
        if seq in peer.asked:
            return  # it came twice
        if _goes_alone(message):
            raise ProtocolError(
                f"worker {peer.rank} sent a compressed push, or a push of a step that is clipped, to a "
                "worker; these go to the server"
            )
        if isinstance(message, p.Push):
            if message.ranks != (peer.rank,):
                raise ProtocolError(f"worker {peer.rank} pushes for ranks {message.ranks!s:.60}")
            gradient = DenseGradient.of(packet.payload, message.dtype)
            participant = Participant(peer.rank, message, PeerRequest(peer, seq), lambda: gradient)
        elif isinstance(message, p.Pull) and message.values:
            participant = Participant(peer.rank, message, PeerRequest(peer, seq))
        else:
            raise ProtocolError(f"a worker may not send {type(message).__name__} to a worker")
        peer.asked[seq] = participant
        self._take(participant, now)

    def _probed(self, peer: PeerSession, message: p.Probe, now: float) -> None:
        missing = tuple([seq for seq in message.seqs if seq not in peer.asked])
        self._member.send(peer.route, p.Probed(missing, ()))
        participants = [peer.asked[seq] for seq in message.seqs if seq in peer.asked]
        self._ask_after(participants, now)

    def _take(self, participant: Participant, now: float) -> None:
        if isinstance(participant.message, p.Push):
            self._post(self._merged.push(participant, now))
            return
        found = self._merged.pull(participant)
        if isinstance(found, Request):
            self._post([found])
        elif found is not None:
            self._give(participant, found, now)

    def _ask_after(self, participants: Iterable[Participant], now: float) -> None:
        links: dict[Connection, None] = {}
        for participant in participants:
            merged = participant.merged
            assert merged is not None, "a participant is in a merged request"
            self._merged.ask_after(merged, now)
            request = merged.request
            if request is not None and request.seq and request.link is not None:
                links[request.link] = None
        for link in links:
            self._own.probe(link)

    def _post(self, requests: Iterable[Request]) -> None:
        for request in requests:
            assert request.server is not None
            self._servers[request.server].queue(request)

    # --- what servers answer ---------------------------------------------------------------------

    def taken_in(self, merged: MergedRequest, now: float) -> None:
        """Tell the participants that the server has the pushes of ``bundle``."""
        told = self._merged.taken_in(merged)
        for participant in told:
            self._acknowledge(participant, now)
        request = merged.request
        assert request is not None, "a server has it"
        is_answered_later = wants_values(request.message)
        if told and merged.is_asked_after and is_answered_later and request.link is not None:
            self._own.probe(request.link)  # the participant wants to know why

    def waits(self, merged: MergedRequest, reason: str, is_for_workers: bool, now: float) -> None:
        """Tell the participants what ``bundle`` waits for, as the server said."""
        for participant in merged.participants.values():
            if isinstance(participant.who, Request):
                participant.who.waits_for = reason
                if is_for_workers:
                    participant.who.confirmed_at = now
            elif merged.is_asked_after and wants_values(participant.message):
                peer_request = participant.who
                assert isinstance(peer_request, PeerRequest)
                seq = peer_request.seq
                stand = p.Probed((), (p.Pending(seq, reason),), (seq,) if is_for_workers else ())
                self._member.send(peer_request.peer.route, stand)

    def answered(self, merged: MergedRequest, packet: Packet, now: float) -> None:
        """Hand the server's answer to the participants of ``bundle``."""
        message = packet.message
        new = self._merged.taken_in(merged)
        for participant in new:
            if not wants_values(participant.message):
                self._acknowledge(participant, now)
        if not isinstance(message, p.Pulled):
            return
        values = from_frame(packet.payload[0], BY_ID[message.dtype].name)
        answer = self._merged.answered(merged, message, values)
        mine: list[Participant] = []
        for participant in merged.participants.values():
            if participant.rank == self._member.rank:
                mine.append(participant)  # the others need not wait while its values are copied
            elif wants_values(participant.message):
                self._give(participant, answer, now)
        for participant in mine:
            if wants_values(participant.message):
                self._give(participant, answer, now)

    def refused(self, merged: MergedRequest, error: KvpsError, now: float) -> None:
        """Ask for each participant of a refused ``bundle`` by itself, or tell them."""
        again = self._merged.refused(merged)
        self._post(again)
        if again:
            self._outbox.append(
                Note("debug", f"a merged push was refused, and its pushes are sent separately: {error}")
            )
            return
        for participant in merged.participants.values():
            if merged.is_taken_in and not wants_values(participant.message):
                continue  # it was told that all is well, and it is
            if isinstance(participant.who, Request):
                del self._mine[participant.who]
                self._own.refused(participant.who, error, now)
            else:
                peer_request = self._done(participant)
                refusal = p.Error(peer_request.seq, error.code, str(error))
                self._member.send(peer_request.peer.route, refusal)

    def _acknowledge(self, participant: Participant, now: float) -> None:
        """Tell a participant that the server has its push."""
        who, is_done = participant.who, not wants_values(participant.message)
        ack = p.Ack((p.Receipt(0, 0),))
        if isinstance(who, Request):
            who.forget()
            if is_done:
                del self._mine[who]
                self._own.answered(who, self._member.packet(ack), now)
            else:
                self._own.taken_in(who, now)
            return
        assert isinstance(who, PeerRequest)
        if is_done:
            self._done(participant)
        self._member.send(who.peer.route, p.Ack((p.Receipt(who.seq, 0),)))

    def _give(self, participant: Participant, answer: Reply, now: float) -> None:
        """Give a participant the values."""
        frame = to_frame(answer.values)
        if isinstance(participant.who, Request):
            request = participant.who
            del self._mine[request]
            request.forget()
            if not request.dropped:
                packet = Packet(self._member.envelope(), answer.message, (frame,))
                self._own.answered(request, packet, now)
            return
        peer_request = self._done(participant)
        message = replace(answer.message, seq=peer_request.seq)
        packet = Packet(self._member.envelope(), message, (frame,))
        self._outbox.append(Send(peer_request.peer.route, packet))

    def _done(self, participant: Participant) -> PeerRequest:
        peer_request = participant.who
        assert isinstance(peer_request, PeerRequest)
        del peer_request.peer.asked[peer_request.seq]
        return peer_request

    def on_timer(self, now: float) -> None:
        """Send merged requests that are overdue, and give up neighbours that do not speak."""
        self._post(self._merged.overdue(now))
        self._give_up_the_silent(now)

    def deadline(self) -> float | None:
        """When :meth:`on_timer` has something to do."""
        return self._merged.deadline()

    def check(self) -> None:
        """Assert the invariants."""
        self._merged.check()
        assert self.beside.links == list(self.links.values())
        for peer in self._peers:
            for seq, participant in peer.asked.items():
                assert isinstance(participant.who, PeerRequest)
                assert participant.who.seq == seq
                assert participant.merged is not None


def _goes_alone(message: Message) -> bool:
    """Whether a push is encoded, or its answer may be; or whether it is part of a step that is clipped."""
    if isinstance(message, p.Push) and (message.code is not None or message.step is not None):
        return True
    return isinstance(message, p.Push | p.Pull) and bool(message.held)
