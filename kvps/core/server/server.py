"""The rules of a server: who may ask it, what each request does, and when it is answered.

Theory of operation
-------------------
A worker's requests come numbered by ``seq``; what makes them *once* is not that number but what
they are: a push is known by (elements, rank, push number), a declaration by (key, call), and each
of them may be taken in again without effect. So no list of past requests is kept; a worker that
misses an answer probes, and sends again what the server does not have.

A request that cannot be answered yet is *pending*: it is kept by (rank, seq) and answered when a
span moves, a key becomes ready or the view changes. A newer incarnation of a rank drops what the
older one had pending; what the older one pushed stays.

Who speaks is known by rank and incarnation, never by route, and which incarnation a rank has is known by
the view: a HELLO that is ahead of it waits for the next. A worker is let in by its HELLO, and from then on
may come along any route. :meth:`Server.admit` judges by the envelope alone, before a packet is decoded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kvps.core.effects import Connect, Effects, Exit, Note, Route, Send, Trust
from kvps.core.keys import name_of
from kvps.core.membership_client import (
    SCHEDULER,
    STILL_S,
    Identity,
    MembershipClient,
    check_protocol,
)
from kvps.core.server.checkpointer import ORDERS, Checkpointer
from kvps.core.server.control import Control
from kvps.core.server.sessions import PendingRequest, Session
from kvps.core.server.snapshot.storage import Answer, FoundCuts, Loaded
from kvps.core.server.stragglers import Stall, StragglerLog
from kvps.core.server.update.aggregator import Aggregator
from kvps.errors import (
    ConfigError,
    Fenced,
    KvpsError,
    Mismatch,
    ProtocolError,
    StorageError,
    unforeseen,
)
from kvps.protocol.checkpoint import Revive, Revived
from kvps.protocol.envelope import Envelope, Message, Node, Packet, Role
from kvps.protocol.membership import Error, Hello, OldRound, Stalled, Welcome
from kvps.protocol.stores import Norms
from kvps.tensors import PRIVATE, Memory

TELL_NORMS_EVERY_S = 1.0
LOOK_EVERY_S = 5.0
TELL_AFTER_S = 1.0
"""How long a round must have been open for the scheduler to be told of it."""
TELL_MAX = 256
"""How many stores, and how many ranks of each, it is told of."""
EXIT_TORN = 1
"""The exit code of a server that ends as its values were changed by half."""
SILENCES_MAX = 5
"""A server ends when everybody has been silent for so many times the scheduler's silence limit."""


class Reviving(NamedTuple):
    """Who wants a store restored, and how."""

    session: Session
    seq: int
    message: Revive


