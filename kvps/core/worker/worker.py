"""The rules of a worker: calls of the user, messages of the scheduler and the servers, and the time.

The user's calls are in a table (:mod:`kvps.core.worker.call_table`). Their requests are queued on
the connections to the servers, sent as the windows allow, and probed for when an answer is late.
What was queued or sent for a call that ends early stays there if it changes values, and is dropped otherwise.

A lost server or worker ends calls as :mod:`kvps.core.worker.failure_policy` says. When the servers
take a cut, calls are held as :mod:`kvps.core.worker.quiesce` says; after a rollback, each store
finds its way as :mod:`kvps.core.worker.quiesce` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType

from kvps import protocol as p
from kvps.core.effects import Connect, Core, CoreOutbox, Exit, Finish, Note, Route
from kvps.core.membership_client import SCHEDULER, Identity, MembershipClient
from kvps.core.worker import calls
from kvps.core.worker.call_table import LAST_PROBE_S, LEAST_WAIT_S, CallTable, OnEnd, PendingCall
from kvps.core.worker.closed_stores import ClosedStores
from kvps.core.worker.cluster_info import RESIZED, ClusterInfo
from kvps.core.worker.connection import Connection, route_of
from kvps.core.worker.failure_policy import FailurePolicy
from kvps.core.worker.gate import DeferredCall, Entering, Gates, Lost, Resyncing, epoch_changed
from kvps.core.worker.kept_pushes import KeptPushes
from kvps.core.worker.quiesce import Quiesce
from kvps.core.worker.rebuild import ServerReturns, keep_values
from kvps.core.worker.store import Beginning, WorkerStore, of_beat
from kvps.core.worker.timeout_report import (
    ASK_SCRIPT,
    CONFIRMED_S,
    FAR_S,
    Standstill,
    State,
    standstill_error,
    timeout_error,
)
from kvps.errors import ConfigError, Fenced, KvpsError, ServerLost, Timeout, WorkerLost, from_code, unforeseen
from kvps.protocol.envelope import Envelope, Message, Node, Packet, Role
from kvps.tensors import PRIVATE, Memory

PRESENT = ("held", "added", "empty", "lost")
"""The states of seats that count as workers in a job whose workers come and go."""
ANSWERS = (p.Released, p.Resumed, p.Checkpointed, p.Probed)
"""Answers of the scheduler to requests of calls."""


class Worker(Core):
    """One worker process's part in one job."""

    def __init__(self, identity: Identity, now: float, memory: Memory = PRIVATE) -> None:
        self.outbox = CoreOutbox()
        self.member = MembershipClient(identity, now, self.outbox)
        self.stores: dict[str, WorkerStore] = {}
        self.losses = FailurePolicy()
        self.table = CallTable(
            self.member,
            self.stores,
            self.losses,
            memory,
            self._publish_joins,
            self._tell_returned,
            self.outbox,
        )
        self.info = ClusterInfo(self.member.rank)
        """The snapshot that other threads may read; replaced as a whole."""
        self._memory = memory
        self._beginning = Beginning(self.outbox)
        self._quiesce = Quiesce(self.stores)
        self._resyncing = Resyncing(self.stores, self.outbox)
        lost = Lost(self.member, self.table.links, self.losses, self.stores, self.outbox)
        self._entering = Entering(self._resyncing, self._enter)
        self._gates = Gates(lost, self._resyncing, self._entering, self._quiesce)
        self._gates.look()
        self._since = 0
        """The number of the view in which that epoch began: what was said before is over."""
        self._servers: dict[str, Connection] = {}
        """By route. A server may have no seat yet when it answers, and know no rank."""
        self._own_tickets = 0
        """The ticket of the last call that this core made itself; they count down."""
        self._told_at = now
        """Time at which the servers were last told that this worker lives, in place of the scheduler."""
        self.member.figures = partial(of_beat, self.stores)
        self._closed = ClosedStores()
        self._closing: set[str] = set()
        """Closed stores of which a call of the user is still under way."""
        self._returns = ServerReturns(self.stores)
        self._standstill = Standstill()
        self._replayed = 0
        """The number of steps that replacements have passed over, as the scheduler said last."""
        self._complete = False
        self._due: float | None = None
        """A time before which nothing is due; None where that is to be looked up.

        A wait that a call or the packet of a server begins is at least :data:`LEAST_WAIT_S` long, unless a
        gate is shut, a store is being closed, or neighbours merge their requests.
        """
        self._joining: dict[int, float] = {}
        """ticket -> deadline, of users that wait for the cluster to be complete."""

    # --- the doors ----------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Join the cluster."""
        self.member.start(now)

    def on_join(self, ticket: int, deadline: float, now: float) -> None:
        """The user wants to know when the cluster is complete."""
        self._due = None
        self._joining[ticket] = deadline
        self._end_joining(now)

    def on_call(self, ticket: int, call: calls.Call, deadline: float, now: float) -> None:
        """The user makes a call, and stops waiting at ``deadline``."""
        self.member.progress += 1
        if self._gates.shut and self._gates.stop(DeferredCall(ticket, call, deadline), now):
            self._due = None
            self._report_halt()
            return
        if type(call) is calls.OpenStore:
            self._open(call, now)
        elif call.store not in self.stores:
            error = ConfigError(f"{call.title}: store {call.store!r} is closed; create another store")
            self.outbox.append(Finish(ticket, error=error))
            return
        if self._due is not None:
            self._due = min(self._due, now + LEAST_WAIT_S, deadline - LAST_PROBE_S)
        self.table.begin(ticket, call, deadline, now)
        if self._gates.shut or self._closing or self.table.neighbours.is_active:
            self._due = None
        if self._gates.shut:
            self._report_halt()

    def on_interrupt(self, ticket: int, now: float) -> None:
        """The caller of a call was interrupted: the call ends for the caller as at its deadline."""
        self._due = None
        pending = self.table.pending.get(ticket)
        if pending is not None:
            pending.deadline, pending.probed = now, True
        for held in self._held():
            held[:] = [replace(call, deadline=now) if call.ticket == ticket else call for call in held]

    def _open(self, call: calls.OpenStore, now: float) -> None:
        name = call.store
        self._end_closing(now, name)
        if name in self.stores:
            return
        self.stores[name] = WorkerStore(
            replace(call.opened, life=self._closed.next_life(name)),
            self.member.rank,
            len(self.table.links),
            call.worker_grace_s,
            call.timeout_s,
            self._memory,
            bool(self.losses.workers),
            is_added=self.info.is_added,
            beginning=self._beginning,
        )
        self._look_at_stores()
        if call.opened.rebuilds:
            keep_values(self.stores[name])
        if self._quiesce.is_on and self.stores[name].ordered:
            self._break_off(now)

    def _look_at_stores(self) -> None:
        """Take in that there are other stores, or that one was entered."""
        self._entering.look(self.stores)
        self._gates.look()

    def on_script(self, tickets: tuple[int, ...], now: float) -> None:
        """The whole script waits in these calls; in none, if some thread of it does not wait."""
        waited_for = [self.table.pending.get(ticket) for ticket in tickets]
        is_known = all(entry is not None and _is_for_user(entry) for entry in waited_for)
        self._standstill.hear(tickets if is_known else (), self._calls())

    def on_close(self, name: str, now: float) -> None:
        """The user needs a store no more."""
        self._due = None
        self._closing.add(name)
        self._end_closing(now)

    def _end_closing(self, now: float, again: str = "") -> None:
        """Close the stores of which no call of the user is under way; that which is created
        ``again`` in any case."""
        busy = {entry.call.store for entry in self.table.pending.values() if _is_for_user(entry)}
        busy.update(deferred.call.store for held in self._held() for deferred in held)
        for name in sorted(self._closing - (busy - {again})):
            self._closing.discard(name)
            error = ConfigError(f"store {name!r} was closed, and created again")
            self.table.forget(name, error, now)
            store = self.stores.pop(name)
            self._resyncing.forget(name)
            self._look_at_stores()
            self._closed.close(name, store.opened.life, store.servers)
            self._tell_closed(now)

    def _tell_closed(self, now: float) -> None:
        for server, message in self._closed.letters(now):
            if server == ClosedStores.SCHEDULER:
                self.member.send(SCHEDULER, message)
            elif (link := self.table.links[server]).ready:  # else it says CLOSE again
                self.member.send(link.route, message)

    def leave(self, done: bool, exit_code: int, reason: str, replaceable: bool, now: float) -> None:
        """The process ends: say so, and if it failed, whether another can take its place."""
        self.member.leave(done, exit_code, replaceable, reason)
        if self.member.welcome is None:
            self.outbox.append(Exit(0, "left before it had joined"))

    def admit(self, route: Route, envelope: Envelope, kind: type[Message]) -> bool:
        """Judge a packet by its envelope: those that come to us are from neighbours."""
        return isinstance(route, str) or self.table.neighbours.admit(envelope, kind)

    def on_packet(self, route: Route, packet: Packet, now: float) -> None:
        """The scheduler, a server or a neighbour said something."""
        if route == SCHEDULER:
            self._due = None
            self._on_scheduler(packet, now)
            return
        if isinstance(route, bytes):
            self.table.neighbours.on_packet(route, packet, now)
        elif packet.envelope.view >= self._since and (
            link := self._servers.get(route) or self._neighbour(route, packet.envelope)
        ):
            message = packet.message
            if isinstance(message, p.Error) and message.code == Fenced.code:
                self.member.error = from_code(message.code, message.text)  # another process has this seat
                self._end_all(self.member.error, now)
                self.outbox.append(Exit(1, str(self.member.error)))
            elif isinstance(message, p.Closed):
                self._closed.hear(self.table.links.index(link), message.stores)
            else:
                self.table.on_answer(link, packet, now)
            link.heard_at = now
            if self.table.neighbours.is_active:
                self.table.neighbours.heard(link)
        if self.table.uplink.queued or self.table.neighbours.is_active:
            self.table.flow(now)
        if self._due is not None:
            self._due = min(self._due, now + LEAST_WAIT_S)
        if self._gates.shut or self._closing or self.table.neighbours.is_active:
            self._due = None
        if self._closing:
            self._end_closing(now)
        if self._gates.shut:
            self._report_halt()

    def on_failure(self, route: Route, envelope: Envelope, error: Exception, now: float) -> None:
        """A packet caused an unexpected error: a neighbour is told.

        Raises:
            Exception: ``error``, if it was an answer to this worker's own calls: they would never end.
        """
        if isinstance(route, str):
            raise error
        said = unforeseen(f"worker {self.member.rank}", error)
        answer = p.Error(envelope.seq, said.code, str(said))
        self.member.send(route, answer)

    def on_timer(self, now: float) -> None:
        """Beat, probe, say HELLO again, and end calls that are over their deadline."""
        self._due = None
        self.member.waits_in = next((call.title for call in self._waited_for()), "")
        beat_at = self.member.deadline()
        if beat_at is not None and now >= beat_at:
            is_still = self._is_still(now)
            self._standstill.look(self._calls())
            self.member.standstill = self._standstill.number if is_still else 0
            if is_still:
                self.outbox.append(Finish(ASK_SCRIPT))
        self.member.on_timer(now)
        self._gates.look()
        if now >= self._alone_at():
            self._told_at = now  # a server that hears neither the scheduler nor a worker would end
            for link in self.table.links:
                self.member.greet(link.route)
        self.table.on_timer(now)
        self._end_joining(now)
        self.table.take_what_lags(now)
        self._end_calls_of_lost_members(now)
        self._end_overdue_calls(now)
        if self._closing:
            self._end_closing(now)
        if self._closed.is_untold and now >= self._closed.again_at:
            self._tell_closed(now)
        if self._quiesce.is_impatient(self.member.heard_at, now):
            self._break_off(now)

    def _waited_for(self) -> Iterator[calls.Call]:
        """Yield the calls for which the user waits."""
        for ticket in self._standstill.tickets:
            if ticket in self.table.pending:
                yield self.table.pending[ticket].call
        for deferred in chain.from_iterable(self._held()):
            yield deferred.call
        for pending in self.table.pending.values():
            if not pending.finished:
                yield pending.call

    def _held(self) -> tuple[list[DeferredCall], ...]:
        """Return the lists of calls that gates hold back."""
        return self._quiesce.held, *self._resyncing.held()

    def _calls(self) -> State:
        """Return what changes whenever a call begins or ends."""
        return (self.member.progress, *self.table.pending)

    def _is_still(self, now: float) -> bool:
        """Whether calls wait, and nothing but a call of some worker can end them."""
        pending = self.table.pending.values()
        if not pending or self._gates.shut or self._joining:
            return False
        if any(not _is_for_user(entry) or entry.deadline < now + FAR_S for entry in pending):
            return False
        has_quorum = any(store.opened.quorum for store in self.stores.values())
        return not has_quorum and self.table.is_settled(now - CONFIRMED_S)

    def _end_standstill(self, message: p.Beat, now: float) -> None:
        """The scheduler says that no worker can go on."""
        standstill = self._standstill
        if not standstill.is_at(message.standstill, self._calls()):
            return
        for ticket in standstill.tickets:
            pending = self.table.pending[ticket]
            error = standstill_error(self.member, pending.call, pending.waiting, message.reason)
            self.table.end_early(pending, error, now)
        standstill.end()

    def _hear_of_replay(self, replayed: int, now: float) -> None:
        """Replacements of lost workers have passed over so many steps: who waits for them waits on."""
        if replayed and replayed != self._replayed:
            if not self._replayed:
                self.outbox.append(
                    Note(
                        "warning",
                        "a worker that replaces a lost worker runs its script again, and passes over the "
                        "steps of its predecessor. Calls that wait for it wait on, as long as it goes on",
                    )
                )
            self.table.put_off(now)
        self._replayed = replayed

    def deadline(self) -> float | None:
        """When something is due next, at the earliest."""
        if self._due is None:
            self._due = min(self._deadlines(), default=math.inf)
        return self._due if self._due < math.inf else None

    def _alone_at(self) -> float:
        """When the servers are told again that this worker lives, since the scheduler cannot."""
        if self.member.deadline() is None or not self.table.links:
            return math.inf
        silence_max_s = self.member.identity.silence_max_s
        return max(self.member.heard_at, self._told_at) + silence_max_s

    def _deadlines(self) -> Iterator[float]:
        beat = self.member.deadline()
        if beat is not None:
            yield beat
        yield self._alone_at()
        yield from self._joining.values()
        if self._closed.is_untold:
            yield self._closed.again_at
        if self._quiesce.is_on:
            yield self._quiesce.deadline(self.member.heard_at)
        yield from (deferred.deadline for held in self._resyncing.held() for deferred in held)
        yield from self.table.deadlines()
        if self.losses.is_any:
            pending = self.table.pending.values()
            waited_for = {entry.call.store for entry in pending if _is_for_user(entry)}
            waited_for.update(deferred.call.store for held in self._resyncing.held() for deferred in held)
            for name in waited_for:
                yield self.losses.deadline(self.stores[name])

    # --- the scheduler --------------------------------------------------------------------------

    def _on_scheduler(self, packet: Packet, now: float) -> None:
        message = packet.message
        self.member.heard_at = now
        is_fenced = isinstance(message, p.Error) and message.code == Fenced.code  # and not just a call
        is_asked = isinstance(message, p.Error) and message.seq in self.table.scheduler.outstanding
        if isinstance(message, ANSWERS) or (is_asked and not is_fenced):
            self.table.on_answer(self.table.scheduler, packet, now)
            return
        if isinstance(message, p.Closed):
            self._closed.hear(ClosedStores.SCHEDULER, message.stores)
            return
        if isinstance(message, p.Beat) and message.standstill:
            self._end_standstill(message, now)
            return
        if isinstance(message, p.Beat):
            self._hear_of_replay(message.replayed, now)
        is_welcomed = self.member.welcome is not None  # else a cut has overtaken the WELCOME
        if isinstance(message, p.Halt) and is_welcomed:
            self._make(self._quiesce.halt(message, now), now)
            self._report_halt()
            if self._quiesce.is_asked:
                self._say_halted(stands=False)
                # What was lent is in, perhaps, though its values wait for one that stands already.
                self.table.ask_after(self.table.unacked(), now)
            return
        if isinstance(message, p.Proceed) and is_welcomed:
            stood, held = self._quiesce.proceed(message)
            self.member.send(SCHEDULER, p.Proceeding(message.cut, stood))
            self._make(held, now)
            return
        before = self.member.number
        self.member.on_packet(packet, now)
        self._gates.look()
        self._publish()
        if self.member.left:
            self.outbox.append(Exit(0, "left"))
        elif self.member.end is not None:
            self._end_all(self.member.end, now)
            if self.member.stopped is not None:
                self.outbox.append(Exit(self.member.stopped.exit_code, self.member.stopped.reason))
        elif self.member.number != before:
            self._on_view(now)
        self._end_joining(now)

    def _publish(self) -> None:
        """Let other threads know the newest view."""
        welcome, view = self.member.welcome, self.member.view
        if welcome is not None:
            members = () if view is None else view.members
            count, is_added = welcome.workers, self.info.is_added
            if welcome.most and members:
                workers = [member for member in members if member.role == Role.WORKER]
                count = sum([member.state in PRESENT for member in workers])
                is_added = is_added or workers[self.member.rank].state == "added"
                if self._complete and count != self.info.workers:
                    self.outbox.append(Finish(RESIZED, count))
            joins, most = self.info.joins, welcome.most
            self.info = ClusterInfo(self.member.rank, count, welcome.servers, members, joins, most, is_added)

    def _publish_joins(self, store: WorkerStore) -> None:
        """Let other threads know how many joins of ``store`` are over, before a call of it ends."""
        store.joins_told, known = store.joins, self.info.joins
        if store.joins != known.get(store.name, 0):
            joins = MappingProxyType({**known, store.name: store.joins})
            self.info = replace(self.info, joins=joins)

    def _on_view(self, now: float) -> None:
        view = self.member.view
        assert view is not None
        neighbours = self.table.neighbours
        if not self._complete and view.phase == "running":
            self._complete = True
            self._beginning.asks = self.member.seat.replaces
            if self.member.seat.replicas:
                self.table.kept = KeptPushes(self.stores)
            self._greet_servers(view, now)
        if self._complete:
            if view.epoch != self._resyncing.epoch:
                self._begin_epoch(view, now)
            else:
                follows_all = (
                    not self.stores
                    or self.table.kept is not None
                    or any(store.kept is not None for store in self.stores.values())
                )
                self._follow(view, now, follows_all=follows_all)
            neighbours.learn(view.members)
            self.table.uplink.sharers = neighbours.count
        lives = {rank: link.incarnation for rank, link in enumerate(self.table.links)}
        self.losses.learn(view, lives, now)
        self._gates.look()
        for store in self.stores.values():
            store.is_short = bool(self.losses.workers)
        self._end_calls_of_lost_members(now)
        self.table.take_what_lags(now)
        self.table.flow(now)

    def _greet_servers(self, view: p.View, now: float) -> None:
        """Speak to all servers from now on, of the epoch of this view: earlier requests are void."""
        self._resyncing.epoch, self._since = view.epoch, view.since
        self.table.greet_again(now)
        for member in [member for member in view.members if member.role == Role.SERVER]:
            route = route_of(member.rank)
            is_new = route not in self._servers
            if is_new:
                self._servers[route] = Connection(route, memory=self._memory, uplink=self.table.uplink)
            link = self._servers[route]
            link.abandon()
            link.ready, link.refusal, link.is_returning = False, "", False
            if is_new or (link.incarnation != member.incarnation and member.state == "held"):
                link.follow(member, view.lines.get(str(member.rank), 0))
                self.outbox.append(self._connect(link, member))
            self.member.greet(route)

    def _follow(self, view: p.View, now: float, *, follows_all: bool) -> None:
        """Speak to the servers that have taken another's place, or only to those that hold what that held."""
        for member in view.members:
            if member.role != Role.SERVER or member.state != "held":
                continue
            link = self.table.links[member.rank]
            line = view.lines.get(str(member.rank), 0)
            if link.incarnation == member.incarnation or not (follows_all or link.is_of_line(line)):
                continue
            self._returns.leave(link, member, line)
            if self.table.kept is None and not link.has_moved:
                self._forsake(member, now)
            self.outbox.append(self._connect(link, member))
            self.table.greet_again(now)
            self.member.greet(link.route)

    def _forsake(self, server: p.Member, now: float) -> None:
        """A server has taken another's place, and holds nothing."""
        for pending in self._returns.forsake(server, self.table.pending.values()):
            ticket = self.table.void(pending)
            if pending.on_end is None:
                self.table.begin(ticket, pending.call, pending.deadline, now)

    def _tell_returned(self, link: Connection, is_promoted: bool, now: float) -> None:
        """Tell a server in another's place what this worker holds; then send what waits for it."""
        server = self.table.links.index(link)
        if is_promoted and (self.table.kept is not None or link.has_moved):
            kept = () if self.table.kept is None else self.table.kept.take(server)
            self._returns.go_on(server, link, kept)
            return
        if self.table.kept is not None and not self._returns.is_told(server):
            view = self.member.view
            assert view is not None
            servers = [member for member in view.members if member.role == Role.SERVER]
            self._forsake(servers[server], now)
            self._gates.look()
            self._end_calls_of_lost_members(now)
        for call in self._returns.begin(server, self.table.pending.values()):
            self._make_own(call, partial(self._told, server, call.store), now)
        self._returns.resume(server, link)

    def _told(self, server: int, name: str, value: object, error: KvpsError | None, now: float) -> None:
        """A server has made a store again, or cannot."""
        if error is not None:
            self.stores[name].lost = ServerLost(str(error))
            self._gates.look()
            self._end_calls_of_lost_members(now)
        self._returns.end(server, name)
        self._returns.resume(server, self.table.links[server])

    def _connect(self, link: Connection, server: p.Member) -> Connect:
        is_near = 0 != server.machine == self.member.identity.machine
        key = self.member.key_of(Node(Role.SERVER, server.rank))
        return Connect(link.route, server.endpoint, is_near, key, bool(key))

    # --- servers and neighbours ----------------------------------------------------------------------

    def figures(self, name: str) -> dict[str, float]:
        """Return the numbers of a store for :meth:`kvps.KVStore.metrics`."""
        store = self.stores.get(name)
        return {**({} if store is None else store.figures()), "epoch": self._resyncing.epoch}

    def _neighbour(self, route: str, envelope: Envelope) -> Connection | None:
        """Return our connection along which a neighbour answers; None if it has gone."""
        link = self.table.neighbours.links.get(int(route.split()[1]))
        return link if link is not None and link.incarnation == envelope.incarnation else None

    # --- cuts -------------------------------------------------------------------------------------

    def _report_halt(self) -> None:
        """Tell the scheduler, if it waits for that, that this worker stands and all it did is done."""
        if not self._quiesce.is_asked or self.table.unacked():
            return
        rank = self.member.rank
        is_at_rest = False
        for pending in self.table.pending.values():
            is_pushing = isinstance(pending.call, calls.PushCall) and not pending.has_pushed
            if is_pushing or pending.call.is_creating(rank):
                return
            is_checkpoint = isinstance(pending.call, calls.TakeCheckpoint)
            is_at_rest = is_at_rest or (is_checkpoint and not pending.finished)
        if self._quiesce.stands(is_at_rest):
            self._quiesce.is_asked = False
            self._say_halted(stands=True)

    def _say_halted(self, stands: bool) -> None:
        numbers = self._quiesce.numbers()
        self.member.send(SCHEDULER, p.Halted(self._quiesce.cut, numbers, stands))

    def _break_off(self, now: float) -> None:
        """Go on in spite of a cut that is not taken yet, and say so."""
        self.member.send(SCHEDULER, p.Proceeding(self._quiesce.cut, False))
        self._make(self._quiesce.break_off(), now)

    def _make(self, held: Iterable[DeferredCall], now: float) -> None:
        """Make calls that were held back, now that a gate may have been opened or shut."""
        self._gates.look()
        for deferred in held:
            self.on_call(deferred.ticket, deferred.call, deferred.deadline, now)

    def _make_own(self, call: calls.Call, on_end: OnEnd, now: float) -> None:
        """Make a call that no user has made."""
        self._own_tickets -= 1
        self.table.begin(self._own_tickets, call, math.inf, now, on_end)

    def _begin_epoch(self, view: p.View, now: float) -> None:
        """The servers return to a cut: earlier requests are void. Ask which versions they have now."""
        self._greet_servers(view, now)
        self._closed.begin_epoch(len(self.table.links), now)
        self._returns = ServerReturns(self.stores)
        abandoned = self.table.abandon()
        held = self._quiesce.go_on()
        for pending in abandoned:
            if _is_for_user(pending):
                held.append(DeferredCall(pending.ticket, pending.call, pending.deadline))
        for name, store in self.stores.items():
            call = calls.RejoinStore(name, tuple(self._resyncing.begin(store).before))
            self._make_own(call, partial(self._rejoined, name), now)
        self._make(held, now)

    def _enter(self, name: str, now: float) -> None:
        """Take part in a store from now on."""
        self._make_own(calls.EnterStore(name), partial(self._rejoined, name), now)

    def _rejoined(self, name: str, value: object, error: KvpsError | None, now: float) -> None:
        """A store has entered the epoch, or cannot: resume the calls that wait."""
        resync = self._resyncing.rejoins.pop(name)
        self._look_at_stores()
        if error is None and not resync.before:
            self._make(resync.held, now)
            return
        if error is None:
            assert isinstance(value, dict)
            resync.after = value
            error = epoch_changed(self.stores[name], self._resyncing.epoch, resync)
            self.outbox.append(Note("debug", str(error)))
            flushes = [deferred for deferred in resync.held if not resync.ends(deferred.call)]
            if len(flushes) == len(resync.held):
                self._resyncing.untold[name] = resync
            resync.held = [deferred for deferred in resync.held if deferred not in flushes]
            self._make(flushes, now)
        for deferred in resync.held:
            self.outbox.append(Finish(deferred.ticket, error=error))

    # --- the end of a call ------------------------------------------------------------------------

    def _end_joining(self, now: float) -> None:
        """Answer the calls that wait for the cluster."""
        for ticket, deadline in list(self._joining.items()):
            error = self.member.error or self.losses.error(None, now, rebuilds=True)
            view = self.member.view
            if error is None and view is not None and view.phase == "ending":
                error = WorkerLost(f"the job cannot continue: {view.reason}")
            error = error or self.member.end
            if error is None and not self._complete and now >= deadline:
                error = Timeout(
                    f"the cluster is not complete: {self.member.reason}. Start the missing members, "
                    "or expect fewer with kvps-scheduler --workers and --servers"
                )
            if error is not None or self._complete:
                del self._joining[ticket]
                self.outbox.append(Finish(ticket, error=error))

    def _end_calls_of_lost_members(self, now: float) -> None:
        errors = {name: self.losses.error(store, now) for name, store in self.stores.items()}
        for pending in list(self.table.pending.values()):
            error = errors[pending.call.store]
            is_of_core = pending.on_end is not None  # of use when the lost member is replaced
            if error is not None and pending.ticket in self.table.pending and not is_of_core:
                self.table.finish(pending, now, error=error)
        for held in self._held():
            for deferred in [call for call in held if errors[call.call.store] is not None]:
                held.remove(deferred)
                self.outbox.append(Finish(deferred.ticket, error=errors[deferred.call.store]))

    def _end_all(self, error: KvpsError, now: float) -> None:
        held = self._quiesce.go_on()
        self._gates.look()
        for pending in list(self.table.pending.values()):
            self.table.finish(pending, now, error=error)
        for deferred in held:
            self.outbox.append(Finish(deferred.ticket, error=error))

    def _end_overdue_calls(self, now: float) -> None:
        self.table.end_late_calls(now)
        for name, resync in self._resyncing.rejoins.items():
            for deferred in [call for call in resync.held if now >= call.deadline]:
                resync.held.remove(deferred)
                waiting = [
                    request
                    for pending in self.table.pending.values()
                    if pending.call.store == name
                    for request in pending.waiting
                ]
                link_of = self.table.neighbours.link_of
                error = timeout_error(self.member, deferred.call, waiting, link_of, now)
                self.outbox.append(Finish(deferred.ticket, error=error))

    def check(self) -> None:
        """Assert the invariants."""
        self._gates.check()
        assert self._due is None or self._due <= min(self._deadlines(), default=math.inf)
        self.table.check()


def _is_for_user(pending: PendingCall) -> bool:
    return not pending.finished and pending.on_end is None
