"""The rules of a worker: from a user's call to requests, and from answers to its end.

Theory of operation
-------------------
Each call runs as a conversation (:mod:`kvps.core.conversations`). The requests that it yields are
queued on the links to the servers, sent as the windows allow, and probed for when an answer is
late. When all of a step's answers are in, the conversation goes on; when it returns, the call is
finished.

A call has a deadline. When it passes, the call finishes with :class:`~kvps.errors.Timeout`, which
names what the servers said they wait for; the conversation itself goes on, so that a push is
still applied once, but nothing is written into the caller's memory any more.

A lost server ends every call that needs it. A lost worker ends the calls of synchronous stores
according to their ``on_worker_lost``: at once (``fail``), when its grace is over or no
replacement can come (``wait``), or not at all (``shrink``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvps.core import calls
from kvps.core.conversations import Catalogue, Conversation, Drain, start
from kvps.core.effects import (
    Connect,
    Copied,
    Effects,
    Exit,
    Finish,
    Note,
    Route,
    Send,
)
from kvps.core.link import Link, Request
from kvps.core.member import SCHEDULER, Identity, Membership
from kvps.errors import (
    ConfigError,
    Fenced,
    KvpsError,
    SchedulerLost,
    ServerLost,
    Timeout,
    WorkerLost,
    from_code,
)
from kvps.messages import (
    Ack,
    Declared,
    Done,
    Error,
    FoundAll,
    Member,
    Packet,
    Probe,
    Probed,
    Pulled,
    Push,
    Released,
    Role,
    StateIs,
    StatusIs,
    Welcome,
)
from kvps.tensors import to_frame

HELLO_AGAIN_S = 1.0
BARRIER_AGAIN_S = 2.0
LAST_PROBE_S = 0.25
"""How long before a deadline the servers are asked once more what they wait for."""


@dataclass(slots=True, eq=False)
class Talk:
    """One call under way."""

    ticket: int
    call: calls.Call
    conversation: Conversation
    deadline: float
    probed: bool = False
    finished: bool = False
    """The user has the result; what is still under way is nobody's business."""
    waiting: set[int] = field(default_factory=set)
    """Ids of the requests of this step that have no answer yet."""
    requests: list[Request] = field(default_factory=list)
    answers: dict[int, Packet] = field(default_factory=dict)
    unfilled: int = 0


