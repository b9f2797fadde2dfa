"""The context of a request on a server: its store, its session, what its sender may ask, and what
every answer needs.

Which messages a worker may send at all is in :mod:`kvps.protocol.permissions`. Here is what depends on their
fields: a push speaks for its sender, or for ranks of its sender's machine in a store where these push as one;
only rank 0 loads states; no rank ends a join that it has not made.

A request that waits for something to exist is a :class:`~kvps.core.server.sessions.PendingRequest`, pending
in its session: it is tried again whenever something came into being.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvps.core.effects import Hold, Outbox, Route, Send
from kvps.core.limits import Limits, remedy
from kvps.core.liveness import quiet_in_words
from kvps.core.membership_client import MembershipClient, Quorum
from kvps.core.server.chunks.rounds import FreeSpan
from kvps.core.server.chunks.slab import Chunks
from kvps.core.server.meter import Meter
from kvps.core.server.sessions import WATCHED_MAX, Describe, Link, PendingRead, PendingRequest, Session
from kvps.core.server.store import ServerStore
from kvps.errors import Fenced, KvpsError, Mismatch, Overload, ProtocolError, Unauthorized
from kvps.protocol.envelope import Envelope, Message, Packet, Role, maker
from kvps.protocol.membership import Error, History, Ping, Pong, Return, View
from kvps.protocol.stores import Declare, Open, SetState
from kvps.protocol.values import Pull, Push, PushRows, PushTables

_packet, _send = maker(Packet), maker(Send)
PUSHES = Push, PushRows, PushTables


class StoreQuorum(NamedTuple):
    """The worker ranks that count in one store."""

    required: frozenset[int]
    """A round waits for them."""
    enough: frozenset[int]
    """A round without them cannot close: the same, or none where rounds close at a quorum."""
    live: frozenset[int]
    """Their clocks count."""
    lost: frozenset[int]
    """Lost, or replaced by a process that has not entered."""
    view: View | None
    """The view that says so."""
    away: frozenset[int]
    """The ranks that had joined then: they have run out of batches."""

    @classmethod
    def of(
        cls, quorum: Quorum, opened: Open, view: View | None, away: frozenset[int], outside: frozenset[int]
    ) -> StoreQuorum:
        """Return the ranks that count in a store that was opened so."""
        required = quorum.members(opened.on_worker_lost) - away - outside
        enough = frozenset[int]() if opened.quorum else required
        lost = quorum.lost | (outside & quorum.held)
        return cls(required, enough, quorum.held - away - outside, lost, view, away)


class RequestContext:
    """The stores of one job, its workers' sessions, and what is to be said to them.

    Args:
        member: this server's place in the job.
        chunks: the values of all stores.
        outbox: what this server's door will return; whatever is said is appended.
        lives: by rank, the newest incarnation that was heard of.
        meter: the server's counters.
        limits: the named limits.
    """

    def __init__(
        self,
        member: MembershipClient,
        chunks: Chunks,
        outbox: Outbox,
        lives: dict[int, int] | None = None,
        meter: Meter | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.meter = meter or Meter()
        self.limits = limits or Limits()
        self.member = member
        self.chunks = chunks
        self.outbox: Outbox = outbox
        self.stores: dict[str, ServerStore] = {}
        self.sessions: dict[int, Session] = {}
        """By rank: the newest incarnation that has spoken."""
        self.lives: dict[int, int] = dict(lives or {})
        """By rank: the newest incarnation that was heard of."""
        self._quorums: dict[str, StoreQuorum] = {}
        """By store, as of the view and the joins that it was made of."""
        self.outside: dict[str, frozenset[int]] = {}
        """Store that goes on without lost workers -> the ranks whose replacement has not entered it."""
        self.hear = self.check_request
        """Checks a request; where some are outside, also lets its sender in."""
        self.entered: Callable[[], None]
        """Called when a replacement has entered a store: rounds of its predecessor may be complete."""
        self.at_ends: list[Callable[[], None]] = []
        """Called at the end of each door, in order."""
        self.was_copied = False
        """The stores are those of another server, which has met all ranks."""
        self.has_news = False
        """Something was set or refused that another pending request may wait for."""
        self._spoken_in = member.view
        self._envelope = member.envelope()
        """The envelope of answers in that view."""
        self.more_gauges: Callable[[], dict[tuple[str, str], float]] = dict
        """Returns the gauges of what is no store, by metric and label."""
        self._watch_next = 0
        """The rank from which on links are watched next."""

    # --- stores -----------------------------------------------------------------------------

    def store(self, name: str) -> ServerStore:
        """Return a store.

        Raises:
            ProtocolError: if it was not opened.
        """
        store = self.stores.get(name)
        if store is None:
            raise ProtocolError(f"server {self.chunks.server}: store {name!r} was not opened")
        return store

    def store_of(self, chunk: int) -> ServerStore:
        """Return the store that a chunk belongs to.

        Raises:
            ProtocolError: if there is no such chunk.
        """
        return self.stores[self.chunks.at(chunk).store]

    def quorum(self, store: ServerStore) -> StoreQuorum:
        """Return the ranks that count in a store."""
        view, away = self.member.view, store.joins.away
        known = self._quorums.get(store.name)
        if known is None or view is None or known.view is not view or known.away is not away:
            outside = self.outside.get(store.name, frozenset())
            known = StoreQuorum.of(self._ranks(store), store.opened, view, away, outside)
            self._quorums[store.name] = known
        return known

    def _ranks(self, store: ServerStore) -> Quorum:
        quorum = self.member.quorum()
        return quorum.within(store.entered, store.opened.on_worker_lost) if quorum.late else quorum

    def members(self, store: ServerStore) -> frozenset[int]:
        """Return the ranks that a join of a store waits for."""
        return self._ranks(store).members(store.opened.on_worker_lost if store.ordered else "shrink")

    def users(self, store: ServerStore) -> frozenset[int]:
        """Return the ranks that take part in a store until they close it."""
        return self._ranks(store).members(store.opened.on_worker_lost)

    def enter(self, store: ServerStore, session: Session) -> None:
        """Count an added worker in a store from now on: rounds that are open wait for it, and its clock
        starts at that of the slowest live rank."""
        self._let_in(store, (session.rank,))
        if self.member.quorum().added.get(session.rank) == session.incarnation:
            self.admit(store, session.rank, session.incarnation)

    def admit(self, store: ServerStore, rank: int, incarnation: int) -> None:
        """Note that a process of an added worker has entered a store."""
        if store.entered.get(rank) == incarnation:
            return
        store.entered[rank] = incarnation
        self._quorums.pop(store.name, None)
        for chunk in self.chunks.of_store(store.name):
            for span in chunk.spans:
                if isinstance(span, FreeSpan):
                    span.admit(rank, self.quorum(store).live)

    def _hear_outsider(self, message: Message, session: Session) -> None:
        """Check a request, and count a replacement in a store from its first push on, or from its question
        what it owes."""
        self.check_request(message, session)
        is_in = False
        match message:
            case Push() | PushTables():
                is_in = self._let_in(self.store_of(message.chunk), message.ranks)
            case PushRows():
                is_in = self._let_in(self.store(message.store), message.ranks)
            case Pull(values=False):
                is_in = self._let_in(self.store_of(message.chunk), (session.rank,))
            case History():
                is_in = self._let_in(self.store(message.store), (session.rank,))
            case _:
                pass
        if is_in:
            self.entered()

    def _let_in(self, store: ServerStore, ranks: Iterable[int]) -> bool:
        outside = self.outside.get(store.name, frozenset())
        if outside.isdisjoint(ranks):
            return False
        self.leave_outside(store, outside.difference(ranks))
        return True

    def leave_outside(self, store: ServerStore, ranks: frozenset[int]) -> None:
        """Note the ranks whose replacement has not entered a store; the clocks of those that have start."""
        self._quorums.pop(store.name, None)
        entered = self.outside.get(store.name, frozenset()) - ranks
        self.outside[store.name] = ranks
        if not ranks:
            del self.outside[store.name]
        self.hear = self._hear_outsider if self.outside else self.check_request
        for rank in entered:
            self.start_clock(store, rank)

    def start_clocks(self, store: ServerStore) -> None:
        """Let the clocks of all ranks start anew: a join is over."""
        for chunk in self.chunks.of_store(store.name) if store.opened.mode == "ssp" else ():
            for span in chunk.spans:
                assert isinstance(span, FreeSpan)
                span.level()

    def start_clock(self, store: ServerStore, rank: int) -> None:
        """Let the clock of a rank that a new process holds start at that of the slowest live rank."""
        live = self.quorum(store).live
        for chunk in self.chunks.of_store(store.name):
            for span in chunk.spans:
                if isinstance(span, FreeSpan):
                    span.replace(rank, live)

    def forget_left(self, left: Iterable[int]) -> None:
        """Note that these ranks have no holder that any store waits for."""
        for store in self.stores.values():
            for rank in store.entered.keys() & left:
                del store.entered[rank]

    # --- sessions ---------------------------------------------------------------------------

    def life(self, rank: int) -> int:
        """Return the newest incarnation of ``rank`` that was heard of; 0 before the first."""
        return self.lives.get(rank, 0)

    def begin(self, rank: int, incarnation: int) -> None:
        """Note the incarnation of ``rank``; if it is newer, drop what an older one had pending."""
        before = self.life(rank)
        if incarnation <= before:
            return
        self.lives[rank] = incarnation
        old = self.sessions.pop(rank, None)
        if old is not None:
            old.pending.clear()
        # All wait for the successor of a process that this server has not met: perhaps the job was forming.
        was_outside = any(rank in ranks for ranks in self.outside.values())
        is_late = old is not None or was_outside or self.was_copied
        for store in self.stores.values() if before else ():
            if is_late and store.opened.on_worker_lost == "shrink":
                self.leave_outside(store, self.outside.get(store.name, frozenset()) | {rank})
            self.start_clock(store, rank)

    def check_place(self, envelope: Envelope) -> None:
        """Check that ``envelope`` names a place in this job.

        Raises:
            Mismatch, ProtocolError: if it does not.
        """
        job, welcome = self.member.job, self.member.welcome
        if envelope.job != job or welcome is None:
            raise Mismatch(
                f"{self.me} serves job {job.hex()[:8]}, not {envelope.job.hex()[:8]}; this is "
                "the address of another cluster"
            )
        places = {Role.WORKER: welcome.seats, Role.SERVER: welcome.servers}
        if envelope.rank >= places.get(envelope.role, 0):
            raise ProtocolError(
                f"there is no {envelope.role} {envelope.rank} of this job that may talk to {self.me}"
            )

    def is_named(self, envelope: Envelope) -> bool:
        """Return whether the newest view names the incarnation of ``envelope``; if not, a later one may.

        Raises:
            Fenced: for an older incarnation than that of the view.
        """
        is_worker = envelope.role is Role.WORKER
        life = self.life(envelope.rank) if is_worker else self._life_of_server(envelope.rank)
        self._fence(envelope, life)
        return envelope.incarnation == life

    def greet(self, route: Route, envelope: Envelope) -> None:
        """Let in the worker that ``envelope`` names, of the incarnation that the view names."""
        session = self.sessions.setdefault(envelope.rank, Session(envelope.rank, route, envelope.incarnation))
        session.route = route

    def check_sender(self, envelope: Envelope) -> None:
        """Check that a packet is from the incarnation of a member that the newest view names.

        Raises:
            Mismatch: for another job.
            Fenced: for an older incarnation than that of the view.
            ProtocolError: for a worker that has not sent HELLO, or a server that no view has named yet.
        """
        is_worker = envelope.role is Role.WORKER
        session = self.sessions.get(envelope.rank) if is_worker else None
        is_known = session is not None and session.incarnation == envelope.incarnation
        if is_known and envelope.job == self.member.job:
            return  # a session is of the incarnation that the newest view names
        self.check_place(envelope)
        is_named = self.is_named(envelope)
        if is_worker:
            raise ProtocolError(f"{self.me} expects HELLO first on every connection")
        if not is_named:
            raise ProtocolError(f"{self.me} does not know this {envelope.node} yet; ask again")

    def check_request(self, message: Message, session: Session) -> None:
        """Check that the worker of ``session`` may ask this.

        Raises:
            Unauthorized: if it may not.
            Overload: if too much of it waits for an answer.
        """
        rank = session.rank
        if isinstance(message, PUSHES):
            if message.ranks != (rank,) and not self._may_merge(message, rank):
                raise Unauthorized(
                    f"worker {rank} pushes for ranks {message.ranks!s:.60}: it may push for itself, and "
                    "for workers of its machine in a store with host aggregation",
                    reason="other_ranks",
                )
        elif isinstance(message, SetState) and rank != 0:
            raise Unauthorized(
                f"worker {rank} may not load optimizer states; only rank 0 may", reason="rank_0_only"
            )
        elif isinstance(message, Return):
            made = self.store(message.store).joins.made.get(rank, 0)
            if message.call > made:
                raise Unauthorized(
                    f"worker {rank} returns from join {message.call} of store {message.store!r}, and "
                    f"has made {made}",
                    reason="join_not_made",
                )
        if len(session.pending) >= self.limits.pending:
            raise Overload(
                f"{self.limits.pending} requests of worker {rank} already wait for an answer; "
                f"{remedy('pending')}",
                limit="pending",
            )
        if isinstance(message, Declare) and not message.create:
            keys = session.waiting_keys + len(message.entries)
            if keys > self.limits.keys:
                raise Overload(
                    f"requests of worker {rank} wait for {keys:,} keys, and a server holds "
                    f"{self.limits.keys:,}; {remedy('keys')}",
                    limit="waiting_keys",
                )

    def _may_merge(self, push: Push | PushRows | PushTables, rank: int) -> bool:
        """Whether a store lets ``rank`` push for all these ranks: those that are known to be on
        its machine."""
        store = self.store(push.store) if isinstance(push, PushRows) else self.store_of(push.chunk)
        view = self.member.view
        members = view.members if view is not None else ()
        machines = {member.rank: member.machine for member in members if member.role == Role.WORKER}
        here = machines.get(rank, 0)
        return (
            store.opened.bundles
            and here != 0
            and all(machines.get(pushed_for, 0) == here for pushed_for in push.ranks)
        )

    def _life_of_server(self, rank: int) -> int:
        """Return the incarnation of a server in the newest view; 0 if the view does not name it."""
        members = self.member.view.members if self.member.view else ()
        me = self.member.incarnation if rank == self.member.rank else None  # the other is its copy
        roles = (Role.SERVER,) if me is None else (Role.SERVER, Role.STANDBY)
        lives = [
            member.incarnation
            for member in members
            if member.role in roles and member.rank == rank and member.incarnation != me
        ]
        return max(lives, default=0)

    def _fence(self, envelope: Envelope, life: int) -> None:
        if envelope.incarnation < life:
            raise Fenced(
                f"{envelope.node} incarnation {envelope.incarnation} was replaced by incarnation "
                f"{life}; {self.me} accepts no more messages from it. This process must stop"
            )

    @property
    def me(self) -> str:
        """This server, as it is called in texts."""
        return f"server {self.member.rank}"

    def demand_rank_0(self, session: Session, what: str) -> None:
        """Check that rank 0 asks.

        Raises:
            ProtocolError: if another rank does.
        """
        if session.rank != 0:
            raise ProtocolError(f"rank {session.rank} may not {what}; only rank 0 may")

    def description(self, now: float) -> Describe:
        """Return what says how a rank stands, as this server has heard."""

        def describe(rank: int) -> str:
            session = self.sessions.get(rank)
            if rank in self.member.quorum().lost:
                return "lost"
            if session is None or session.asked_at is None:
                return "has made no request here yet"
            return quiet_in_words(now - session.asked_at, "request")

        return describe

    # --- requests that wait for something to exist ------------------------------------------

    def attempt(self, session: Session, seq: int, waiting: PendingRequest) -> None:
        """Answer ``waiting``, or let it wait on."""
        try:
            answer = waiting.retry()
        except KvpsError as error:
            self.refuse(session, seq, error)
            return
        if answer is None:
            session.wait(seq, waiting)
        else:
            session.forget(seq)
            self.send(session, answer)

    def retry(self) -> None:
        """Try all that waits for something to exist: something exists now."""
        self.has_news = True
        while self.has_news:
            self.has_news = False
            for session in self.sessions.values():
                for seq, pending in list(session.pending.items()):
                    if isinstance(pending, PendingRequest):
                        self.attempt(session, seq, pending)

    # --- answers ----------------------------------------------------------------------------

    def is_pending(self, reading: PendingRead) -> bool:
        """Return whether a read is still to be answered."""
        return reading.session.pending.get(reading.seq) is reading

    def refuse(self, session: Session, seq: int, error: KvpsError) -> None:
        """Answer a request that was pending by an error."""
        session.forget(seq)
        self.meter.refused(error)
        self.send(session, Error(seq, error.code, str(error)))

    def send(
        self,
        session: Session,
        message: Message,
        payload: tuple[memoryview, ...] = (),
        hold: Hold | None = None,
    ) -> None:
        """Say something to a worker; ``hold`` is released once ``payload`` has been read."""
        member = self.member
        if member.view is not self._spoken_in or self._envelope.job != member.job:
            self._spoken_in, self._envelope = member.view, member.envelope()
        packet = _packet((self._envelope, message, payload, ()))
        self.outbox.append(_send((session.route, packet, hold)))
        if payload:
            self.meter.on_send(payload)
            if session.link is not None and session.link.sent_values(self.meter.now):
                self._ping(session, session.link)

    # --- links ------------------------------------------------------------------------------

    def watch_links(self) -> None:
        """Watch the links to some workers for a while; the others are watched the next times."""
        ranks = sorted(self.sessions, key=lambda rank: (rank < self._watch_next, rank))
        for rank in ranks[:WATCHED_MAX]:
            session = self.sessions[rank]
            link = session.link = session.link or Link()
            if link.watch(self.meter.now):
                self._ping(session, link)
        self._watch_next = 0 if len(ranks) <= WATCHED_MAX else ranks[WATCHED_MAX]

    def hear_pong(self, session: Session, pong: Pong) -> None:
        """Count what a worker says of its link."""
        link, now = session.link, self.meter.now
        if link is None or (passed := link.answered(pong.seq, pong.sending_s, now)) is None:
            return
        for (name, label), seconds in passed.counts(session.rank).items():
            self.meter.add(name, label, seconds)
        if link.follows(now):
            self._ping(session, link)

    def _ping(self, session: Session, link: Link) -> None:
        self.outbox.append(Send(session.route, Packet(self.member.envelope(link.number), Ping())))
