"""Calls in flight on a worker: how their operations advance, and how they end: answered, late, or given up.

Theory of operation
-------------------
Each call runs as an operation (:mod:`kvps.core.worker.calls.base`): a generator that yields requests and is
sent their answers. The requests go to the servers, to the workers of this host, or to the scheduler. When all
requests of a step are answered, the operation goes on; when it returns, the call is finished.

A call has a deadline. When it passes, the call finishes with :class:`~kvps.errors.Timeout`, which names what
the servers said they wait for. The caller's tensors are copied then, and what it wanted is not written any
more. An operation that changes something continues, so that a push is still applied once; an operation that
only reads is abandoned.

The table knows the connections that requests travel along, and what is due on them. Which calls
may begin, and which end because a member is lost, is decided in :mod:`kvps.core.worker.worker`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch

from kvps import protocol as p
from kvps.core.effects import Copied, Finish, Note, Outbox, Send
from kvps.core.membership_client import SCHEDULER, MembershipClient
from kvps.core.placement import JOIN_SERVER
from kvps.core.worker.calls import Call, OnTimeout, PushCall, ReadCall, RestoreCheckpoint
from kvps.core.worker.calls.base import Operation
from kvps.core.worker.connection import PROBE_AFTER_S, Connection, Request, SendScheduler
from kvps.core.worker.consistent_read import AwaitAcks, LaggingReads
from kvps.core.worker.failure_policy import FailurePolicy
from kvps.core.worker.host_aggregation.host_group import HostGroup
from kvps.core.worker.host_aggregation.merge_queue import MergedRequest
from kvps.core.worker.kept_pushes import KeptPushes
from kvps.core.worker.store import WorkerStore
from kvps.core.worker.timeout_report import timeout_error
from kvps.errors import ConfigError, KvpsError, from_code
from kvps.protocol.envelope import Packet, maker
from kvps.tensors import Memory, to_frame

LAG_MAX_S = 10.0
"""Seconds for which lagging parts are waited for, once a worker was replaced where there are no rounds."""
LATE_MAX = 64
"""Most calls that are kept which succeeded after their Timeout; the same call made again finds them."""
HELLO_AGAIN_S = 1.0
ASK_AGAIN_S = 2.0
"""Seconds after which the scheduler is sent a request again that it has not answered."""
LEAST_WAIT_S = min(PROBE_AFTER_S, ASK_AGAIN_S, LAG_MAX_S)
"""Seconds until something is due because of a request, at the least."""
OWN_LIMIT = 0.5
"""The share of the store's limit under which the limit of a call is the user's. What the call
takes from its script to this core is taken from its time."""
LAST_PROBE_S = 0.25
"""Seconds before a deadline at which the servers are asked once more for which ranks they wait."""

NO_TICKET = 0
"""In place of the ticket of a call that is not in the table any more."""
PUSHES = p.Push, p.PushRows, p.PushTables
"""Requests that a server acknowledges when they are taken in."""

_packet, _send, _finish = maker(Packet), maker(Send), maker(Finish)

OnEnd = Callable[[object, KvpsError | None, float], None]
"""Takes the result or the error of a call that the core made itself, and the time."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """One call under way."""

    ticket: int
    call: Call
    operation: Operation
    values: list[torch.Tensor]
    """The caller's values, until they are read; copies, once the caller stopped waiting."""
    deadline: float
    on_end: OnEnd | None = None
    """Function that hears of the end, for a call that no user made."""
    probed: bool = False
    has_pushed: bool = False
    """Its pushes are numbered and under way."""
    since: float = 0.0
    """Time at which this step began."""
    is_asking: bool = False
    """Not all of this step's requests are made yet; some may be answered already."""
    finished: bool = False
    """The caller has the result; errors of requests still in flight are reported nowhere."""
    limit_s: float = 0.0
    """The time that its caller has given it."""
    requests: list[Request] = field(default_factory=list)
    """The requests of this step; empty while it drains."""
    answers: dict[Request, Packet] = field(default_factory=dict)
    waiting: dict[Request, None] = field(default_factory=dict)
    """Requests that this step waits for: its own, or all pushes of the store. Their order is kept, since a
    set of objects has another one in every process."""


