"""Calls in flight on a worker: how their operations advance, and how they end.

Theory of operation
-------------------
Each call runs as a conversation (:mod:`kvps.core.worker.calls.base`): a generator that yields what it asks for
and is sent the answers. Its requests go to the links, the neighbours or the scheduler. When all of a step's
answers are in, the conversation goes on; when it returns, the call is finished.

A call has a deadline. When it passes, the call finishes with :class:`~kvps.errors.Timeout`, which
names what the servers said they wait for. What the caller gave is copied then, and what he wanted
is not written any more. A conversation that changes something goes on, so that a push is still
applied once; one that only reads is given up.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from kvps.core.effects import Copied, Effects, Finish, Note, Send
from kvps.core.membership_client import SCHEDULER, Identity, MembershipClient
from kvps.core.placement import JUDGE
from kvps.core.worker.calls import Call, OnTimeout, RejoinStore
from kvps.core.worker.calls.base import Operation
from kvps.core.worker.connection import Connection, Request, SendScheduler
from kvps.core.worker.consistent_read import AwaitAcks, LaggingReads
from kvps.core.worker.failure_policy import FailurePolicy
from kvps.core.worker.host_aggregation.host_group import HostGroup
from kvps.core.worker.host_aggregation.merge_queue import MergedRequest
from kvps.core.worker.store import WorkerStore
from kvps.core.worker.timeout_report import timeout_error
from kvps.errors import KvpsError
from kvps.protocol.envelope import Packet
from kvps.protocol.membership import Join, Probe, Return
from kvps.protocol.values import Push, PushIds, PushRows
from kvps.tensors import Memory

LAG_MAX_S = 10.0
"""How long parts that lag behind are waited for, once a worker was replaced where there are no rounds."""
LATE_MAX = 64
"""How many calls that succeeded after their Timeout are kept for those who ask again."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """One call under way."""

    ticket: int
    call: Call
    conversation: Operation
    rows: list[torch.Tensor]
    """The caller's values, until they are read; copies, once the caller stopped waiting."""
    deadline: float
    probed: bool = False
    has_pushed: bool = False
    """Its pushes, if it makes any, are numbered and under way."""
    since: float = 0.0
    """When this step began."""
    is_asking: bool = False
    """Not all of this step's requests are made yet; some may be answered already."""
    finished: bool = False
    """The caller has the result; what is still under way is nobody's business."""
    requests: list[Request] = field(default_factory=list)
    """Of this step; empty while it drains."""
    answers: dict[Request, Packet] = field(default_factory=dict)
    waiting: dict[Request, None] = field(default_factory=dict)
    """What this step waits for: its own requests, or all pushes of the store. In their order, which a
    set of objects would draw anew in every process."""


