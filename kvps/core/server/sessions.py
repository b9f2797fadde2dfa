"""Sessions of a server: the workers that ask it, and their unanswered requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvps.core.effects import Route
from kvps.core.server.links import Link
from kvps.protocol.envelope import Message
from kvps.protocol.values import Ask

Describe = Callable[[int], str]
"""Describes the state of a rank in words."""


@dataclass(slots=True, eq=False)
class Session:
    """One worker rank as a server knows it, in one of its lives."""

    rank: int
    route: Route
    """Where its answers go: the route of its last packet."""
    incarnation: int
    asked_at: float | None = None
    """Time of its last request; PROBE does not count."""
    pending: dict[int, PendingRequest | PendingRead] = field(default_factory=dict)
    """seq -> request that is still to be answered; others are never answered again."""
    waiting_keys: int = 0
    """The keys that pending DECLAREs name, all together."""
    link: Link | None = None
    """The way to it and back; None before it is watched for the first time."""

    def wait(self, seq: int, request: PendingRequest) -> None:
        """Keep a request until it can be answered."""
        if self.pending.get(seq) is not request:
            self.forget(seq)
            self.pending[seq] = request
            self.waiting_keys += request.keys

    def forget(self, seq: int) -> None:
        """Keep a request no longer: it is answered."""
        request = self.pending.pop(seq, None)
        if isinstance(request, PendingRequest):
            self.waiting_keys -= request.keys


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request for something that does not exist yet."""

    retry: Callable[[], Message | None]
    """Returns the answer, or None while it still waits."""
    why: Callable[[Describe], str]
    keys: int = 0
    """The number of keys that it names, of a DECLARE."""
    store: str = ""
    """The store that it is of, if it ends with the store."""


@dataclass(slots=True, eq=False)
class PendingRead:
    """A request for values (a pull, or a push that wants them) and how far it has come."""

    session: Session
    seq: int
    store: str
    chunk: int
    values: bool
    asks: tuple[Ask, ...]
    held: tuple[int, ...] = ()
    """The version that the worker holds of each ask, or -1; empty if it wants whole values."""
    index: int = 0
    """Index of the first ask whose condition does not hold."""
    at: int = 0
    """The element of the chunk at which it waits; the conditions before it hold."""
    call: int | None = None
    """The DECLARE whose value it reads, even while that is being loaded."""
