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
"""

from __future__ import annotations

from kvps.core.effects import Connect, Effects, Exit, Note, Route, Send
from kvps.core.engine import Engine
from kvps.core.member import SCHEDULER, Identity, Membership
from kvps.core.requests import Requests, Session
from kvps.errors import ConfigError, Fenced, KvpsError, Mismatch, ProtocolError
from kvps.messages import (
    PROTOCOL,
    Envelope,
    Error,
    Hello,
    Message,
    Norms,
    Packet,
    Role,
    Welcome,
)

TELL_NORMS_EVERY_S = 1.0


class Server:
    """One server process's part in one job after another."""

    def __init__(self, identity: Identity, now: float, memory_limit: int | None = None) -> None:
        self.member = Membership(identity, now)
        self.requests = Requests(self.member, Engine(0, 1), memory_limit)
        self.sessions: dict[int, Session] = {}
        self._memory_limit = memory_limit
        self._greeted: set[Route] = set()
        self._peers: set[int] = set()
        self._next_tell = now

    # --- the doors ----------------------------------------------------------------------------

    def start(self, now: float) -> Effects:
        """Join the cluster."""
        yield from self.member.start(now)

    def on_packet(self, route: Route, packet: Packet, now: float) -> Effects:
        """A worker, another server or the scheduler said something."""
        if route == SCHEDULER:
            yield from self._on_scheduler(packet, now)
            return
        try:
            yield from self._on_peer(route, packet, now)
        except KvpsError as error:
            yield self._reply(route, Error(packet.envelope.seq, error.code, str(error)))

    def on_drop(self, route: Route, now: float) -> Effects:
        """A connection broke: only the scheduler judges what that means."""
        self._greeted.discard(route)
        yield from ()

    def on_timer(self, now: float) -> Effects:
        """Beat, and tell norms again that others may have missed."""
        yield from self.member.on_timer(now)
        if now >= self._next_tell:
            self._next_tell = now + TELL_NORMS_EVERY_S
            yield from self.requests.tell_again()
        silence = self.member.identity.silence_max_s
        if self.member.welcome and self.member.silent_for(now) > 5 * silence:
            yield Exit(75, f"the scheduler has been silent for {5 * silence:.0f} s")

    def deadline(self) -> float | None:
        """When the next beat or telling is due."""
        beat = self.member.deadline()
        return None if beat is None else min(beat, self._next_tell)

    # --- the scheduler --------------------------------------------------------------------------

    def _on_scheduler(self, packet: Packet, now: float) -> Effects:
        before, job = self.member.number, self.member.job
        yield from self.member.on_packet(packet, now)
        if packet.message is self.member.welcome:
            self._begin()
        if self.member.stopped is not None:
            yield Exit(self.member.stopped.exit_code, self.member.stopped.reason)
            return
        if any(job) and self.member.job != job:
            self._begin()
            yield Note("info", "the next job begins; the stores of the last one are dropped")
        if self.member.number != before:
            yield from self._on_view()

    def _begin(self) -> None:
        """Hold nothing of any job."""
        assert self.member.welcome is not None
        engine = Engine(self.member.rank, self.member.welcome.servers)
        self.requests = Requests(self.member, engine, self._memory_limit)
        self.sessions.clear()

    def _on_view(self) -> Effects:
        """Connect to the other servers, and look again at all that waits."""
        view = self.member.view
        assert view is not None
        for one in view.members:
            other = one.role == Role.SERVER and one.rank != self.member.rank
            if other and one.state == "held" and one.rank not in self._peers:
                self._peers.add(one.rank)
                yield Connect(f"server {one.rank}", one.endpoint)
                yield Send(f"server {one.rank}", self.member.hello())
        yield from self.requests.look_again(self.sessions.values())

    # --- peers ----------------------------------------------------------------------------------

    def _on_peer(self, route: Route, packet: Packet, now: float) -> Effects:
        envelope, message = packet.envelope, packet.message
        if isinstance(message, Hello):
            yield from self._hello(route, envelope, message)
            return
        self._identify(route, envelope)
        if envelope.role is Role.SERVER:
            if isinstance(message, Norms):
                yield from self.requests.norms(message, envelope.rank)
                return
            if isinstance(message, Welcome | Error):
                return  # of another server, to the HELLO that came with our NORMS connection
        if envelope.role is not Role.WORKER:
            raise ProtocolError(f"a {envelope.role} sent {type(message).__name__} to a server")
        yield from self.requests.answer(self._session(route, envelope), packet, now)

    def _hello(self, route: Route, envelope: Envelope, message: Hello) -> Effects:
        if message.major != PROTOCOL[0]:
            raise ProtocolError(
                f"protocol {message.major}.{message.minor} (kvps {message.software}) cannot talk "
                f"to {PROTOCOL[0]}.{PROTOCOL[1]} at {self._me}; install one version everywhere"
            )
        welcome = self.member.welcome
        if welcome is None:
            raise ConfigError(f"{self._me} is not a member of a job yet; ask again")
        self._greeted.add(route)
        try:
            self._identify(route, envelope)
        except KvpsError:
            self._greeted.discard(route)
            raise
        if envelope.role is Role.WORKER:
            self._session(route, envelope)
        yield self._reply(
            route,
            Welcome(
                envelope.rank,
                envelope.incarnation,
                welcome.workers,
                welcome.servers,
            ),
        )

    def _identify(self, route: Route, envelope: Envelope) -> None:
        """Check that ``envelope`` names a member of this job.

        Raises:
            Mismatch, ProtocolError: if it does not.
        """
        if envelope.job != self.member.job:
            raise Mismatch(
                f"{self._me} serves job {self.member.job.hex()[:8]}, not "
                f"{envelope.job.hex()[:8]}; another cluster listens here"
            )
        known = self.sessions.get(envelope.rank) if envelope.role is Role.WORKER else None
        rebound = known is not None and known.incarnation == envelope.incarnation
        if route not in self._greeted and not rebound:
            raise ProtocolError(f"{self._me} expects HELLO first on every connection")
        welcome = self.member.welcome
        assert welcome is not None
        limit = welcome.workers if envelope.role is Role.WORKER else welcome.servers
        if envelope.rank >= limit:
            raise ProtocolError(f"there is no {envelope.role} {envelope.rank} in this job")

    def _session(self, route: Route, envelope: Envelope) -> Session:
        """Return the session of a worker; a newer incarnation begins a new one.

        Raises:
            Fenced: for an older incarnation.
        """
        session = session_before = self.sessions.get(envelope.rank)
        if session is None or envelope.incarnation > session.incarnation:
            session = Session(envelope.rank, route, envelope.incarnation)
            self.sessions[envelope.rank] = session
            if session_before is not None:
                session_before.live = False
        elif envelope.incarnation < session.incarnation:
            raise Fenced(
                f"worker {envelope.rank} incarnation {envelope.incarnation} was replaced by "
                f"incarnation {session.incarnation}; {self._me} takes nothing more from it. "
                "This process must stop"
            )
        session.route = route
        return session

    @property
    def _me(self) -> str:
        return f"server {self.member.rank}"

    def _reply(self, route: Route, message: Message) -> Send:
        return Send(route, self.member.packet(message))

    def check(self) -> None:
        """Assert the invariants of all that is held."""
        self.requests.engine.check()
