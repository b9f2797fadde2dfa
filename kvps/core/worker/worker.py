"""The rules of a worker: what the user, the scheduler, the servers and the clock say to it.

A user's call becomes a talk (:mod:`kvps.core.worker.call_table`), whose requests are queued on the links to the servers,
sent as the windows allow, and probed for when an answer is late. What was queued or sent for a call that ends
early stays there if it changes values, and is dropped otherwise.

A lost server or worker ends calls as :mod:`kvps.core.worker.failure_policy` says. When the servers take a cut, calls are held
as :mod:`kvps.core.worker.quiesce` says; when they have returned to one, each store finds its way as
:mod:`kvps.core.worker.resync` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain

import torch

from kvps.core.effects import (
    Connect,
    Effects,
    Exit,
    Finish,
    Note,
    Route,
    Send,
)
from kvps.core.membership_client import SCHEDULER, Identity
from kvps.core.worker import calls
from kvps.core.worker.call_table import CallTable, PendingCall
from kvps.core.worker.connection import PROBE_AFTER_S, Connection, Request, route_of
from kvps.core.worker.host_aggregation.merge_queue import MergedRequest
from kvps.core.worker.operations.dispatch import start
from kvps.core.worker.quiesce import DeferredCall, Quiesce, creates
from kvps.core.worker.resync import StoreResync, epoch_changed, rejoin
from kvps.core.worker.store import WorkerStore
from kvps.core.worker.timeout_report import lateness, name_of
from kvps.errors import (
    ConfigError,
    Fenced,
    KvpsError,
    SchedulerLost,
    Timeout,
    WorkerLost,
    from_code,
    unforeseen,
)
from kvps.protocol.checkpoint import Checkpointed, Halt, Halted, Proceed, Proceeding, Revived
from kvps.protocol.envelope import Envelope, Message, Node, Packet, Role
from kvps.protocol.membership import (
    Done,
    Error,
    HistoryIs,
    Joined,
    Probed,
    Released,
    Resumed,
    View,
    Welcome,
)
from kvps.protocol.stores import Declared, FoundAll, StateIs, StatusIs
from kvps.protocol.values import Ack, Changed, Exported, Pulled, PulledIds, PulledRows, Push
from kvps.tensors import PRIVATE, Memory, to_frame

HELLO_AGAIN_S = 1.0
ASK_AGAIN_S = 2.0
LAST_PROBE_S = 0.25
"""How long before a deadline the servers are asked once more what they wait for."""
ANSWERS = (
    Declared,
    FoundAll,
    Pulled,
    Changed,
    PulledRows,
    PulledIds,
    Exported,
    Done,
    StateIs,
    StatusIs,
    Joined,
    HistoryIs,
    Revived,
)
"""What a server may answer besides ACK; each carries the request's number."""


