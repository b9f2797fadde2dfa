"""The core of a server: its doors, and the dispatch of requests to its parts.

Theory of operation
-------------------
A worker's requests come numbered by ``seq``; what makes them *once* is not that number but what
they are: a push is known by (elements, rank, push number), a declaration by (key, call), and each
of them may be taken in again without effect. So no list of past requests is kept; a worker that
misses an answer probes, and sends again what the server does not have.

A request that cannot be answered yet is *pending*: it is kept by (rank, seq) and answered when a
span moves, a key becomes ready or the view changes. A newer incarnation of a rank drops what the
older one had pending; what the older one pushed stays.

A peer is known by rank and incarnation, never by route, and the view says which incarnation a rank has: a
HELLO that is ahead of the view waits for the next. A worker is let in by its HELLO, and from then on may come
along any route. :meth:`Server.admit` judges by the envelope alone, before a packet is decoded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from kvps import protocol as p
from kvps.core.effects import Connect, Core, CoreOutbox, Effect, Exit, Finish, Note, Route, Send, Trust
from kvps.core.embedding.tiered import Tier
from kvps.core.limits import Limits
from kvps.core.membership_client import SCHEDULER, STILL_S, Identity, MembershipClient, check_protocol
from kvps.core.server.answer import Answers
from kvps.core.server.checkpointer import ORDERS, Checkpointer
from kvps.core.server.chunks.slab import Chunks
from kvps.core.server.context import RequestContext
from kvps.core.server.control import Control
from kvps.core.server.ingest import Ingest
from kvps.core.server.measured import TELL_MAX, hot_rows, measure, of_beat, old_round
from kvps.core.server.meter import Meter
from kvps.core.server.publications import LEASE_S, Publications
from kvps.core.server.readers import Readers
from kvps.core.server.replicas.handover import Handover
from kvps.core.server.replicas.primary import Replicator
from kvps.core.server.replicas.standby import Follower
from kvps.core.server.round_logs import StragglerLog
from kvps.core.server.rules.book import RuleBook
from kvps.core.server.sessions import PendingRequest, Session
from kvps.core.server.snapshot import capture_tables
from kvps.core.server.snapshot.storage import Answer, FoundCuts, Loaded
from kvps.errors import ConfigError, KvpsError, ProtocolError, StorageError, unforeseen
from kvps.protocol.envelope import Envelope, Message, Node, Packet, Role
from kvps.protocol.permissions import name_of
from kvps.tensors import PRIVATE, Memory

TELL_NORMS_EVERY_S = 1.0
LOOK_EVERY_S = 5.0
TELL_AFTER_S = 1.0
"""Seconds that a round must have been open for the scheduler to be told of it."""
FREE = frozenset(("left", "vacant"))
"""The states of seats that a worker may be added to."""
UNASKED = p.Pong, p.Probe, p.Revive
"""The messages of workers that are heard however many requests wait, and are no sign of a rank's life."""
ANSWERS = frozenset((p.Welcome, p.Error))
"""The messages of other servers that answer one of ours."""
WANTED, STAYS = 7, 8
"""The tickets that tell that a spare is wanted, as a seat is moved; and why, which is the value, this process
keeps its seats."""
SILENT_S = 2.5
"""The silence of the scheduler after which a server that is to end waits for nobody to take its seat."""
EXIT_TORN = 1
"""Exit code of a server that failed in the middle of an update."""
SILENCES_MAX = 5
"""A server exits when everybody has been silent for so many times the scheduler's silence limit."""


class Reviving(NamedTuple):
    """A request to restore a store, while its snapshot is read."""

    session: Session
    seq: int
    message: p.Revive


