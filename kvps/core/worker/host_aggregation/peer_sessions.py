"""The sessions of neighbours that ask this worker: their permissions, and their unanswered requests.

A neighbour says HELLO in each of its incarnations, and is refused before. An incarnation that was
replaced is fenced: its process must stop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvps.core.effects import Route
from kvps.core.membership_client import MembershipClient, check_protocol
from kvps.core.worker.host_aggregation.merge_queue import Participant
from kvps.errors import Fenced, Mismatch, ProtocolError
from kvps.protocol.envelope import Envelope, Message, Role
from kvps.protocol.membership import Hello


@dataclass(slots=True, eq=False)
class PeerSession:
    """One incarnation of a neighbour that asks this worker."""

    rank: int
    incarnation: int
    route: Route
    asked: dict[int, Participant] = field(default_factory=dict)
    """Number -> request without an answer."""


@dataclass(frozen=True, slots=True, eq=False)
class PeerRequest:
    """One request of a neighbour."""

    peer: PeerSession
    seq: int


class PeerSessions:
    """The sessions of all neighbours that have said HELLO."""

    def __init__(self, member: MembershipClient) -> None:
        self._member = member
        self._by_rank: dict[int, PeerSession] = {}
        self._lives: dict[int, int] = {}
        """Rank -> the incarnation that the view names, of all neighbours."""

    def __iter__(self) -> Iterator[PeerSession]:
        return iter(self._by_rank.values())

    def learn(self, lives: dict[int, int]) -> None:
        """The view names these neighbours: rank -> incarnation."""
        self._lives = lives

    def admit(self, envelope: Envelope, kind: type[Message]) -> bool:
        """Return whether a packet of ``kind`` is served; one of an incarnation that no view has
        named is not yet.

        Raises:
            Mismatch: if it is of another process. Fenced: if another incarnation has its seat.
            ProtocolError: if the neighbour has not said HELLO.
        """
        if (
            envelope.job != self._member.job
            or envelope.role is not Role.WORKER
            or envelope.rank not in self._lives
        ):
            raise Mismatch(
                f"{envelope.node} of job {envelope.job.hex()[:8]} is not a neighbour of worker "
                f"{self._member.rank} of job {self._member.job.hex()[:8]}"
            )
        life = self._lives[envelope.rank]
        if envelope.incarnation < life:
            raise Fenced(
                f"{envelope.node} incarnation {envelope.incarnation} was replaced by incarnation "
                f"{life}. This process must stop"
            )
        if envelope.incarnation > life:
            return False
        if kind is not Hello:
            self._known(envelope)
        return True

    def begin(self, route: Route, envelope: Envelope, message: Hello) -> bool:
        """Begin the session of a neighbour that says HELLO; return whether its incarnation is new.

        Raises:
            ProtocolError: if it speaks another version of the protocol.
        """
        check_protocol(message, f"worker {self._member.rank}")
        rank, incarnation = envelope.rank, envelope.incarnation
        peer = self._by_rank.get(rank)
        if peer is not None and peer.incarnation == incarnation:
            peer.route = route
            return False
        self._by_rank[rank] = PeerSession(rank, incarnation, route)
        return True

    def of(self, route: Route, envelope: Envelope) -> PeerSession:
        """Return the session of the neighbour that sent a packet along ``route``.

        Raises:
            ProtocolError: if it has not said HELLO.
        """
        peer = self._known(envelope)
        peer.route = route
        return peer

    def _known(self, envelope: Envelope) -> PeerSession:
        peer = self._by_rank.get(envelope.rank)
        if peer is None or peer.incarnation != envelope.incarnation:
            raise ProtocolError(f"worker {self._member.rank} expects HELLO first")
        return peer
