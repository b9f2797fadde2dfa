"""The context of a request on a server: its store, its session, and what every answer needs.

A request that waits for something to exist is a :class:`~kvps.core.server.sessions.PendingRequest`, pending in its
session: it is tried again whenever something came into being.
"""

from __future__ import annotations

from kvps.core.effects import Effects, Send
from kvps.core.liveness import quiet_in_words
from kvps.core.membership_client import MembershipClient
from kvps.core.quorum import Quorum
from kvps.core.server.sessions import Describe, PendingRequest, Session
from kvps.core.server.store import ServerStore
from kvps.core.server.update.aggregator import Aggregator
from kvps.errors import (
    KvpsError,
    ProtocolError,
)
from kvps.protocol.envelope import Message
from kvps.protocol.membership import Error


class RequestContext:
    """The stores of one job, and its workers' sessions."""

    def __init__(
        self,
        member: MembershipClient,
        engine: Aggregator,
        memory_limit: int | None,
        lives: dict[int, int] | None = None,
    ) -> None:
        self.member = member
        self.engine = engine
        self.spaces: dict[str, ServerStore] = {}
        self.sessions: dict[int, Session] = {}
        """By rank: the newest incarnation that has spoken."""
        self.lives: dict[int, int] = dict(lives or {})
        """By rank: the newest incarnation that was heard of."""
        self._memory_limit = memory_limit

    def life(self, rank: int) -> int:
        """The newest incarnation of ``rank`` that was heard of; 0 before the first."""
        return self.lives.get(rank, 0)

    def begin(self, rank: int, incarnation: int) -> None:
        """``rank`` has this incarnation: if it is newer, drop what an older one had pending."""
        before = self.life(rank)
        if incarnation <= before:
            return
        self.lives[rank] = incarnation
        old = self.sessions.pop(rank, None)
        if old is not None:
            old.pending.clear()
        if before:
            for space in self.spaces.values():
                self.engine.replaced(space, rank, self._quorum(space))

    # --- what waits for something to exist ------------------------------------------------------------

    def _attempt(self, session: Session, seq: int, waiting: PendingRequest) -> Effects:
        """Answer ``waiting``, or let it wait on."""
        try:
            answer = waiting.retry()
        except KvpsError as error:
            yield self._refuse(session, seq, error)
            return
        if answer is None:
            session.pending[seq] = waiting
        else:
            session.pending.pop(seq, None)
            yield self._send(session, answer)

    def _retry(self) -> Effects:
        """Something exists now: try all that waits for that."""
        for session in self.sessions.values():
            for seq, one in list(session.pending.items()):
                if isinstance(one, PendingRequest):
                    yield from self._attempt(session, seq, one)

    def _only_rank_0(self, session: Session, what: str) -> None:
        if session.rank != 0:
            raise ProtocolError(f"rank {session.rank} may not {what}; rank 0 does")

    # --- small things ---------------------------------------------------------------------------------

    def _description(self, now: float) -> Describe:
        """Return what says how a rank stands, as this server has heard."""

        def describe(rank: int) -> str:
            session = self.sessions.get(rank)
            if rank in self.member.quorum().lost:
                return "lost"
            if session is None or session.asked_at is None:
                return "has asked nothing here yet"
            return quiet_in_words(now - session.asked_at, "request")

        return describe

    def _quorum(self, space: ServerStore) -> Quorum:
        """Return who counts in a store."""
        return self.member.quorum().without(space.joins.away)

    def _required(self, space: ServerStore) -> frozenset[int]:
        """Return which ranks a round of a store waits for."""
        return self._quorum(space).required(space.opened.on_worker_lost)

    def _members(self, space: ServerStore) -> frozenset[int]:
        """Return which ranks a join of a store waits for."""
        return self.member.quorum().members(
            space.opened.on_worker_lost if space.ordered else "shrink"
        )

    def _space(self, name: str) -> ServerStore:
        space = self.spaces.get(name)
        if space is None:
            raise ProtocolError(f"server {self.engine.server}: store {name!r} was not opened")
        return space

    def _space_of(self, chunk: int) -> ServerStore:
        return self.spaces[self.engine.chunk(chunk).store]

    def _refuse(self, session: Session, seq: int, error: KvpsError) -> Send:
        """Answer a request that was pending by an error."""
        session.pending.pop(seq, None)
        return self._send(session, Error(seq, error.code, str(error)))

    def _send(self, session: Session, message: Message) -> Send:
        return Send(session.route, self.member.packet(message))