class Worker:
    """One worker process's part in one job."""

    def __init__(self, identity: Identity, now: float) -> None:
        self.member = Membership(identity, now)
        self.books: dict[str, Catalogue] = {}
        self.links: list[Link] = []
        self._talks: dict[int, Talk] = {}
        self._unacked: dict[str, set[Request]] = {}
        self._barriers: dict[int, Request] = {}
        self._barrier_seq = 0
        self._hello_at = now
        self._joining: dict[int, float] = {}
        self._lost_since: dict[int, float] = {}

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
        error = self.member.error or self._broken(call.store)
        if error is not None:
            yield Finish(ticket, error=error)
            return
        if isinstance(call, calls.OpenStore):
            self.books[call.store] = Catalogue(
                call.opened, self.member.rank, len(self.links), call.worker_grace_s
            )
        talk = Talk(ticket, call, start(self.books[call.store], call), deadline)
        self._talks[ticket] = talk
        yield from self._resume(talk, None, now)

    def leave(self, done: bool, exit_code: int, reason: str) -> Effects:
        """The process ends: say so."""
        yield from self.member.leave(done, exit_code, replaceable=True, reason=reason)

    def on_packet(self, route: Route, packet: Packet, now: float) -> Effects:
        """The scheduler or a server said something."""
        if route == SCHEDULER:
            yield from self._on_scheduler(packet, now)
        elif packet.envelope.role is Role.SERVER and packet.envelope.rank < len(self.links):
            link = self.links[packet.envelope.rank]
            link.heard_at = now
            yield from self._on_server(link, packet, now)
            yield from self._flow(link, now)

    def on_drop(self, route: Route, now: float) -> Effects:
        """A connection broke; the probes find out what was lost with it."""
        yield from ()

    def on_timer(self, now: float) -> Effects:
        """Beat, probe, say HELLO again, and end what is over its deadline."""
        yield from self.member.on_timer(now)
        if self.member.running and now >= self._hello_at:
            self._hello_at = now + HELLO_AGAIN_S
            for link in self.links:
                if not link.ready:
                    yield Send(_route(link), self.member.hello())
        for link in self.links:
            seqs = link.overdue(now)
            if seqs:
                yield Send(_route(link), self.member.packet(Probe(seqs)))
        for request in list(self._barriers.values()):
            if request.sent_at is None or now >= request.sent_at + BARRIER_AGAIN_S:
                yield from self._send_barrier(request, now)
        yield from self._end_joining(now)
        yield from self._end_what_is_late(now)
        yield from self._end_what_is_lost(now)

    def deadline(self) -> float | None:
        """When something is due next."""
        return min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        beat = self.member.deadline()
        if beat is not None:
            yield beat
        yield from self._joining.values()
        for link in self.links:
            probe = link.probe_at()
            if probe is not None:
                yield probe
        for talk in self._talks.values():
            if not talk.finished:
                yield talk.deadline - (0.0 if talk.probed else LAST_PROBE_S)

    # --- the scheduler --------------------------------------------------------------------------

    def _on_scheduler(self, packet: Packet, now: float) -> Effects:
        message = packet.message
        if isinstance(message, Released):
            request = self._barriers.pop(message.seq, None)
            if request is not None:
                yield from self._answered(request, packet, now)
            return
        if isinstance(message, Error) and message.seq in self._barriers:
            request = self._barriers.pop(message.seq)
            yield from self._failed(request, from_code(message.code, message.text), now)
            return
        before = self.member.number
        yield from self.member.on_packet(packet, now)
        if self.member.left:
            yield Exit(0, "left")
            return
        if self.member.stopped is not None:
            yield from self._end_all(
                SchedulerLost(f"the job is over: {self.member.stopped.reason}")
            )
            yield Exit(self.member.stopped.exit_code, self.member.stopped.reason)
        elif self.member.error is not None:
            yield from self._end_all(self.member.error)
        elif self.member.number != before:
            yield from self._on_view(now)
        yield from self._end_joining(now)

    def _on_view(self, now: float) -> Effects:
        view, welcome = self.member.view, self.member.welcome
        assert view is not None
        assert welcome is not None
        if not self.links and view.phase == "running":
            self.links = [Link(server) for server in range(welcome.servers)]
            self._hello_at = now + HELLO_AGAIN_S
            for one in view.members:
                if one.role == Role.SERVER and one.state == "held":
                    link = self.links[one.rank]
                    yield Connect(f"server {one.rank}", one.endpoint)
                    yield Send(_route(link), self.member.hello())
        for one in view.members:
            if one.role != Role.WORKER:
                continue
            if one.state in ("lost", "gone"):
                since = now - one.lost_for_s
                self._lost_since[one.rank] = min(self._lost_since.get(one.rank, since), since)
            else:
                self._lost_since.pop(one.rank, None)
        yield from self._end_what_is_lost(now)

    # --- servers --------------------------------------------------------------------------------

    def _on_server(self, link: Link, packet: Packet, now: float) -> Effects:
        message = packet.message
        match message:
            case Welcome():
                link.ready = True
            case Ack():
                for receipt in message.receipts:
                    request = link.receive(receipt.seq)
                    if request is None:
                        continue
                    if isinstance(request.message, Push):
                        self._unacked.get(request.store, set()).discard(request)
                        yield from self._drained(request.store, now)
                    if not (isinstance(request.message, Push) and request.message.pull):
                        link.answer(receipt.seq)
                        yield from self._answered(request, packet, now)
            case Declared() | FoundAll() | Pulled() | Done() | StateIs() | StatusIs():
                request = link.answer(message.seq)
                if request is not None:
                    if isinstance(request.message, Push):
                        self._unacked.get(request.store, set()).discard(request)
                        yield from self._drained(request.store, now)
                    yield from self._answered(request, packet, now)
            case Probed():
                for one in message.pending:
                    request = link.receive(one.seq)
                    if request is not None:
                        request.waits_for = one.reason
                for seq in message.missing:
                    request = link.outstanding.get(seq)
                    if request is not None:
                        yield self._packet(link, request)
            case Error():
                yield from self._on_error(link, message, now)
            case _:
                yield Note("debug", f"unexpected {type(message).__name__} from {_route(link)!r}")

    def _on_error(self, link: Link, message: Error, now: float) -> Effects:
        error = from_code(message.code, message.text)
        request = link.answer(message.seq)
        if isinstance(error, Fenced):
            self.member.error = error
            yield from self._end_all(error)
        elif request is not None:
            if request.on_refused is not None:
                request.on_refused()
            self._unacked.get(request.store, set()).discard(request)
            yield from self._failed(request, error, now)
            yield from self._drained(request.store, now)
        elif link.ready or not isinstance(error, ConfigError):
            yield Note("warning", str(error))

    def _flow(self, link: Link, now: float) -> Effects:
        """Send what the link has room for."""
        for request in link.due(now):
            yield self._packet(link, request)

    def _packet(self, link: Link, request: Request) -> Send:
        frames = tuple(to_frame(one) for one in request.payload)
        return Send(
            _route(link), Packet(self.member.envelope(request.seq), request.message, frames)
        )

    def _send_barrier(self, request: Request, now: float) -> Effects:
        request.sent_at = now
        yield Send(SCHEDULER, self.member.packet(request.message, request.seq))

    # --- conversations ----------------------------------------------------------------------------

    def _resume(self, talk: Talk, answers: list[Packet] | None, now: float) -> Effects:
        """Let a conversation go on until it waits for an answer, or ends."""
        while True:
            try:
                step = (
                    next(talk.conversation) if answers is None else talk.conversation.send(answers)
                )
            except StopIteration as end:
                yield from self._finish(talk, value=end.value)
                return
            except KvpsError as error:
                yield from self._finish(talk, error=error)
                return
            talk.answers = {}
            if isinstance(step, Drain):
                talk.requests = []
                talk.waiting = {id(one) for one in self._unacked.get(talk.call.store, ())}
            else:
                talk.requests = step
                talk.waiting = {id(one) for one in step}
                yield from self._ask(talk, step, now)
            if talk.waiting or talk.ticket not in self._talks:
                return
            answers = []

    def _ask(self, talk: Talk, requests: list[Request], now: float) -> Effects:
        links: dict[int, Link] = {}
        talk.unfilled = sum(one.fill is not None for one in requests)
        for request in requests:
            request.store = request.store or talk.call.store
            request.talk = talk
            if isinstance(request.message, Push):
                self._unacked.setdefault(request.store, set()).add(request)
            if request.server is None:
                self._barrier_seq += 1
                request.seq = self._barrier_seq
                self._barriers[request.seq] = request
                yield from self._send_barrier(request, now)
            else:
                link = self.links[request.server]
                link.queue(request)
                links[request.server] = link
        if _is_copied(talk.call, requests):
            yield Copied(talk.ticket)
        for link in links.values():
            yield from self._flow(link, now)

    def _answered(self, request: Request, packet: Packet, now: float) -> Effects:
        """All is well with ``request``; its conversation goes on if it was the last."""
        talk = request.talk
        if talk is None:
            return
        if request.on_reply is not None and not talk.finished:
            request.on_reply(packet)
        talk.answers[id(request)] = packet
        talk.waiting.discard(id(request))
        if not talk.waiting and talk.ticket in self._talks:
            answers = [talk.answers[id(one)] for one in talk.requests]
            yield from self._resume(talk, answers, now)

    def _drained(self, store: str, now: float) -> Effects:
        """A push of ``store`` was acknowledged: those who wait for that may go on."""
        left = {id(one) for one in self._unacked.get(store, ())}
        for talk in list(self._talks.values()):
            if talk.waiting and not talk.requests and talk.call.store == store:
                talk.waiting &= left
                if not talk.waiting:
                    yield from self._resume(talk, [], now)

    def _failed(self, request: Request, error: KvpsError, now: float) -> Effects:
        if request.talk is not None:
            yield from self._finish(request.talk, error=error)

    def _finish(self, talk: Talk, value: object = None, error: KvpsError | None = None) -> Effects:
        """End a call for good."""
        self._talks.pop(talk.ticket, None)
        talk.conversation.close()
        if not talk.finished:
            talk.finished = True
            for request in talk.requests:
                request.freeze()
            yield Finish(talk.ticket, value, error)

    def _end_joining(self, now: float) -> Effects:
        """Tell those who wait for the cluster what has become of it."""
        for ticket, deadline in list(self._joining.items()):
            error = self.member.error or self._broken("")
            view = self.member.view
            if error is None and view is not None and view.phase == "ending":
                error = WorkerLost(f"the job cannot begin: {view.reason}")
            if error is None and self.member.stopped is not None:
                error = SchedulerLost(f"the job is over: {self.member.stopped.reason}")
            if error is None and not self.links and now >= deadline:
                error = Timeout(
                    f"the cluster is not complete: {self.member.reason}. Start what is missing, "
                    "or start fewer with kvps-scheduler --workers and --servers"
                )
            if error is not None or self.links:
                del self._joining[ticket]
                yield Finish(ticket, error=error)

    # --- what ends calls before their time ----------------------------------------------------------

    def _end_what_is_late(self, now: float) -> Effects:
        for talk in list(self._talks.values()):
            if talk.finished:
                continue
            if now >= talk.deadline:
                talk.finished = True
                for request in talk.requests:
                    request.freeze()
                yield Finish(talk.ticket, error=self._timeout(talk, now))
            elif not talk.probed and now >= talk.deadline - LAST_PROBE_S:
                talk.probed = True
                servers = {one.server for one in talk.requests if id(one) in talk.waiting}
                for link in self.links:
                    if link.server in servers and link.outstanding:
                        yield Send(_route(link), self.member.packet(Probe(link.to_probe())))

    def _timeout(self, talk: Talk, now: float) -> KvpsError:
        late = [one for one in talk.requests if id(one) in talk.waiting]
        silent = self.member.silent_for(now)
        if any(one.server is None for one in late):
            if silent > self.member.identity.silence_max_s:
                return SchedulerLost(
                    f"worker {self.member.rank}: no word from the scheduler at "
                    f"{self.member.identity.scheduler} for {silent:.0f} s. Pushes and pulls go on "
                    "without it; barriers and joins wait. Start it again at the same address"
                )
            return Timeout(
                f"worker {self.member.rank}: barrier: {self.member.reason or 'others are late'}. "
                "Nothing was cancelled; wait again, or look at the others"
            )
        why = sorted({one.waits_for or self._silence(one) for one in late})
        return Timeout(
            f"worker {self.member.rank}: {_name(talk.call)} of store {talk.call.store!r} is not "
            f"done: {'; '.join(why[:3]) or 'earlier pushes are not acknowledged'}. Nothing was "
            "cancelled: what was pushed is applied at most once. Wait again, or give timeout= more"
        )

    def _silence(self, request: Request) -> str:
        assert request.server is not None
        if not self.links[request.server].ready:
            return f"server {request.server} has not answered HELLO"
        return f"server {request.server} has not answered"

    def _end_what_is_lost(self, now: float) -> Effects:
        for talk in list(self._talks.values()):
            error = self._broken(talk.call.store, now)
            if error is not None:
                yield from self._finish(talk, error=error)

    def _end_all(self, error: KvpsError) -> Effects:
        for talk in list(self._talks.values()):
            yield from self._finish(talk, error=error)

    def _broken(self, store: str, now: float | None = None) -> KvpsError | None:
        """Return why calls of ``store`` cannot succeed, if they cannot."""
        view = self.member.view
        if view is None:
            return None
        for one in view.members:
            if one.role == Role.SERVER and one.state not in ("held", "empty"):
                return ServerLost(
                    f"server {one.rank} ({one.host} {one.endpoint}) is lost: {one.reason}. Its "
                    "part of every key went with it. Start the job again from saved weights"
                )
        book = self.books.get(store)
        if book is None or not book.ordered or book.opened.on_worker_lost == "shrink":
            return None
        for one in view.members:
            if one.role == Role.WORKER and one.state in ("lost", "gone"):
                return self._worker_lost(book, one, now)
        return None

    def _worker_lost(self, book: Catalogue, one: Member, now: float | None) -> KvpsError | None:
        waited_s = (now if now is not None else self.member.heard_at) - self._lost_since.get(
            one.rank, self.member.heard_at
        )
        grace_s = book.worker_grace_s if book.opened.on_worker_lost == "wait" else 0.0
        if one.state == "lost" and waited_s < grace_s:
            return None
        return WorkerLost(
            f"worker {one.rank} ({one.host}) is lost: {one.reason}. Rounds of store "
            f"{book.opened.store!r} wait for it and no replacement came in {waited_s:.0f} s. What "
            "was pushed is kept. Start a replacement with --rank "
            f"{one.rank}, or create the store with on_worker_lost='shrink' to go on without it"
        )


def _route(link: Link) -> str:
    return f"server {link.server}"


def _name(call: calls.Call) -> str:
    names = {calls.PushValues: "push", calls.PullValues: "pull", calls.Stand: "barrier"}
    return names.get(type(call), type(call).__name__)


def _is_copied(call: calls.Call, step: list[Request]) -> bool:
    """Whether ``step`` holds the copied values of a push whose caller waits for just that."""
    return (
        isinstance(call, calls.PushValues)
        and call.eager
        and any(isinstance(one.message, Push) for one in step)
    )