class CallTable(abc.ABC):
    """The calls of a worker, and what they are about: its links, its neighbours, its stores."""

    def __init__(self, identity: Identity, now: float, memory: Memory) -> None:
        self.member = MembershipClient(identity, now)
        self.stores: dict[str, WorkerStore] = {}
        self._uplink = SendScheduler()
        self.links = self._uplink.links
        """To every server, once the cluster is complete."""
        self.neighbours = HostGroup(self.member, memory, self.links, self)
        self.losses = FailurePolicy()
        self._talks: dict[int, PendingCall] = {}
        self._late: list[tuple[Call, object]] = []
        """Calls of all ranks that succeeded after their Timeout, and with what."""
        self._unacked: dict[str, dict[Request, None]] = {}
        """Pushes that are not known to have been taken in, by store."""
        self._draining: list[PendingCall] = []
        self._asked: dict[int, Request] = {}
        """Of the scheduler, by seq."""
        self._asked_seq = 0

    @abc.abstractmethod
    def _flow(self, now: float) -> Effects:
        """Send what there is room for."""

    @abc.abstractmethod
    def _rejoined(self, name: str, value: object, error: KvpsError | None, now: float) -> Effects:
        """A call of this core's own is over: a store's way into another epoch."""

    def _links(self) -> Iterator[Connection]:
        """Yield the links to all servers and neighbours."""
        return chain(self.links, self.neighbours.links.values())

    def probe(self, link: Connection) -> Effects:
        """Ask a peer after all that it has not answered."""
        for seqs in link.unanswered():
            yield Send(link.route, self.member.packet(Probe(seqs)))

    def _ask_scheduler(self, request: Request, now: float) -> Effects:
        """Send a request to the scheduler, perhaps not for the first time."""
        request.sent_at = now
        yield Send(SCHEDULER, self.member.packet(request.message, request.seq))

    # --- conversations ----------------------------------------------------------------------------

    def _go_on(
        self, talk: PendingCall, answers: list[Packet] | KvpsError | None, now: float
    ) -> Effects:
        """Let a conversation go on until it waits for an answer, or ends."""
        while True:
            try:
                if isinstance(answers, KvpsError):
                    step = talk.conversation.throw(answers)
                else:
                    step = talk.conversation.send(answers)  # type: ignore[arg-type]  # None begins it
            except StopIteration as end:
                yield from self._finish(talk, now, value=end.value)
                return
            except KvpsError as error:
                yield from self._finish(talk, now, error=error)
                return
            talk.answers = {}
            if isinstance(step, AwaitAcks):
                talk.requests = []
                talk.waiting = dict(self._unacked.get(talk.call.store, {}))
                if talk.waiting:  # else it goes on at once, and waits for its own next
                    self._draining.append(talk)
                yield from self._ask_after(talk.waiting, now)
            else:
                talk.requests, talk.since = step, now
                talk.waiting = dict.fromkeys(step)
                yield from self._ask(talk, now)
            if talk.waiting:
                return
            answers = [talk.answers[one] for one in talk.requests]

    def _ask(self, talk: PendingCall, now: float) -> Effects:
        unacked = self._unacked.setdefault(talk.call.store, {})
        talk.is_asking = True
        for request in talk.requests:
            request.owner = talk
            if request.server is None:
                self._asked_seq += 1
                request.seq = self._asked_seq
                self._asked[request.seq] = request
                yield from self._ask_scheduler(request, now)
                continue
            if isinstance(request.message, Push | PushRows | PushIds):
                unacked[request] = None
                talk.has_pushed = True
            if isinstance(request.message, Join | Return) and request.server == JUDGE:
                yield from self.neighbours.tell(request.message)
            if self.neighbours.collect(self.stores[talk.call.store], request):
                yield from self.neighbours.ask(request, now)
            else:
                self.links[request.server].queue(request)
        talk.is_asking = False
        if self._is_copied(talk):
            yield Copied(talk.ticket)
        yield from self._flow(now)

    def _is_copied(self, talk: PendingCall) -> bool:
        """Whether the caller may go on now that the requests of this step are under way."""
        if not talk.call.returns_early(self.stores[talk.call.store]):
            return False
        return all(one.payload_bytes for one in talk.requests)  # else this step does not push

    def _ask_after(self, requests: Iterable[Request], now: float) -> Effects:
        """Ask those who were asked how it goes; they may not have said all that they know."""
        waited_for = list(requests)
        for request in waited_for:
            if request.server is None:
                yield from self._ask_scheduler(request, now)
        for link in self._links():
            if any(one.link is link and one.seq for one in waited_for):
                yield from self.probe(link)
        yield from self.neighbours.ask_after(waited_for, now)

    def answered(self, request: Request, packet: Packet, now: float) -> Effects:
        """All is well with ``request``; its conversation goes on if it was the last."""
        if isinstance(request.owner, MergedRequest):
            yield from self.neighbours.answered(request.owner, packet, now)
            return
        yield from self.taken_in(request, now)
        talk = _talk_of(request)
        if request.on_reply is not None:
            request.on_reply(packet, not talk.finished)
            # Its values are where they belong. The memory in which they came may be another's, and
            # is given back when nothing refers to it: a request and its call refer to each other.
            request.on_reply = None
            packet = replace(packet, payload=())
        talk.answers[request] = packet
        talk.waiting.pop(request, None)
        if not talk.waiting and not talk.is_asking and talk.ticket in self._talks:
            yield from self._go_on(talk, [talk.answers[one] for one in talk.requests], now)

    def refused(self, request: Request, error: KvpsError, now: float) -> Effects:
        """The peer refused ``request``, and so its call."""
        if isinstance(request.owner, MergedRequest):
            yield from self.neighbours.refused(request.owner, error, now)
            return
        yield from self.taken_in(request, now)
        talk = _talk_of(request)
        talk.waiting.pop(request, None)
        if talk.ticket in self._talks:
            yield from self._go_on(talk, error, now)

    def taken_in(self, request: Request, now: float) -> Effects:
        """The server needs ``request`` no more: those who wait for that go on."""
        if isinstance(request.owner, MergedRequest):
            yield from self.neighbours.taken_in(request.owner, now)
            return
        if not isinstance(request.message, Push | PushRows | PushIds):
            return
        self._unacked[_talk_of(request).call.store].pop(request, None)
        for talk in [one for one in self._draining if request in one.waiting]:
            talk.waiting.pop(request, None)
            if not talk.waiting:
                self._draining.remove(talk)
                yield from self._go_on(talk, [], now)

    def _take_what_lags(self, now: float) -> Effects:
        """Let those go on who wait for pushes to arrive everywhere that may never do.

        So it is while a worker is lost. One that took another's place may wait for us, before it makes
        up for what did not get in everywhere.
        """
        for talk in list(self._talks.values()):
            if talk.ticket in self._talks and now >= self._lags_until(talk):
                self._drop(talk)
                yield from self._go_on(talk, [], now)

    def _lags_until(self, talk: PendingCall) -> float:
        """Return until when ``talk`` waits for parts that lag behind; for ever, if it need not end."""
        if not isinstance(talk.requests, LaggingReads) or not talk.waiting:
            return math.inf
        store = self.stores[talk.call.store]
        if store.ordered:
            return math.inf
        if self.losses.workers:
            return talk.since
        return talk.since + LAG_MAX_S if self.losses.was_replaced or store.is_resumed else math.inf

    # --- the end of a call ------------------------------------------------------------------------

    def _finish(
        self, talk: PendingCall, now: float, value: object = None, error: KvpsError | None = None
    ) -> Effects:
        """End a call for good."""
        del self._talks[talk.ticket]
        talk.conversation.close()
        for request in talk.requests:
            request.freeze()
        self._drop(talk)
        # A request knows its call, and through it the user's values: without this they would refer to each
        # other, and the values stay until the garbage collector comes by.
        talk.requests, talk.answers = [], {}
        if isinstance(talk.call, RejoinStore):
            yield from self._rejoined(talk.call.store, value, error, now)
        elif not talk.finished:
            talk.finished = True
            yield Finish(talk.ticket, value, error)
        elif error is not None:
            yield Note("warning", f"{talk.call.title} failed after its Timeout: {error}")
        elif talk.call.on_timeout is OnTimeout.RESUME:
            self._late = [*self._late[-LATE_MAX + 1 :], (talk.call, value)]

    def _drop(self, talk: PendingCall) -> None:
        """Forget what was asked for this step and has no answer, unless it changes values."""
        if talk in self._draining:
            self._draining.remove(talk)
        for request in talk.requests:
            if request not in talk.waiting:
                continue
            if request.server is None:
                self._asked.pop(request.seq, None)
            elif not request.payload_bytes:
                request.drop()

    def _again(self, ticket: int, call: Call, deadline: float) -> Iterator[Finish]:
        """Give the same call, if it timed out before, to a new ticket."""
        for late in self._late:
            if late[0] == call:
                self._late.remove(late)
                yield Finish(ticket, late[1])
                return
        talk = next(one for one in self._talks.values() if one.finished and one.call == call)
        del self._talks[talk.ticket]
        talk.ticket, talk.deadline = ticket, deadline
        talk.finished = talk.probed = False
        self._talks[ticket] = talk

    def _time_out(self, talk: PendingCall, now: float) -> Effects:
        error = timeout_error(self.member, talk.call, talk.waiting, self.neighbours.link_of, now)
        if talk.call.on_timeout is OnTimeout.RETRY:
            yield from self._finish(talk, now, error=error)
            return
        bulk = [request for request in talk.requests if request.payload_bytes]
        for request in bulk:
            request.freeze()
        talk.rows[:] = [] if bulk else [row.clone() for row in talk.rows]
        talk.finished = True
        yield Finish(talk.ticket, error=error)

    def check(self) -> None:
        """Assert the invariants."""
        for talk in self._draining:
            assert talk.waiting, f"{talk.call.title} drains, and waits for nothing"
            assert not talk.requests, f"{talk.call.title} drains, and has gone on"


def _talk_of(request: Request) -> PendingCall:
    assert isinstance(request.owner, PendingCall), "what is not a bundle's is a call's"
    return request.owner