class Server(Core):
    """One server process's part in one job after another.

    Its parts are a context (stores and sessions), the rules of its chunks, an Ingest for what carries values,
    Answers for what asks for them, and a Control for all other requests. They are made anew when a job begins
    or the server returns to a cut. The checkpointer stays.
    """

    def __init__(
        self,
        identity: Identity,
        now: float,
        memory_limit: int | None = None,
        memory: Memory = PRIVATE,
        threads: int = 1,
        checkpoint_every_s: float | None = None,
        limits: Limits | None = None,
        tier: Callable[[], Tier] | None = None,
    ) -> None:
        """Begin.

        Args:
            identity: the identity of this server.
            now: the time.
            memory_limit: bytes that values may take, with all that belongs to them.
            memory: where values lie.
            threads: how many compute.
            checkpoint_every_s: how often to write a checkpoint, 0 for never unless asked; None
                without a place for them.
            limits: the named limits; None for the defaults.
            tier: returns where rows of tables go that memory does not hold; None if it has to hold all.
        """
        self.outbox = CoreOutbox()
        self._outbox: list[Effect] = []
        """Effects of the door that is being called, in order."""
        self.member = MembershipClient(identity, now, self._outbox)
        self.counts = Meter()
        self.oldest_round_s = 0.0
        """Age of the oldest open round when the rounds were looked at last; 0 for none."""
        self.checkpointer = Checkpointer(self.member, self._outbox, checkpoint_every_s, self.counts)
        self.member.figures = lambda: of_beat(self.counts, self.control.budget)
        self._memory = memory
        self._threads = threads
        self._memory_limit = memory_limit
        self._limits = limits
        self.publications = Publications(self.member)
        self.readers = Readers(self.publications, self.member)
        self._tier = tier
        self._replicator: Replicator | None = None
        """Copies what is held here to the standby; None without replicas."""
        self._follower: Follower | None = None
        """Takes in the copy of a seat; None on a server that has a seat."""
        self._was_promoted = False
        """It has taken the seat that it followed, with all that was there."""
        self._serve = self._on_worker
        """Does what a worker asks; while the seat moves, less, and with a copy, tells that of it."""
        self._restoring: deque[Iterator[None]] = deque()
        """Restorations that have begun: another item, another block is restored."""
        self._retires = ""
        """Why this process hands its seats to others; empty if it does not."""
        self._make_parts(0, 1, 0, {})
        self._endpoints: dict[int, tuple[str, int]] = {}
        """Server rank -> (endpoint, incarnation) that this server is connected to."""
        self._early: dict[Node, tuple[Route, Envelope, p.Hello]] = {}
        """Member -> its last HELLO, of an incarnation that the view does not name yet."""
        self._heard_at = now
        """Time at which a worker of this job last spoke."""
        self._last_timer_at = now
        self._next_tell = now
        self._next_look = now + LOOK_EVERY_S
        self._stalls = StragglerLog()
        self._has_told = False
        """The scheduler was told of what may end: open rounds, publications, hot rows."""

    # --- the doors ----------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Join the cluster."""
        self.member.start(now)
        self._flush()

    def admit(self, route: Route, envelope: Envelope, kind: type[Message]) -> bool:
        """Judge a packet by its envelope: from members of this job, as the view names them, or HELLO.

        A packet that is not heard is answered by nobody: its sender learns the reason from the scheduler.

        Raises:
            KvpsError: what its sender is to be told.
        """
        if route == SCHEDULER or kind in ANSWERS:
            return True
        if envelope.role is Role.READER:
            return self.readers.admit(envelope, kind)
        if not self._serves(envelope, kind):
            return False
        if isinstance(route, str):  # our own connection: only a primary has to say more than answers there
            return self._follower is not None and envelope.job == self.member.job
        if kind is not p.Hello:
            self.context.check_sender(envelope)
        return True

    def on_packet(self, route: Route, packet: Packet, now: float) -> None:
        """A worker, another server or the scheduler said something; :meth:`admit` has let it in."""
        self.counts.on_packet(packet, now)
        if route == SCHEDULER:
            self._on_scheduler(packet, now)
        elif type(packet.message) not in ANSWERS:  # an answer to our HELLO or NORMS is never answered
            try:
                if packet.envelope.role is Role.WORKER:
                    self._serve(route, packet, now)
                elif packet.envelope.role is Role.READER:
                    self.readers.on_reader(route, packet, now)
                else:
                    self._on_server(route, packet, now)
            except KvpsError as error:
                self._refuse(route, packet.envelope, error)
            if not self.checkpointer.taking.taken:
                self.checkpointer.look(self.control)
        elif self._follower is not None and type(packet.message) is p.Welcome:
            self._follower.on_welcome()
        self._flush()

    def on_failure(self, route: Route, envelope: Envelope, error: Exception, now: float) -> None:
        """A packet caused an unexpected error: its sender is told, and nothing was changed.

        A server whose values were being changed at that moment ends: half an update is in them. Its
        replacement returns to a checkpoint, with all others.
        """
        if self.rules.is_torn:
            reason = (
                f"an update of {envelope.node} failed half-way ({error!r:.200}), so the values of "
                f"{self.context.me} are unusable. The log has the traceback. A replacement of this server "
                "rolls back to the newest checkpoint; please report this as a bug"
            )
            self._outbox.append(Exit(EXIT_TORN, reason))
        elif route != SCHEDULER:
            self._refuse(route, envelope, unforeseen(self.context.me, error))
        self._flush()

    def on_disk(self, answer: Answer, now: float) -> None:
        """Files were written or read."""
        self.counts.now = now
        if isinstance(answer, FoundCuts | Loaded) and isinstance(answer.for_whom, Reviving):
            self._start(self._revive(answer.for_whom, answer))
        elif not isinstance(answer, Loaded):
            self.checkpointer.on_disk(answer)
        elif self.checkpointer.is_for_us(answer):
            self._reset(self.context.lives)
            self._start(self._return(answer))
        self._flush()

    def on_memory(self, used_bytes: int, total_bytes: int, now: float) -> None:
        """So much memory of the machine or container is in use."""
        self.counts.now = now
        if news := self.control.budget.pressure.take_in(used_bytes, total_bytes):
            self._outbox.append(Note("warning", f"{self.context.me} {news}"))
        self._flush()

    def retire(self, reason: str, within_s: float, now: float) -> None:
        """The operator ends this process: it asks to hand its seats to others before."""
        self._retires = reason
        if self.member.welcome is None:
            self._outbox.append(Exit(0, reason))
        else:
            self.member.drain_within(within_s)
        self._flush()

    def leave(self, reason: str, now: float) -> None:
        """The operator ends this server."""
        self.member.leave(True, 0, True, reason)
        self._outbox.append(Exit(0, reason))
        self._flush()

    def on_timer(self, now: float) -> None:
        """Beat, send norms again that other servers may have missed, and report the ranks that
        rounds wait for."""
        self.member.on_timer(now)
        self.counts.now = now
        if self._restoring:
            self._restore_more()
        if now >= self.ingest.deadline():
            self.ingest.close_overdue(now)
        if now >= self._next_tell:
            self._next_tell = now + TELL_NORMS_EVERY_S
            self.rules.repeat()
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            self._look(now)
            if self._follower is None:
                self.readers.expire(now)
            self.rules.report(is_due=True)
        if now >= self.publications.settle_at:
            self.publications.settle()
        if self._retires and self.member.silent_for(now) > SILENT_S:
            self._outbox.append(Finish(STAYS, "the scheduler does not answer"))
        if self._replicator is not None:
            self._replicator.note_all()
            self._replicator.on_timer(now)
        if self._follower is not None:
            self._follower.on_timer(now)
        if now > self._last_timer_at + STILL_S:  # this process stood still, and not the others
            self._heard_at = now
        self._last_timer_at = now
        limit_s = SILENCES_MAX * self.member.identity.silence_max_s
        if self.member.welcome and now - max(self._heard_at, self.member.heard_at) > limit_s:
            reason = f"the scheduler and all workers have been silent for {limit_s:.0f} s"
            self._outbox.append(Exit(75, reason))
        self._flush()

    def deadline(self) -> float | None:
        """Return when the next beat, telling, look at the rounds or close of a round is due."""
        if self._restoring:
            return self._last_timer_at
        beat, closing = self.member.deadline(), min(self.ingest.deadline(), self.publications.settle_at)
        if self._replicator is not None:
            closing = min(closing, self._replicator.deadline())
        return None if beat is None else min(beat, self._next_tell, self._next_look, closing)

    def _flush(self) -> None:
        """Have the effects performed that were not performed yet; a door ends with this."""
        for finish in self.context.at_ends:
            finish()
        for effect in self._outbox:
            self.outbox.append(effect)
        self._outbox.clear()

    def _start(self, restoring: Iterator[None]) -> None:
        """Begin a restoration, after others that are under way; small ones end at once."""
        self._restoring.append(restoring)
        self._restore_more()

    def _restore_more(self) -> None:
        """Restore another block of the oldest restoration."""
        for _ in self._restoring[0]:
            return
        self._restoring.popleft()

    def _look(self, now: float) -> None:
        """Log the open rounds; tell the scheduler of them, publications and hot rows, for ``kvps status``."""
        oldest = list(self.control.oldest(now))
        self.oldest_round_s = max([stall.age_s for stall in oldest], default=0.0)
        self._outbox.extend(self._stalls.look(oldest))
        if self._follower is None:  # a copy is dropped when the primary drops its store
            self.control.drop_ended(now)
        rank = self.member.rank
        rounds = tuple([old_round(rank, stall) for stall in oldest if stall.age_s >= TELL_AFTER_S])
        late = self.counts.latest_news(TELL_MAX)
        is_copy = self._follower is not None
        shown = () if is_copy else tuple(self.publications.figures())
        hot = () if is_copy else hot_rows(self.context.chunks)
        if self.member.welcome is not None and (rounds or shown or hot or self._has_told or late):
            self._has_told = bool(rounds or shown or hot)
            self.member.send(SCHEDULER, p.Measured(0, (), (), (), (), rounds[:TELL_MAX], late, shown, hot))

    # --- the scheduler --------------------------------------------------------------------------

    def _on_scheduler(self, packet: Packet, now: float) -> None:
        before, job, welcome = self.member.number, self.member.job, self.member.welcome
        if self._retires and isinstance(packet.message, p.Error):
            self._outbox.append(Finish(STAYS, packet.message.text))
        if isinstance(packet.message, (*ORDERS, p.Measure)) and welcome is not None:
            self.member.heard_at = now
            if packet.envelope.job == job:
                self._on_order(packet.message, now)
            return
        self.member.on_packet(packet, now)
        if self.member.stopped is not None:
            self._outbox.append(Exit(self.member.stopped.exit_code, self.member.stopped.reason))
            return
        if self.member.welcome is not welcome:
            self._begin(replaces=self.member.seat.replaces)
        elif self.member.job != job:
            self._begin()
            before = 0
            text = "the next job begins; the stores of the last one are dropped"
            self._outbox.append(Note("info", text))
        if self.member.number != before:
            self._on_view()

    def _on_order(self, order: Message, now: float) -> None:
        if isinstance(order, p.Measure):
            self.context.watch_links()
            parts = self.context, self.control, self.checkpointer.epoch, self.oldest_round_s
            answer, self.oldest_round_s = measure(order.number, *parts, now)
            self.member.send(SCHEDULER, answer)
        else:
            self.checkpointer.on_order(order, self.control)

    def _begin(self, *, replaces: bool = False) -> None:
        """Start a job with no stores."""
        self.checkpointer.begin()
        self.publications.clear()
        if self.member.seat.follows:
            self._follower = Follower(self.member, self._outbox)
            self.member.standing = self._follower.standing
        elif self.member.seat.replicas and self._replicator is None:
            self._replicate()
        self._reset({}, replaces=replaces)

    def _replicate(self) -> None:
        """Copy all that is held here to the standbys that views will name."""
        self._copy_by(Replicator(self.member, self._outbox, self.publications))

    def _copy_by(self, replicator: Replicator) -> None:
        self._replicator, self.member.standing = replicator, replicator.standing
        self._serve = partial(self._serve_and_copy, replicator)

    def _reset(self, lives: dict[int, int], *, replaces: bool = False) -> None:
        """Drop all stores and sessions; ``lives`` are the workers' incarnations."""
        seat = self.member.seat
        self._make_parts(seat.rank, seat.servers, seat.seats, lives, replaces=replaces)

    def _make_parts(
        self, server: int, servers: int, workers: int, lives: dict[int, int], *, replaces: bool = False
    ) -> None:
        self.counts.forget()
        self._restoring.clear()
        chunks = Chunks(self._memory, server, servers, self._tier and self._tier())
        self.context = RequestContext(self.member, chunks, self._outbox, lives, self.counts, self._limits)
        self.context.entered = self._on_entered
        self.answers = Answers(self.context)
        self.rules = RuleBook(self.context, self.answers.wake, workers, self._threads)
        self.ingest = Ingest(self.context, self.answers, self.rules)
        parts = self.context, self.ingest, self.answers, self.rules, self._memory_limit
        self.control = Control(*parts, replaces=replaces)
        self.publications.begin(self.context, self.control.budget)
        if self._replicator is not None:
            self._replicator.attach(self.context, self.control, self.rules)
        if self._follower is not None:
            self._follower.attach(self.context, self.control, self.rules, self.publications)

    def _return(self, loaded: Loaded) -> Iterator[None]:
        """Replace all stores by those of a snapshot."""
        error = loaded.error
        if loaded.snapshot is not None:
            try:
                filled = yield from capture_tables.filled(loaded.snapshot.stores, self.context.chunks)
                if not self.checkpointer.is_for_us(loaded):
                    return  # another cut was ordered since
                self.control.restore(loaded.snapshot, filled)
            except KvpsError as raised:
                error = raised
            except Exception as raised:  # nobody is served before another cut is held, or none
                error = StorageError(f"the snapshot cannot be held: {raised!r:.200}")
        self.checkpointer.restored(error)

    def _serves(self, envelope: Envelope, kind: type[Message]) -> bool:
        """Return whether the sender of ``envelope`` has seen the rollbacks that this server has."""
        view = self.member.view
        if self.checkpointer.is_returning:
            return False
        if view is not None and (view.phase == "returning" or view.epoch != self.checkpointer.epoch):
            return False
        is_hello = issubclass(kind, p.Hello)  # it knows no view
        return is_hello or view is None or envelope.view >= view.since

    def _on_view(self) -> None:
        """Connect to the other servers, and look again at all that waits."""
        view = self.member.view
        assert view is not None
        if view.keys:
            names = {
                key: name_of(p.speaker(member), member.incarnation)
                for member, key in zip(view.members, view.keys, strict=False)
                if key
            }
            self._outbox.append(Trust(names))
        if self._follower is not None and not self._take_seat(self._follower, view):
            return
        standbys = [member for member in view.members if member.role == Role.STANDBY]
        if (standbys or self._replicator is not None) and self._has_seat(view):
            self._learn_standby(standbys)
        for member in view.members:
            if member.role == Role.WORKER:
                if self._replicator is not None and 0 < self.context.life(member.rank) < member.incarnation:
                    self._replicator.replaced(member.rank)
                self.context.begin(member.rank, member.incarnation)
            elif member.role == Role.SERVER and member.rank != self.member.rank:
                place, name = (member.endpoint, member.incarnation), f"server {member.rank}"
                if member.state == "held" and self._endpoints.get(member.rank) != place:
                    self._endpoints[member.rank] = place
                    key = self.member.key_of(Node(Role.SERVER, member.rank))
                    self._outbox.append(Connect(name, member.endpoint, None, key, bool(key)))
                    self.member.greet(name)
        self.context.forget_left(
            [member.rank for member in view.members if member.role == Role.WORKER and member.state in FREE]
        )
        self.control.retry_pending()
        early, self._early = self._early, {}
        for route, envelope, message in early.values():
            if not self._serves(envelope, p.Hello):
                continue  # it asks again when the values held are not about to be dropped
            try:
                self._on_hello(route, envelope, message)
            except KvpsError as error:
                self._refuse(route, envelope, error)

    def _learn_standby(self, standbys: list[p.Member]) -> None:
        """A view names the standbys of some servers, or of all in a job with copies."""
        own = [each for each in standbys if each.rank == self.member.rank]
        mine = [each for each in own if each.state in ("held", "level")]
        is_moving = not self.member.seat.replicas
        if is_moving and any(each.state == "empty" for each in standbys) and not self._retires:
            self._outbox.append(Finish(WANTED))
        if is_moving and mine and self._replicator is None:
            mover = Handover(self.member, self._outbox, self.publications)
            self._copy_by(mover)
            mover.attach(self.context, self.control, self.rules)
            self.rules.recompose()
        if self._replicator is not None:
            self._replicator.learn(mine[0].incarnation if mine else 0)
            self._replicator.note_all()
        if is_moving and not mine and self._replicator is not None:
            self._replicator.detach()
            self._replicator = self.member.standing = None
            self._serve = self._on_worker
            self.rules.recompose()

    def _serve_and_copy(self, copier: Replicator, route: Route, packet: Packet, now: float) -> None:
        """Do what a worker asks, unless it is left to the next holder of the seat, and have it copied."""
        if not isinstance(packet.message, p.Hello | p.Pong) and copier.leaves(packet.message, now):
            return
        try:
            self._on_worker(route, packet, now)
        except KvpsError:
            copier.note_all()  # what was refused to one may be refused to all
            raise
        copier.note(packet.message)

    def _on_entered(self) -> None:
        """A replacement has entered a store."""
        self.control.retry_pending()
        if self._replicator is not None:
            self._replicator.note_all()

    def _has_seat(self, view: p.View) -> bool:
        """Return whether a view names this server for its seat."""
        return any(
            (member.role, member.rank, member.incarnation)
            == (Role.SERVER, self.member.rank, self.member.incarnation)
            for member in view.members
        )

    def _take_seat(self, follower: Follower, view: p.View) -> bool:
        """Take the seat that this server follows, if a view says so; return whether it has."""
        if not self._has_seat(view):
            primary = next(
                member
                for member in view.members
                if (member.role, member.rank) == (Role.SERVER, self.member.rank)
            )
            if follower.learn(primary, view.epoch, self.counts.now):
                self._reset({})
                self.checkpointer.epoch = view.epoch
            return False
        if not follower.is_level or self.checkpointer.epoch != view.epoch:
            self._outbox.append(
                Exit(75, f"{self.context.me} was lost before its standby had all of its values")
            )
            return False
        self._follower, self._was_promoted = None, True
        self.context.was_copied, self.context.lives = True, follower.met
        self.publications.keeps_until = self.counts.now + LEASE_S
        if self.member.seat.replicas:
            self._replicate()
            assert self._replicator is not None
            self._replicator.attach(self.context, self.control, self.rules)
        else:
            self.member.standing = None
        self.rules.recompose()
        self._outbox.append(Note("info", f"this standby is {self.context.me} from now on"))
        return True

    # --- peers ----------------------------------------------------------------------------------

    def _on_server(self, route: Route, packet: Packet, now: float) -> None:
        envelope, message = packet.envelope, packet.message
        if envelope.rank == self.member.rank:
            self._on_other_copy(route, packet, now)
            return
        match message:
            case p.Hello():
                self._on_hello(route, envelope, message)
            case p.StepNorm():
                self.rules.hear_step(message, envelope.rank)
            case p.Norms():
                self.rules.hear_norms(message, envelope.rank)
            case _:
                raise ProtocolError(f"a server may not send {type(message).__name__} to a server")

    def _on_other_copy(self, route: Route, packet: Packet, now: float) -> None:
        """The standby of this seat has said something, or the primary."""
        envelope, message = packet.envelope, packet.message
        follower, replicator = self._follower, self._replicator
        if isinstance(message, p.Hello):
            self._on_hello(route, envelope, message)
        elif follower is not None and follower.is_next(packet):
            if isinstance(message, p.CopyBegin) and follower.has_begun:
                self._reset({})
            follower.take(envelope.seq, message, packet.payload)
        elif follower is not None and follower.is_again(packet):
            follower.acknowledge()
        elif replicator is not None and isinstance(message, p.Follow):
            replicator.follow(route, envelope.incarnation, now)
        elif replicator is not None and isinstance(message, p.Followed):
            replicator.hear(route, envelope.incarnation, message.number, now)

    def _on_worker(self, route: Route, packet: Packet, now: float) -> None:
        """Do what a worker asks.

        Raises:
            KvpsError: if it cannot be done; nothing was changed.
        """
        message, seq = packet.message, packet.envelope.seq
        context, control = self.context, self.control
        if isinstance(message, p.Hello):
            self._on_hello(route, packet.envelope, message)
            self._heard_at = now
            return
        self._heard_at = now
        session = context.sessions[packet.envelope.rank]
        session.route = route
        if not isinstance(message, UNASKED):
            context.hear(message, session)
            session.asked_at = now
        match message:
            case p.Push():
                self.ingest.push(session, seq, message, packet)
            case p.Pull():
                self.answers.pull(session, seq, message)
            case p.PushRows() | p.PushTables():
                self.ingest.push_rows(session, seq, message, packet)
            case p.PullRows() | p.PullChanged() | p.PullTables():
                self.answers.pull_rows(session, seq, message, packet.payload)
            case p.Pong():
                context.hear_pong(session, message)
            case p.Load():
                self.ingest.load(session, seq, message, packet)
            case p.Tell():
                control.rebuilds.tell(message)
                context.send(session, p.Done(seq))
            case p.Give():
                control.rebuilds.give(message, packet.payload[0])
                context.send(session, p.Ack((p.Receipt(seq, 0),)))
            case p.Embed():
                context.send(session, control.embed(seq, message))
                context.retry()
            case p.TableRate():
                context.demand_rank_0(session, "set the learning rate of a table")
                control.set_table_rate(message)
                context.send(session, p.Done(seq))
            case p.Export():
                control.export(session, seq, message)
            case p.Declare():
                control.declare(session, seq, message)
            case p.Optimize():
                control.optimize(session, seq, message)
            case p.Rate():
                control.rate(session, seq, message)
            case p.Probe():
                control.probe(session, message, now)
            case p.Open():
                control.open(session, seq, message)
            case p.Close():
                control.close(session, message)
            case p.Find():
                context.send(session, control.find(seq, message))
            case p.Status():
                context.send(session, control.status(seq, message, now))
            case p.GetState():
                control.get_state(session, seq, message)
            case p.SetState():
                context.send(session, control.set_state(seq, message, packet.payload))
            case p.Freeze() | p.Put() | p.Announce() | p.LastVersion():
                self.publications.on_worker(session, seq, message, packet.payload)
            case p.History():
                context.send(session, control.history(session, seq, message))
            case p.Join():
                control.join(session, seq, message)
            case p.Return():
                store = context.store(message.store)
                control.end_join(store, message.call)
                context.enter(store, session)
                context.send(session, p.Done(seq))
            case p.Revive():
                self._on_revive(session, seq, message)
            case _:
                raise ProtocolError(f"a worker may not send {type(message).__name__} to a server")

    def _on_revive(self, session: Session, seq: int, message: p.Revive) -> None:
        if session.rank != 0:
            raise ProtocolError(f"rank {session.rank} may not restore a store; only rank 0 may")
        if seq in session.pending:
            return  # it is being read
        order = self.checkpointer.ask(message, Reviving(session, seq, message))
        session.pending[seq] = PendingRequest(lambda: None, lambda _: "it is being read from the disk")
        self._outbox.append(order)

    def _revive(self, reviving: Reviving, answer: FoundCuts | Loaded) -> Iterator[None]:
        """Answer with the list of cuts, or restore a store from a snapshot that was read."""
        session, seq, message = reviving
        if seq not in session.pending:
            return  # its rank was replaced, or this server returned to a cut
        reply: Message
        try:
            if answer.error is not None:
                raise answer.error
            if isinstance(answer, FoundCuts):
                reply = p.Revived(seq, answer.cuts, answer.versions)
            else:
                assert answer.snapshot is not None
                stores = [store for store in answer.snapshot.stores if store.name == message.store]
                filled = yield from capture_tables.filled(stores, self.context.chunks)
                if seq not in session.pending:
                    return  # its rank was replaced
                self.control.revive(message.store, answer.snapshot, filled)
                self.context.stores[message.store].restored = message.cut
                reply = p.Revived(seq, (message.cut,))
        except KvpsError as error:
            self.counts.refused(error)
            reply = p.Error(seq, error.code, str(error))
        del session.pending[seq]
        self.context.send(session, reply)
        if self._replicator is not None:
            self._replicator.note_all(values=True)

    def _on_hello(self, route: Route, envelope: Envelope, message: p.Hello) -> None:
        """Welcome a member, if the view names it; else its HELLO waits for a view that does."""
        check_protocol(message, self.context.me)
        welcome = self.member.welcome
        if welcome is None:
            raise ConfigError("this server is not a member of a job yet; ask again")
        self.context.check_place(envelope)
        rank, incarnation = envelope.rank, envelope.incarnation
        if not self.context.is_named(envelope):
            self._early[envelope.node] = route, envelope, message
            return
        if envelope.role is Role.WORKER:
            self.context.greet(route, envelope)
        self.member.send(
            route, p.Welcome(rank, incarnation, welcome.workers, welcome.servers, promoted=self._was_promoted)
        )

    def _refuse(self, route: Route, envelope: Envelope, error: KvpsError) -> None:
        """Answer a packet by an error; the sender of another job, or of none, is not told this one's name."""
        self.counts.refused(error)
        packet = self.member.packet(p.Error(envelope.seq, error.code, str(error)))
        if envelope.job != self.member.job:
            packet = packet._replace(envelope=packet.envelope._replace(job=bytes(16)))
        self.context.outbox.append(Send(route, packet))  # with standbys it may have to wait

    def check(self) -> None:
        """Assert the invariants of all that is held."""
        self.context.chunks.check()