class Server:
    """One server process's part in one job after another."""

    def __init__(
        self,
        identity: Identity,
        now: float,
        memory_limit: int | None = None,
        memory: Memory = PRIVATE,
        threads: int = 1,
        checkpoint_every_s: float | None = None,
    ) -> None:
        """Begin.

        Args:
            identity: who this is.
            now: the time.
            memory_limit: bytes of values that keys may have.
            memory: where values lie.
            threads: how many compute.
            checkpoint_every_s: how often to write a checkpoint, 0 for never unless asked; None
                without a place for them.
        """
        self.member = MembershipClient(identity, now)
        self.keeper = Checkpointer(self.member, checkpoint_every_s)
        self._memory = memory
        self._threads = threads
        self.requests = Control(self.member, Aggregator(0, 1, 0), memory_limit)
        self._memory_limit = memory_limit
        self._endpoints: dict[int, tuple[str, int]] = {}
        """Where each other server is connected to, and which life of it."""
        self._early: dict[Node, tuple[Route, Envelope, Hello]] = {}
        """By member, the last HELLO of an incarnation that the view does not name yet."""
        self._heard_at = now
        """When a worker of this job last spoke."""
        self._rang_at = now
        self._next_tell = now
        self._next_look = now + LOOK_EVERY_S
        self._stalls = StragglerLog()
        self._has_told = False
        """The scheduler knows of open rounds."""

    # --- the doors ----------------------------------------------------------------------------

    def start(self, now: float) -> Effects:
        """Join the cluster."""
        yield from self.member.start(now)

    def admit(self, route: Route, envelope: Envelope, kind: type[Message]) -> bool:
        """Judge a packet by its envelope: from members of this job, as the view names them, or HELLO."""
        if route == SCHEDULER or issubclass(kind, Welcome | Error):
            return True
        if not self._serves(envelope, kind):
            return False
        if kind is not Hello:
            self._check_place(envelope)
            if envelope.role is Role.WORKER:
                self._check_worker(envelope)
            else:
                self._check_server(envelope)
        return True

    def on_packet(self, route: Route, packet: Packet, now: float) -> Effects:
        """A worker, another server or the scheduler said something."""
        if route == SCHEDULER:
            yield from self._on_scheduler(packet, now)
            return
        if isinstance(packet.message, Welcome | Error):
            return  # another server's answer to our HELLO or NORMS; an answer is never answered
        if not self._serves(packet.envelope, type(packet.message)):
            return  # the sender will learn why from the scheduler, and ask again what is still of use
        try:
            yield from self._on_peer(route, packet, now)
        except KvpsError as error:
            yield self._refusal(route, packet.envelope, error)
        yield from self.keeper.look(self.requests)

    def on_failure(self, route: Route, envelope: Envelope, error: Exception, now: float) -> Effects:
        """A packet could not be served, as nobody foresaw: its sender is told, and nothing was changed.

        A server whose values were being changed at that moment ends: half an update is in them. Its
        replacement returns to a checkpoint, with all others.
        """
        if self.requests.engine.is_torn:
            yield Exit(
                EXIT_TORN,
                f"an update of {envelope.node} failed half-way ({error!r:.200}), so what {self._me} holds "
                "is of no use. The log has the traceback. A server that is started in its place returns to "
                "the newest checkpoint; please report this as a bug",
            )
        elif route != SCHEDULER:
            yield self._refusal(route, envelope, unforeseen(self._me, error))

    def on_disk(self, answer: Answer, now: float) -> Effects:
        """Files were written or read."""
        if isinstance(answer, FoundCuts | Loaded) and isinstance(answer.for_whom, Reviving):
            yield from self._revive(answer.for_whom, answer)
        elif not isinstance(answer, Loaded):
            yield from self.keeper.on_disk(answer)
        elif self.keeper.is_for_us(answer):
            yield from self._return(answer)

    def on_drop(self, route: Route, now: float) -> Effects:
        """A connection broke: only the scheduler judges what that means."""
        yield from ()

    def on_timer(self, now: float) -> Effects:
        """Beat, tell norms again that others may have missed, and say which rounds wait for whom."""
        yield from self.member.on_timer(now)
        if now >= self._next_tell:
            self._next_tell = now + TELL_NORMS_EVERY_S
            yield from self.requests.tell_again()
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            yield from self._look(now)
            yield from self.requests.look_at_drops()
        if now > self._rang_at + STILL_S:  # this process stood still, and not the others
            self._heard_at = now
        self._rang_at = now
        limit_s = SILENCES_MAX * self.member.identity.silence_max_s
        if self.member.welcome and now - max(self._heard_at, self.member.heard_at) > limit_s:
            yield Exit(75, f"the scheduler and all workers have been silent for {limit_s:.0f} s")

    def deadline(self) -> float | None:
        """When the next beat, telling or look at the rounds is due."""
        beat = self.member.deadline()
        return None if beat is None else min(beat, self._next_tell, self._next_look)

    def _look(self, now: float) -> Effects:
        """Say in the log which rounds wait for whom, and tell the scheduler, for those who look."""
        oldest = list(self.requests.oldest(now))
        yield from self._stalls.look(oldest)
        rounds = tuple([self._shown(one) for one in oldest if one.age_s >= TELL_AFTER_S])
        if self.member.welcome is not None and (rounds or self._has_told):
            self._has_told = bool(rounds)
            yield Send(SCHEDULER, self.member.packet(Stalled(rounds[:TELL_MAX])))

    def _shown(self, one: Stall) -> OldRound:
        return OldRound(
            self.member.rank, one.store, one.key, one.number, one.missing[:TELL_MAX], one.age_s
        )

    # --- the scheduler --------------------------------------------------------------------------

    def _on_scheduler(self, packet: Packet, now: float) -> Effects:
        before, job, welcome = self.member.number, self.member.job, self.member.welcome
        if isinstance(packet.message, ORDERS) and welcome is not None:
            self.member.heard_at = now
            if packet.envelope.job == job:
                yield from self.keeper.on_order(packet.message, self.requests)
            return
        yield from self.member.on_packet(packet, now)
        if self.member.stopped is not None:
            yield Exit(self.member.stopped.exit_code, self.member.stopped.reason)
            return
        if self.member.welcome is not welcome:
            yield from self._begin()
        elif self.member.job != job:
            yield from self._begin()
            before = 0
            yield Note("info", "the next job begins; the stores of the last one are dropped")
        if self.member.number != before:
            yield from self._on_view()

    def _begin(self) -> Effects:
        """Hold nothing of any job."""
        yield from self.keeper.begin()
        self.requests = self._hold_nothing({})

    def _hold_nothing(self, lives: dict[int, int]) -> Control:
        welcome = self.member.welcome
        assert welcome is not None
        engine = Aggregator(
            self.member.rank, welcome.servers, welcome.workers, self._memory, self._threads
        )
        return Control(self.member, engine, self._memory_limit, lives)

    def _return(self, loaded: Loaded) -> Effects:
        """Hold what was read, and nothing else."""
        self.requests = self._hold_nothing(self.requests.lives)
        error = loaded.error
        if loaded.image is not None:
            try:
                self.requests.restore(loaded.image)
            except KvpsError as raised:
                error = raised
            except Exception as raised:  # nobody is served before another cut is held, or none
                error = StorageError(f"the image cannot be held: {raised!r:.200}")
        yield from self.keeper.restored(error)

    def _serves(self, envelope: Envelope, kind: type[Message]) -> bool:
        """Whether what is held here is what the sender of ``envelope`` may ask for."""
        view = self.member.view
        if self.keeper.is_returning:
            return False
        if view is not None and (view.phase == "returning" or view.epoch != self.keeper.epoch):
            return False
        is_hello = issubclass(kind, Hello)  # it knows no view
        return is_hello or view is None or envelope.view >= view.since

    def _on_view(self) -> Effects:
        """Connect to the other servers, and look again at all that waits."""
        view = self.member.view
        assert view is not None
        if view.keys:
            yield Trust(
                {
                    key: name_of(Node(Role(one.role), one.rank), one.incarnation)
                    for one, key in zip(view.members, view.keys, strict=False)
                    if key
                }
            )
        for one in view.members:
            if one.role == Role.WORKER:
                self.requests.begin(one.rank, one.incarnation)
            elif one.role == Role.SERVER and one.rank != self.member.rank:
                place = (one.endpoint, one.incarnation)
                if one.state == "held" and self._endpoints.get(one.rank) != place:
                    self._endpoints[one.rank] = place
                    key = self.member.key_of(Node(Role.SERVER, one.rank))
                    yield Connect(f"server {one.rank}", one.endpoint, None, key, bool(key))
                    yield Send(f"server {one.rank}", self.member.hello())
        yield from self.requests.look_again()
        early, self._early = self._early, {}
        for route, envelope, message in early.values():
            if not self._serves(envelope, Hello):
                continue  # it asks again when what is held is not about to be dropped
            try:
                yield from self._hello(route, envelope, message)
            except KvpsError as error:
                yield self._refusal(route, envelope, error)

    # --- peers ----------------------------------------------------------------------------------

    def _on_peer(self, route: Route, packet: Packet, now: float) -> Effects:
        envelope, message = packet.envelope, packet.message
        if isinstance(message, Hello):
            yield from self._hello(route, envelope, message)
            if envelope.role is Role.WORKER:
                self._heard_at = now
            return
        self._check_place(envelope)
        if envelope.role is Role.WORKER:
            self._heard_at = now
            session = self._session(route, envelope)
            if isinstance(message, Revive):
                yield from self._on_revive(session, envelope.seq, message)
            else:
                yield from self.requests.answer(session, packet, now)
            return
        self._check_server(envelope)
        if not isinstance(message, Norms):
            raise ProtocolError(f"a server may not send {type(message).__name__} to a server")
        yield from self.requests.norms(message, envelope.rank)

    def _on_revive(self, session: Session, seq: int, message: Revive) -> Effects:
        if session.rank != 0:
            raise ProtocolError(f"rank {session.rank} may not restore a store; rank 0 does")
        if seq in session.pending:
            return  # it is being read
        order = self.keeper.ask(message.tag, message.cut, Reviving(session, seq, message))
        session.pending[seq] = PendingRequest(lambda: None, lambda _: "it is read from the disk")
        yield order

    def _revive(self, one: Reviving, answer: FoundCuts | Loaded) -> Effects:
        """Say which cuts there are, or give a store what was read."""
        session, seq, message = one
        if session.pending.pop(seq, None) is None:
            return  # its rank was replaced, or this server returned to a cut
        reply: Message
        try:
            if answer.error is not None:
                raise answer.error
            if isinstance(answer, FoundCuts):
                reply = Revived(seq, answer.cuts)
            else:
                assert answer.image is not None
                yield from self.requests.revive(message.store, answer.image)
                self.requests.spaces[message.store].restored = message.cut
                reply = Revived(seq, (message.cut,))
        except KvpsError as error:
            reply = Error(seq, error.code, str(error))
        yield self._reply(session.route, reply)

    def _hello(self, route: Route, envelope: Envelope, message: Hello) -> Effects:
        """Welcome a member, if the view names it; else its HELLO waits for one that does."""
        check_protocol(message, self._me)
        welcome = self.member.welcome
        if welcome is None:
            raise ConfigError("this server is not a member of a job yet; ask again")
        self._check_place(envelope)
        rank, incarnation = envelope.rank, envelope.incarnation
        is_worker = envelope.role is Role.WORKER
        life = self.requests.life(rank) if is_worker else self._life_of_server(rank)
        self._fence(envelope, life)
        if incarnation > life:
            self._early[envelope.node] = route, envelope, message
            return
        if is_worker:
            if rank not in self.requests.sessions:
                self.requests.sessions[rank] = Session(rank, route, incarnation)
            self.requests.sessions[rank].route = route
        yield self._reply(route, Welcome(rank, incarnation, welcome.workers, welcome.servers))

    def _check_place(self, envelope: Envelope) -> None:
        """Check that ``envelope`` names a place in this job.

        Raises:
            Mismatch, ProtocolError: if it does not.
        """
        job, welcome = self.member.job, self.member.welcome
        if envelope.job != job or welcome is None:
            raise Mismatch(
                f"{self._me} serves job {job.hex()[:8]}, not {envelope.job.hex()[:8]}; another "
                "cluster listens here"
            )
        places = {Role.WORKER: welcome.workers, Role.SERVER: welcome.servers}
        if envelope.rank >= places.get(envelope.role, 0):
            raise ProtocolError(
                f"no {envelope.role} {envelope.rank} of this job talks to {self._me}"
            )

    def _session(self, route: Route, envelope: Envelope) -> Session:
        """Return the session of the worker that ``envelope`` names; its answers go along ``route`` now.

        Raises:
            KvpsError: as :meth:`_check_worker`.
        """
        session = self._check_worker(envelope)
        session.route = route
        return session

    def _check_worker(self, envelope: Envelope) -> Session:
        """Return the session of the worker that ``envelope`` names.

        Raises:
            Fenced: for an older incarnation than that of the view.
            ProtocolError: for one that has not said HELLO.
        """
        self._fence(envelope, self.requests.life(envelope.rank))
        session = self.requests.sessions.get(envelope.rank)
        if session is None or session.incarnation != envelope.incarnation:
            raise ProtocolError(f"{self._me} expects HELLO first on every connection")
        return session

    def _check_server(self, envelope: Envelope) -> None:
        life = self._life_of_server(envelope.rank)
        self._fence(envelope, life)
        if envelope.incarnation != life:
            raise ProtocolError(f"{self._me} does not know this {envelope.node} yet; ask again")

    def _fence(self, envelope: Envelope, life: int) -> None:
        if envelope.incarnation < life:
            raise Fenced(
                f"{envelope.node} incarnation {envelope.incarnation} was replaced by incarnation "
                f"{life}; {self._me} takes nothing more from it. This process must stop"
            )

    def _life_of_server(self, rank: int) -> int:
        """The incarnation of a server in the newest view; 0 if that does not name it."""
        members = self.member.view.members if self.member.view else ()
        return max(
            (one.incarnation for one in members if (one.role, one.rank) == (Role.SERVER, rank)),
            default=0,
        )

    @property
    def _me(self) -> str:
        return f"server {self.member.rank}"

    def _reply(self, route: Route, message: Message) -> Send:
        return Send(route, self.member.packet(message))

    def _refusal(self, route: Route, envelope: Envelope, error: KvpsError) -> Send:
        """Answer a packet by an error; who is of no job, or another, is not told the name of this one."""
        packet = self.member.packet(Error(envelope.seq, error.code, str(error)))
        if envelope.job != self.member.job:
            packet = replace(packet, envelope=replace(packet.envelope, job=bytes(16)))
        return Send(route, packet)

    def check(self) -> None:
        """Assert the invariants of all that is held."""
        self.requests.engine.check()