class CallTable:
    """The calls in flight on one worker.

    Args:
        member: the worker's membership.
        stores: name -> store, of all stores that were opened; the worker adds to it.
        losses: the lost members that are known.
        memory: where values lie that travel.
        tell_joins: hears of a store whose number of joins has changed, before a call of it ends.
        tell_returned: speaks to a server that has taken another's place, and may have been its standby.
        outbox: of the worker.
    """

    def __init__(
        self,
        member: MembershipClient,
        stores: Mapping[str, WorkerStore],
        losses: FailurePolicy,
        memory: Memory,
        tell_joins: Callable[[WorkerStore], None],
        tell_returned: Callable[[Connection, bool, float], None],
        outbox: Outbox,
    ) -> None:
        self._outbox = outbox
        self._tell_joins = tell_joins
        self._tell_returned = tell_returned
        self._member = member
        self._stores = stores
        self._losses = losses
        self.uplink = SendScheduler()
        self.links = self.uplink.links
        """Connections to every server, once the cluster is complete."""
        self.neighbours = HostGroup(member, memory, self.links, self, outbox)
        self.pending: dict[int, PendingCall] = {}
        """Ticket -> call."""
        self._hello_at = math.inf
        """Time at which peers that have not answered HELLO are sent it again."""
        self._late: list[tuple[Call, object]] = []
        """(call, result) of calls of all ranks that succeeded after their Timeout."""
        self._unacked: dict[str, dict[Request, None]] = {}
        """Store -> pushes that are not known to have been taken in."""
        self.kept: KeptPushes | None = None
        """The pushes that servers may lose; None in a job whose servers have no standbys."""
        self._draining: list[PendingCall] = []
        self.scheduler = Connection(SCHEDULER)
        """The connection to the scheduler, which is sent what it has not answered again, and no PROBE."""

    def begin(
        self, ticket: int, call: Call, deadline: float, now: float, on_end: OnEnd | None = None
    ) -> None:
        """Begin a call; or, if it stands since a Timeout, have ``ticket`` wait for it."""
        if call.on_timeout is OnTimeout.RESUME:
            for late in self._late:
                if late[0] == call:
                    self._late.remove(late)
                    self._outbox.append(Finish(ticket, late[1]))
                    return
            for pending in self.pending.values():
                if pending.finished and pending.call == call:
                    del self.pending[pending.ticket]
                    pending.ticket, pending.deadline = ticket, deadline
                    pending.limit_s = deadline - now
                    pending.finished = pending.probed = False
                    self.pending[ticket] = pending
                    return
        store = self._stores[call.store]
        if store.restoring and (isinstance(call, PushCall | ReadCall) or call.creates):
            text = f"{store.restoring} of store {store.name!r} is under way and gives its keys other values"
            after = f"If it has ended with Timeout, call {store.restoring} once more to wait on"
            error = ConfigError(f"{call.title}: {text}; make this call when that has returned. {after}")
            self._outbox.append(Finish(ticket, error=error))
            return
        values = list(call.values())
        operation = call.run(store, values)
        pending = PendingCall(ticket, call, operation, values, deadline, on_end, limit_s=deadline - now)
        self.pending[ticket] = pending
        self._advance(pending, None, now)

    def _advance(self, pending: PendingCall, answers: list[Packet] | KvpsError | None, now: float) -> None:
        """Let an operation go on until it waits for an answer, or ends."""
        while True:
            try:
                if isinstance(answers, KvpsError):
                    step = pending.operation.throw(answers)
                else:
                    step = pending.operation.send(answers)  # type: ignore[arg-type]  # None begins it
            except StopIteration as end:
                self.finish(pending, now, value=end.value)
                return
            except KvpsError as error:
                self.finish(pending, now, error=error)
                return
            pending.answers = {}
            if isinstance(step, AwaitAcks):
                pending.requests = []
                pending.waiting = dict(self._unacked.get(pending.call.store, {}))
                if pending.waiting:  # else it goes on at once, and waits for its own next
                    self._draining.append(pending)
                self.ask_after(pending.waiting, now)
            else:
                pending.requests, pending.since = step, now
                pending.waiting = dict.fromkeys(step)
                self._ask(pending, now)
            if pending.waiting:
                return
            answers = [pending.answers[request] for request in pending.requests]

    def _ask(self, pending: PendingCall, now: float) -> None:
        store = self._stores[pending.call.store]
        unacked = self._unacked.setdefault(store.name, {})
        pending.is_asking = is_push = True
        at_once: Connection | None = None
        for request in pending.requests:
            request.owner, request.traffic = pending, store.traffic
            is_push = is_push and request.payload_bytes > 0
            if request.server is None:
                self.scheduler.queue(request)
                self._send(self.scheduler, self.scheduler.send(now))
                continue
            if isinstance(request.message, PUSHES):
                unacked[request] = None
                pending.has_pushed = pending.has_pushed or is_push  # a push of nothing is none
            if isinstance(request.message, p.Join | p.Return) and request.server == JOIN_SERVER:
                self.neighbours.tell(request.message)
            if self.neighbours.is_active and self.neighbours.collect(store, request):
                self.neighbours.ask(request, now)
            elif (link := self.links[request.server]).is_free() and len(pending.requests) == 1:
                at_once = link
            else:
                link.queue(request)
        pending.is_asking = False
        if is_push and pending.call.returns_early(store):
            self._outbox.append(Copied(pending.ticket))
        if at_once is not None:
            self._send(at_once, at_once.number(request, now))
        self.flow(now)

    def _ask_again(self, request: Request, now: float) -> None:
        """Send a request to the scheduler once more."""
        request.sent_at = now
        self._send(self.scheduler, request)

    def ask_after(self, requests: Iterable[Request], now: float) -> None:
        """Probe the peers of late requests; they may not have reported all that they know."""
        waited_for = list(requests)
        for request in waited_for:
            if request.server is None:
                self._ask_again(request, now)
        for link in self.connections():
            if any(request.link is link and request.seq for request in waited_for):
                self.probe(link)
        self.neighbours.ask_after(waited_for, now)

    def unacked(self) -> list[Request]:
        """Return the pushes that are not known to have been taken in."""
        return list(chain.from_iterable(self._unacked.values()))

    def is_settled(self, since: float) -> bool:
        """Whether all pushes have arrived, a peer has said of each request since then that it
        waits for workers, and no call goes on by itself."""
        if self.unacked() or any(link.line for link in self.connections()):
            return False
        sent = list(self.neighbours.led())
        for link in chain(self.connections(), (self.scheduler,)):
            sent += link.outstanding.values()
        known = set(sent)
        return all(request.confirmed_at >= since for request in sent) and all(
            pending.waiting and known.issuperset(pending.waiting) and self._lags_until(pending) == math.inf
            for pending in self.pending.values()
        )

    def connections(self) -> Iterator[Connection]:
        """Yield the connections to all servers and neighbours."""
        return chain(self.links, self.neighbours.links.values())

    def flow(self, now: float) -> None:
        """Send what there is room for."""
        if self.uplink.queued:
            self.uplink.flow(now, self._send)
        if self.neighbours.is_active:
            self.neighbours.beside.flow(now, self._send)

    def _send(self, link: Connection, request: Request) -> None:
        frames = tuple(map(to_frame, request.payload))
        packet = _packet((self._member.envelope(request.seq), request.message, frames, ()))
        self._outbox.append(_send((link.route, packet, None)))

    def probe(self, link: Connection) -> None:
        """Ask a peer after all that it has not answered."""
        for seqs in link.unanswered():
            self._member.send(link.route, p.Probe(seqs))

    def greet_again(self, now: float) -> None:
        """Servers were sent HELLO: say it again after a while to those that have not answered."""
        self._hello_at = now + HELLO_AGAIN_S

    def on_answer(self, link: Connection, packet: Packet, now: float) -> None:
        """A server, the scheduler, or a neighbour that was asked, has answered."""
        message = packet.message
        match message:
            case p.Welcome():
                link.ready = not link.is_returning
                if link.is_returning and packet.envelope.incarnation == link.incarnation:
                    self._tell_returned(link, message.promoted, now)
            case p.Ack():
                for receipt in message.receipts:
                    request = link.receive(receipt.seq)
                    if request is None:
                        continue
                    if isinstance(request.message, p.Push) and request.message.pull:
                        self.taken_in(request, now)  # its PULLED is still to come
                    else:
                        if self.kept is not None:
                            self.kept.acknowledged(request, receipt.version, message.due)
                        link.answer(receipt.seq)
                        if request.owner is not None:  # else it was sent again
                            self.answered(request, packet, now)
            case p.Error():
                error = from_code(message.code, message.text)
                request = link.answer(message.seq)
                if request is not None and request.owner is not None:
                    self.refused(request, error, now)
                elif not link.ready:
                    link.refusal = str(error)
                elif link.has_sent(message.seq):
                    # Its call is over, for instance since another server refused it for the same reason.
                    self._outbox.append(
                        Note("debug", f"a call that is over was refused by {link.route!r}: {error}")
                    )
                else:
                    self._outbox.append(Note("warning", str(error)))
            case p.Answer():
                request = link.outstanding.get(message.seq)
                if request is not None:
                    if self.kept is not None and request.server is not None:
                        self.kept.told(request, message)
                    link.answer(message.seq, packet)
                    self.answered(request, packet, now)
            case p.Probed():
                self._probed(link, message, now)
            case p.Ping():
                pong = p.Pong(packet.envelope.seq, 0.0, 0, link.sending_s(now))
                self._member.send(link.route, pong)
            case _:
                self._outbox.append(Note("debug", f"unexpected {type(message).__name__} from {link.route!r}"))
        if link.sending_since is not None:
            link.look(now)

    def _probed(self, link: Connection, message: p.Probed, now: float) -> None:
        for_workers = frozenset(message.for_workers)
        for stand in message.pending:
            request = link.receive(stand.seq)
            if request is not None:
                request.waits_for = stand.reason
                self.taken_in(request, now)
                if isinstance(request.owner, MergedRequest):
                    is_for_workers = stand.seq in for_workers
                    self.neighbours.waits(request.owner, stand.reason, is_for_workers, now)
        for seq in for_workers & link.outstanding.keys():
            link.outstanding[seq].confirmed_at = now
        for seq in message.missing:
            request = link.miss(seq)
            if request is not None:
                self._send(link, request)

    def answered(self, request: Request, packet: Packet, now: float) -> None:
        """All is well with ``request``; its operation goes on if it was the last."""
        if isinstance(request.owner, MergedRequest):
            self.neighbours.answered(request.owner, packet, now)
            return
        pending = request.owner
        assert isinstance(pending, PendingCall), "what is not a merged request's is a call's"
        if isinstance(request.message, PUSHES):
            self._unacked.get(pending.call.store, {}).pop(request, None)
            if self._draining:
                self._drain(request, now)
        if request.on_reply is not None:
            request.on_reply(packet, not pending.finished)
            # Its values are where they belong. The memory in which they came may be another's, and
            # is given back when nothing refers to it: a request and its call refer to each other.
            request.on_reply = None
            packet = _packet((packet.envelope, packet.message, (), packet.loans))
        pending.answers[request] = packet
        pending.waiting.pop(request, None)
        if not pending.waiting and not pending.is_asking and pending.ticket in self.pending:
            answers = list(map(pending.answers.__getitem__, pending.requests))
            self._advance(pending, answers, now)

    def refused(self, request: Request, error: KvpsError, now: float) -> None:
        """The peer refused ``request``, and so its call."""
        if isinstance(request.owner, MergedRequest):
            self.neighbours.refused(request.owner, error, now)
            return
        self.taken_in(request, now)
        pending = request.owner
        assert isinstance(pending, PendingCall), "what is not a merged request's is a call's"
        pending.waiting.pop(request, None)
        if pending.ticket in self.pending:
            self._advance(pending, error, now)
            if pending.has_pushed and pending.ticket not in self.pending:
                self._end_reads_after(pending, error, now)

    def _end_reads_after(self, push: PendingCall, error: KvpsError, now: float) -> None:
        """End the reads that wait for a push that is over, and was not applied: its number is free again."""
        call = push.call
        assert isinstance(call, PushCall), "others do not push"
        for later in [entry for entry in self.pending.values() if entry.ticket > push.ticket]:
            match later.call:
                case ReadCall(store=call.store, keys=keys) if not set(call.keys).isdisjoint(keys):
                    self.finish(later, now, error=error)

    def taken_in(self, request: Request, now: float) -> None:
        """The server needs ``request`` no more: calls that wait for that go on."""
        if isinstance(request.owner, MergedRequest):
            self.neighbours.taken_in(request.owner, now)
            return
        if not isinstance(request.message, PUSHES):
            return
        owner = request.owner
        assert isinstance(owner, PendingCall), "what is not a merged request's is a call's"
        self._unacked.get(owner.call.store, {}).pop(request, None)
        self._drain(request, now)

    def _drain(self, request: Request, now: float) -> None:
        """Let calls go on that waited for the push of ``request`` alone."""
        for pending in [draining for draining in self._draining if request in draining.waiting]:
            pending.waiting.pop(request, None)
            if not pending.waiting:
                self._draining.remove(pending)
                self._advance(pending, [], now)

    def on_timer(self, now: float) -> None:
        """Say HELLO again, probe, ask the scheduler again, send what there is room for."""
        if now >= self._hello_at:
            self._hello_at = now + HELLO_AGAIN_S
            for link in [link for link in self.connections() if not link.ready]:
                self._member.greet(link.route)
        for link in self.connections():
            if link.is_overdue(now):
                self.probe(link)
        self.neighbours.on_timer(now)
        self.flow(now)
        for request in self.scheduler.outstanding.values():
            if now >= request.sent_at + ASK_AGAIN_S:
                self._ask_again(request, now)

    def deadlines(self) -> Iterator[float]:
        """Yield when :meth:`on_timer` or :meth:`end_late_calls` has something to do."""
        yield from (link.due_at(self._hello_at) for link in self.connections())
        if self.neighbours.is_active and (merged_at := self.neighbours.deadline()) is not None:
            yield merged_at
        for request in self.scheduler.outstanding.values():
            yield request.sent_at + ASK_AGAIN_S
        for pending in self.pending.values():
            yield self._lags_until(pending)
            if not pending.finished:
                yield pending.deadline - (0.0 if pending.probed else LAST_PROBE_S)

    def take_what_lags(self, now: float) -> None:
        """Let those calls go on that wait for pushes to arrive everywhere that may never do.

        So it is while a worker is lost. A worker that took another's place may wait for us, before it makes
        up for what did not get in everywhere.
        """
        for pending in list(self.pending.values()):
            if pending.ticket in self.pending and now >= self._lags_until(pending):
                self._drop(pending)
                self._advance(pending, [], now)

    def _lags_until(self, pending: PendingCall) -> float:
        """Return until when a call waits for parts that lag behind; for ever, if it need not end."""
        store = self._stores[pending.call.store]
        is_lagging = isinstance(pending.requests, LaggingReads) and bool(pending.waiting)
        if not is_lagging or store.ordered:
            return math.inf
        if self._losses.workers:
            return pending.since
        is_replaced = self._losses.was_replaced or store.is_resumed
        return pending.since + LAG_MAX_S if is_replaced else math.inf

    def end_late_calls(self, now: float) -> None:
        """End calls that are over their deadline, and ask once more after those that soon are."""
        for pending in list(self.pending.values()):
            if pending.finished:
                continue
            if now >= pending.deadline:
                link_of = self.neighbours.link_of
                late = timeout_error(self._member, pending.call, pending.waiting, link_of, now)
                self.end_early(pending, late, now)
            elif not pending.probed and now >= pending.deadline - LAST_PROBE_S:
                pending.probed = True
                self.ask_after(pending.waiting, now)

    def put_off(self, now: float) -> None:
        """Count the time of the calls that wait anew, but for those to which the user gave much
        less than the store's."""
        for pending in self.pending.values():
            if pending.limit_s >= OWN_LIMIT * self._stores[pending.call.store].timeout_s:
                pending.deadline, pending.probed = now + pending.limit_s, False

    def finish(
        self, pending: PendingCall, now: float, value: object = None, error: KvpsError | None = None
    ) -> None:
        """End a call for good."""
        del self.pending[pending.ticket]
        pending.operation.close()
        for request in pending.requests:
            if request.fill is not None:
                request.freeze()
        if pending.waiting:
            self._drop(pending)
        # A request knows its call, and through it the user's values: without this they would refer to each
        # other, and the values stay until the garbage collector comes by.
        pending.requests, pending.answers = [], {}
        store = self._stores[pending.call.store]
        if store.joins != store.joins_told:
            self._tell_joins(store)
        if self.kept is not None and error is None and isinstance(pending.call, RestoreCheckpoint):
            self.kept.void(store)
        if pending.on_end is not None:
            pending.on_end(value, error, now)
        elif not pending.finished:
            pending.finished = True
            self._outbox.append(_finish((pending.ticket, value, error)))
        elif error is not None:
            self._outbox.append(Note("warning", f"{pending.call.title} failed after its Timeout: {error}"))
        elif pending.call.on_timeout is OnTimeout.RESUME:
            self._late = [*self._late[-LATE_MAX + 1 :], (pending.call, value)]

    def forget(self, store: str, error: KvpsError, now: float) -> None:
        """End the calls in flight of a store that is closed. Its pushes have left, and count."""
        for pending in [entry for entry in self.pending.values() if entry.call.store == store]:
            if pending.finished:  # the caller was told by a Timeout
                pending.on_end = lambda value, error, now: None
            self.finish(pending, now, error=error)
        self._late = [late for late in self._late if late[0].store != store]
        self._unacked.pop(store, None)

    def _drop(self, pending: PendingCall) -> None:
        """Forget the unanswered requests of this step, except those that change values."""
        if pending in self._draining:
            self._draining.remove(pending)
        for request in pending.requests:
            if request in pending.waiting and not request.payload_bytes:
                request.drop()

    def end_early(self, pending: PendingCall, error: KvpsError, now: float) -> None:
        """End a call for its caller; what changes values goes on."""
        if pending.call.on_timeout is OnTimeout.RETRY:
            self.finish(pending, now, error=error)
            return
        bulk = [request for request in pending.requests if request.payload_bytes]
        for request in bulk:
            request.freeze()
        pending.values[:] = [] if bulk else [row.clone() for row in pending.values]
        pending.finished = True
        self._outbox.append(Finish(pending.ticket, error=error))

    def void(self, pending: PendingCall) -> int:
        """Forget a call whose requests do not matter any more; return its ticket."""
        ticket = pending.ticket
        del self.pending[ticket]
        pending.operation.close()
        pending.ticket = NO_TICKET
        return ticket

    def abandon(self) -> list[PendingCall]:
        """Forget all calls and their requests, here and at neighbours; return the calls."""
        abandoned = list(self.pending.values())
        for pending in abandoned:
            pending.operation.close()
        self.neighbours.begin_epoch()
        self.scheduler.abandon()
        if self.kept is not None:
            self.kept.clear()
        for table in (self.pending, self._unacked, self._draining, self._late):
            table.clear()
        return abandoned

    def check(self) -> None:
        """Assert the invariants."""
        self.neighbours.check()
        for pending in self._draining:
            assert pending.waiting, f"{pending.call.title} drains, and waits for nothing"
            assert not pending.requests, f"{pending.call.title} drains, and has gone on"
