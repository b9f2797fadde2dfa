"""Sessions of a server: the workers that ask it, and their unanswered requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvps.core.effects import Route
from kvps.core.embedding.id_hash import Ids
from kvps.protocol.envelope import Message
from kvps.protocol.values import Ask

Describe = Callable[[int], str]
"""Says how a rank stands."""


@dataclass(slots=True, eq=False)
class Session:
    """One worker rank as a server knows it, in one of its lives."""

    rank: int
    route: Route
    """Where its answers go: the way along which it last spoke."""
    incarnation: int
    asked_at: float | None = None
    """When it last asked for something; to ask after what it asked before does not count."""
    pending: dict[int, PendingRequest | PendingRead] = field(default_factory=dict)
    """By seq. What is in here is still to be answered; what is not, never again."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request for something that does not exist yet."""

    retry: Callable[[], Message | None]
    """Returns the answer, or None while it still waits."""
    why: Callable[[Describe], str]


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
    """Of each ask, the version that the asker has, or -1; empty if it wants values as they are."""
    index: int = 0
    """The ask whose condition does not hold; all before it have held."""
    at: int = 0
    """The element of the chunk at which it waits; those before it have what they need."""
    call: int | None = None
    """The DECLARE whose value it wants, whether or not all of that is there."""


@dataclass(slots=True, eq=False)
class PendingTableRead(PendingRead):
    """A request for rows of an embedding table."""

    ids: Ids = field(default_factory=lambda: np.empty(0, np.int64))