class Worker(CallTable):
    """One worker process's part in one job."""

    def __init__(self, identity: Identity, now: float, memory: Memory = PRIVATE) -> None:
        super().__init__(identity, now, memory)
        self._memory = memory
        self._standstill = Quiesce()
        self._epoch = 0
        """That of the view by which this worker goes."""
        self._since = 0
        """The view in which it began."""
        self._rejoins: dict[str, StoreResync] = {}
        """The stores that do not know yet where their keys are in this epoch."""
        self._untold: dict[str, StoreResync] = {}
        """By store, what the next call is to be told."""
        self._own_tickets = 0
        """Of calls that nobody made but this core; they count down."""
        self._hello_at = now
        self._told_at = now
        self._links_at = math.inf
        """No later than the next thing that is due on a link to a server."""
        self._complete = False
        self._joining: dict[int, float] = {}

    # --- the doors ----------------------------------------------------------------------------

    def start(self, now: float) -> Effects:
        """Join the cluster."""
        yield from self.member.start(now)

    def on_join(self, ticket: int, deadline: float, now: float) -> Effects:
        """The user wants to know when the cluster is complete."""
        self._joining[ticket] = deadline
        yield from self._end_joining(now)

    def on_call(self, ticket: int, call: calls.Call, deadline: float, now: float) -> Effects:
        """The user asks for something; ``deadline`` is when he stops waiting."""
        self.member.progress += 1
        error = self._hopeless(call, now)
        if error is not None:
            yield Finish(ticket, error=error)
            return
        if call.store in self._rejoins:
            self._rejoins[call.store].held.append(DeferredCall(ticket, call, deadline))
            return
        if call.store in self._untold:
            error = epoch_changed(self.books[call.store], self._epoch, self._untold.pop(call.store))
            yield Finish(ticket, error=error)
            return
        if call.store in self.books and self._standstill.holds(self.books[call.store], call):
            self._standstill.hold(ticket, call, deadline)
            yield from self._say_where_it_stands()
            return
        if isinstance(call, calls.TOGETHER):
            known = [
                *(one for one, _ in self._late),
                *(one.call for one in self._talks.values() if one.finished),
            ]
            if call in known:
                yield from self._again(ticket, call, deadline)
                return
        if isinstance(call, calls.OpenStore) and call.store not in self.books:
            self.books[call.store] = WorkerStore(
                call.opened,
                self.member.rank,
                len(self.links),
                call.worker_grace_s,
                self._memory,
                bool(self.losses.workers),
            )
        rows: list[torch.Tensor] = []
        if isinstance(call, calls.Init | calls.Broadcast | calls.PushValues | calls.PushKeyRows):
            rows.extend(call.rows)
        talk = PendingCall(ticket, call, start(self.books[call.store], call, rows), rows, deadline)
        self._talks[ticket] = talk
        yield from self._go_on(talk, None, now)
        yield from self._say_where_it_stands()

    def leave(
        self, done: bool, exit_code: int, reason: str, *, replaceable: bool = True
    ) -> Effects:
        """The process ends: say so, and if it failed, whether another can take its place."""
        yield from self.member.leave(done, exit_code, replaceable, reason)
        if self.member.welcome is None:
            yield Exit(0, "left before it had joined")

    def admit(self, route: Route, envelope: Envelope, kind: type[Message]) -> bool:
        """Judge a packet by its envelope: those that come to us are from neighbours."""
        return isinstance(route, str) or self.neighbours.admit(envelope, kind)

    def on_packet(self, route: Route, packet: Packet, now: float) -> Effects:
        """The scheduler, a server or a neighbour said something."""
        if route == SCHEDULER:
            yield from self._on_scheduler(packet, now)
            return
        if isinstance(route, bytes):
            yield from self.neighbours.on_packet(route, packet, now)
        elif (link := self._answering(route, packet.envelope)) is not None:
            yield from self._on_answer(link, packet, now)
            self.neighbours.heard(link, now)
        yield from self._flow(now)
        yield from self._say_where_it_stands()

    def on_failure(self, route: Route, envelope: Envelope, error: Exception, now: float) -> Effects:
        """A packet could not be served, as nobody foresaw: a neighbour is told.

        Raises:
            Exception: ``error``, if it was an answer to this worker's own calls: they would never end.
        """
        if isinstance(route, str):
            raise error
        said = unforeseen(f"worker {self.member.rank}", error)
        answer = Error(envelope.seq, said.code, str(said))
        yield Send(route, self.member.packet(answer))

    def on_drop(self, route: Route, now: float) -> Effects:
        """A connection broke; the probes find out what was lost with it."""
        yield from ()

    def on_timer(self, now: float) -> Effects:
        """Beat, probe, say HELLO again, and end what is over its deadline."""
        self.member.waits_in = next((name_of(call) for call in self._waited_for()), "")
        yield from self.member.on_timer(now)
        if now >= self._hello_at:
            self._hello_at = now + HELLO_AGAIN_S
            for link in self._links():
                if not link.ready:
                    yield Send(link.route, self.member.hello())
        alone_at = self._alone_at()
        if alone_at is not None and now >= alone_at:
            self._told_at = now  # a server that hears neither the scheduler nor a worker would end
            for link in self.links:
                yield Send(link.route, self.member.hello())
        for link in self._links():
            if link.is_overdue(now):
                yield from self.probe(link)
        self.neighbours.on_timer(now)
        yield from self._flow(now)
        for request in list(self._asked.values()):
            if now >= request.sent_at + ASK_AGAIN_S:
                yield from self._ask_scheduler(request, now)
        yield from self._end_joining(now)
        yield from self._take_what_lags(now)
        yield from self._end_what_is_lost(now)
        yield from self._end_what_is_late(now)
        if self._standstill.is_impatient(self.member.heard_at, now):
            yield Send(SCHEDULER, self.member.packet(Proceeding(self._standstill.cut, False)))
            yield from self._make(self._standstill.go_on(), now)

    def _waited_for(self) -> Iterator[calls.Call]:
        """Yield the calls for which the user waits."""
        held = [self._standstill.held, *(one.held for one in self._rejoins.values())]
        yield from (one.call for some in held for one in some)
        yield from (one.call for one in self._talks.values() if not one.finished)

    def deadline(self) -> float | None:
        """When something is due next."""
        due = min(self._deadlines(), default=math.inf)
        if self._links_at < due:  # looked up only then: this is asked after every packet
            self._links_at = min(self._due_on(self.links), default=math.inf)
            due = min(due, self._links_at)
        return due if due < math.inf else None

    def _alone_at(self) -> float | None:
        """When the servers are told again that this worker lives, since the scheduler cannot."""
        if self.member.deadline() is None or not self.links:
            return None
        silence_max_s = self.member.identity.silence_max_s
        return max(self.member.heard_at, self._told_at) + silence_max_s

    def _deadlines(self) -> Iterator[float]:
        beat = self.member.deadline()
        if beat is not None:
            yield beat
        alone_at = self._alone_at()
        if alone_at is not None:
            yield alone_at
        yield from self._joining.values()
        impatient_at = self._standstill.deadline(self.member.heard_at)
        if impatient_at is not None:
            yield impatient_at
        for one in self._rejoins.values():
            yield from (held.deadline for held in one.held)
        bundle = self.neighbours.deadline()
        if bundle is not None:
            yield bundle
        yield from self._due_on(self.neighbours.links.values())
        for request in self._asked.values():
            yield request.sent_at + ASK_AGAIN_S
        for talk in self._talks.values():
            yield self._lags_until(talk)
            if not talk.finished:
                yield talk.deadline - (0.0 if talk.probed else LAST_PROBE_S)
        waited_for = {talk.call.store for talk in self._talks.values() if _is_for_user(talk)}
        waited_for.update(store for store, one in self._rejoins.items() if one.held)
        for store in waited_for:
            grace = self.losses.deadline(self.books[store])
            if grace is not None:
                yield grace

    def _due_on(self, links: Iterable[Connection]) -> Iterator[float]:
        for link in links:
            if not link.ready:
                yield self._hello_at
            probe = link.probe_at()
            if probe is not None:
                yield probe

    # --- the scheduler --------------------------------------------------------------------------

    def _on_scheduler(self, packet: Packet, now: float) -> Effects:
        message = packet.message
        self.member.heard_at = now
        if isinstance(message, Released | Resumed | Checkpointed):
            request = self._asked.pop(message.seq, None)
            if request is not None:
                yield from self.answered(request, packet, now)
            return
        ends_us = isinstance(message, Error) and message.code == Fenced.code  # and not just a call
        if isinstance(message, Error) and message.seq in self._asked and not ends_us:
            request = self._asked.pop(message.seq)
            yield from self.refused(request, from_code(message.code, message.text), now)
            return
        if isinstance(message, Halt):
            yield from self._make(self._standstill.halt(message, self.books, now), now)
            yield from self._say_where_it_stands()
            if self._standstill.is_asked:
                yield self._halted(stands=False)
                # What was lent is in, perhaps, though its values wait for one that stands already.
                unacked = [one for some in self._unacked.values() for one in some]
                yield from self._ask_after(unacked, now)
            return
        if isinstance(message, Proceed):
            stood, held = self._standstill.proceed(message)
            yield Send(SCHEDULER, self.member.packet(Proceeding(message.cut, stood)))
            yield from self._make(held, now)
            return
        if isinstance(message, Probed):
            for one in message.pending:
                if one.seq in self._asked:
                    self._asked[one.seq].waits_for = one.reason
            return
        before = self.member.number
        yield from self.member.on_packet(packet, now)
        if self.member.left:
            yield Exit(0, "left")
        elif self.member.stopped is not None:
            stop = self.member.stopped
            yield from self._end_all(SchedulerLost(f"the job is over: {stop.reason}"), now)
            yield Exit(stop.exit_code, stop.reason)
        elif self.member.error is not None:
            yield from self._end_all(self.member.error, now)
        elif self.member.number != before:
            yield from self._on_view(now)
        yield from self._end_joining(now)

    def _on_view(self, now: float) -> Effects:
        view = self.member.view
        assert view is not None
        if not self._complete and view.phase == "running":
            self._complete = True
            self._epoch, self._since = view.epoch, view.since
            self._hello_at = now + HELLO_AGAIN_S
            self._links_at = min(self._links_at, self._hello_at)
            for one in view.members:
                if one.role == Role.SERVER:
                    link = Connection(
                        route_of(one.rank),
                        one.endpoint,
                        one.incarnation,
                        self._memory,
                        self._uplink,
                    )
                    is_near = 0 != one.machine == self.member.identity.machine
                    key = self.member.key_of(Node(Role.SERVER, one.rank))
                    yield Connect(link.route, one.endpoint, is_near, key, bool(key))
                    yield Send(link.route, self.member.hello())
        if self._complete:
            if view.epoch != self._epoch:
                yield from self._begin_epoch(view, now)
            yield from self.neighbours.learn(view.members)
            self._uplink.sharers = self.neighbours.count
        lives = {rank: link.incarnation for rank, link in enumerate(self.links)}
        self.losses.learn(view, lives, now)
        for book in self.books.values():
            book.is_short = bool(self.losses.workers)
        yield from self._end_what_is_lost(now)
        yield from self._take_what_lags(now)
        yield from self._flow(now)

    # --- servers and neighbours ----------------------------------------------------------------------

    def _answering(self, route: str, envelope: Envelope) -> Connection | None:
        """Return the link to whoever answers along one of our connections; None if it has gone."""
        kind, rank = route.split()
        if envelope.view < self._since:
            return None  # of an epoch that is over
        if kind == "server":
            return self.links[int(rank)]  # it may have no seat yet, and know no rank
        link = self.neighbours.links.get(int(rank))
        return link if link is not None and link.incarnation == envelope.incarnation else None

    def _on_answer(self, link: Connection, packet: Packet, now: float) -> Effects:
        message = packet.message
        match message:
            case Welcome():
                link.ready = True
            case Ack():
                for receipt in message.receipts:
                    request = link.receive(receipt.seq)
                    if request is None:
                        continue
                    if isinstance(request.message, Push) and request.message.pull:
                        yield from self.taken_in(request, now)  # its PULLED is still to come
                    else:
                        link.answer(receipt.seq)
                        yield from self.answered(request, packet, now)
            case _ if isinstance(message, ANSWERS):
                request = link.answer(message.seq)
                if request is not None:
                    yield from self.answered(request, packet, now)
            case Probed():
                for one in message.pending:
                    request = link.receive(one.seq)
                    if request is not None:
                        request.waits_for = one.reason
                        yield from self.taken_in(request, now)
                        if isinstance(request.owner, MergedRequest):
                            yield from self.neighbours.waits(request.owner, one.reason)
                for seq in message.missing:
                    request = link.miss(seq)
                    if request is not None:
                        yield self._packet(link, request)
            case Error():
                yield from self._on_error(link, message, now)
            case _:
                yield Note("debug", f"unexpected {type(message).__name__} from {link.route!r}")

    def _on_error(self, link: Connection, message: Error, now: float) -> Effects:
        error = from_code(message.code, message.text)
        request = link.answer(message.seq)
        if isinstance(error, Fenced):
            self.member.error = error
            yield from self._end_all(error, now)
            yield Exit(1, str(error))
        elif request is not None:
            yield from self.refused(request, error, now)
        elif not link.ready:
            link.refusal = str(error)
        else:
            yield Note("warning", str(error))

    def _flow(self, now: float) -> Effects:
        """Send what there is room for."""
        for link, request in chain(self._uplink.due(now), self.neighbours.due(now)):
            self._links_at = min(self._links_at, now + PROBE_AFTER_S)
            yield self._packet(link, request)

    def _packet(self, link: Connection, request: Request) -> Send:
        frames = tuple([to_frame(one) for one in request.payload])
        return Send(link.route, Packet(self.member.envelope(request.seq), request.message, frames))

    # --- cuts -------------------------------------------------------------------------------------

    def _say_where_it_stands(self) -> Effects:
        """Tell the scheduler, if it waits for that, that this worker stands and all it did is done."""
        if not self._standstill.is_asked or any(self._unacked.values()):
            return
        rank = self.member.rank
        for talk in self._talks.values():
            is_pushing = isinstance(talk.call, calls.PUSHES) and not talk.has_pushed
            if is_pushing or creates(rank, talk.call):
                return
        is_at_rest = any(
            isinstance(talk.call, calls.TakeCheckpoint) and not talk.finished
            for talk in self._talks.values()
        )
        if self._standstill.stands(self.books, is_at_rest):
            self._standstill.is_asked = False
            yield self._halted(stands=True)

    def _halted(self, stands: bool) -> Send:
        numbers = self._standstill.numbers(self.books)
        return Send(SCHEDULER, self.member.packet(Halted(self._standstill.cut, numbers, stands)))

    def _make(self, held: Iterable[DeferredCall], now: float) -> Effects:
        """Make calls that were held back."""
        for one in held:
            yield from self.on_call(one.ticket, one.call, one.deadline, now)

    def _begin_epoch(self, view: View, now: float) -> Effects:
        """The servers return to a cut: what was asked of them is void. Ask what they have now."""
        self._epoch, self._since = view.epoch, view.since
        self._hello_at = now + HELLO_AGAIN_S
        self._links_at = min(self._links_at, self._hello_at)
        for one in view.members:
            if one.role == Role.SERVER:
                link = self.links[one.rank]
                link.abandon()
                link.ready, link.refusal = False, ""
                if link.incarnation != one.incarnation and one.state == "held":
                    link.incarnation, link.endpoint = one.incarnation, one.endpoint
                    is_near = 0 != one.machine == self.member.identity.machine
                    key = self.member.key_of(Node(Role.SERVER, one.rank))
                    yield Connect(link.route, one.endpoint, is_near, key, bool(key))
                yield Send(link.route, self.member.hello())
        self.neighbours.begin_epoch()
        self._asked.clear()
        self._unacked.clear()
        self._draining.clear()
        self._late.clear()
        ended, self._talks = self._talks, {}
        held = self._standstill.go_on()
        for talk in ended.values():
            talk.conversation.close()
            if talk.ticket > 0 and not talk.finished:
                held.append(DeferredCall(talk.ticket, talk.call, talk.deadline))
        for store, book in self.books.items():
            if store not in self._rejoins:  # else this is the second loss in a row
                new = StoreResync(book.versions(), book.optimized.number)
                self._rejoins[store] = self._untold.pop(store, new)
            yield from self._rejoin(store, book, tuple(self._rejoins[store].before), now)
        yield from self._make(held, now)

    def _rejoin(self, store: str, book: WorkerStore, names: tuple[str, ...], now: float) -> Effects:
        self._own_tickets -= 1
        call = calls.RejoinStore(store)
        talk = PendingCall(self._own_tickets, call, rejoin(book, names), [], math.inf)
        self._talks[talk.ticket] = talk
        yield from self._go_on(talk, None, now)

    def _rejoined(self, store: str, value: object, error: KvpsError | None, now: float) -> Effects:
        """A store has found its way into the epoch, or cannot: tell those who wait."""
        one = self._rejoins.pop(store)
        if error is None and not one.before:
            yield from self._make(one.held, now)
            return
        if error is None:
            assert isinstance(value, dict)
            one.after = value
            error = epoch_changed(self.books[store], self._epoch, one)
            yield Note("debug", str(error))
            if not one.held:
                self._untold[store] = one
        for held in one.held:
            yield Finish(held.ticket, error=error)

    # --- the end of a call ------------------------------------------------------------------------

    def _end_joining(self, now: float) -> Effects:
        """Tell those who wait for the cluster what has become of it."""
        for ticket, deadline in list(self._joining.items()):
            error = self.member.error or self.losses.error(None, now)
            view = self.member.view
            if error is None and view is not None and view.phase == "ending":
                error = WorkerLost(f"the job cannot go on: {view.reason}")
            if error is None and self.member.stopped is not None:
                error = SchedulerLost(f"the job is over: {self.member.stopped.reason}")
            if error is None and not self._complete and now >= deadline:
                error = Timeout(
                    f"the cluster is not complete: {self.member.reason}. Start what is missing, "
                    "or start fewer with kvps-scheduler --workers and --servers"
                )
            if error is not None or self._complete:
                del self._joining[ticket]
                yield Finish(ticket, error=error)

    def _hopeless(self, call: calls.Call, now: float) -> KvpsError | None:
        """Return why ``call`` cannot even begin, if it cannot."""
        if self.member.error is not None:
            return self.member.error
        if not self.links:
            return ConfigError(
                f"{name_of(call)}: this worker knows no server. Wait until the cluster is complete, "
                "and start kvps-scheduler with --servers 1 or more"
            )
        return self.losses.error(self.books.get(call.store), now)

    def _end_what_is_lost(self, now: float) -> Effects:
        errors = {name: self.losses.error(book, now) for name, book in self.books.items()}
        for talk in list(self._talks.values()):
            error = errors[talk.call.store]
            is_rejoin = isinstance(talk.call, calls.RejoinStore)  # of use when the lost is replaced
            if error is not None and talk.ticket in self._talks and not is_rejoin:
                yield from self._finish(talk, now, error=error)
        for waiting in (self._standstill.held, *(one.held for one in self._rejoins.values())):
            for held in [held for held in waiting if errors[held.call.store] is not None]:
                waiting.remove(held)
                yield Finish(held.ticket, error=errors[held.call.store])

    def _end_all(self, error: KvpsError, now: float) -> Effects:
        for talk in list(self._talks.values()):
            yield from self._finish(talk, now, error=error)
        for one in self._standstill.go_on():
            yield Finish(one.ticket, error=error)

    def _end_what_is_late(self, now: float) -> Effects:
        for talk in list(self._talks.values()):
            if talk.finished:
                continue
            if now >= talk.deadline:
                yield from self._time_out(talk, now)
            elif not talk.probed and now >= talk.deadline - LAST_PROBE_S:
                talk.probed = True
                yield from self._ask_after(talk.waiting, now)
        for store, one in self._rejoins.items():
            late = [held for held in one.held if now >= held.deadline]
            for held in late:
                one.held.remove(held)
                waiting = [
                    request
                    for talk in self._talks.values()
                    if talk.call.store == store
                    for request in talk.waiting
                ]
                error = lateness(self.member, held.call, waiting, self.neighbours.link_of, now)
                yield Finish(held.ticket, error=error)

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        self.neighbours.check()


def _is_for_user(talk: PendingCall) -> bool:
    return not talk.finished and not isinstance(talk.call, calls.RejoinStore)
