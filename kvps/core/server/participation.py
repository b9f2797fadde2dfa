"""Participation of ranks in stores: the ranks that ran out of data and join, and the ranks that
have closed a store.

Theory of operation
-------------------
A rank without batches *joins*: it says so to every server, when all its pushes are in. From then on
it is *away*: rounds close without it, and no rank waits for its clock. Its k-th join is over when
every rank has made its own k-th::

    rank 0   push push push JOIN 1 · · · · · · · · RETURN 1  push …
    rank 1   push push push push push push JOIN 1  RETURN 1  push …
                                     │             │
             rounds of rank 1 alone ─┘             └─ rounds of both again

One server of a job, the *judge*, says when that is; were each to say it, servers that have seen
different views could part. A rank that was told so by the judge says RETURN to all servers before it
pushes again, and waits for their answers. So a server that gets a push of a rank that is back has
heard, of this very rank, that the join is over, and waits for it from then on; no order of packets
and no loss can change that. A JOIN that comes late is of a join that is over, and does nothing.

Joins belong to the rank, not to its process: a replacement inherits them.

End of stores
-------------
A store *ends* when every worker that takes part has closed it or left. If it is created again
under its name, it begins anew: that is its next *life*, counted from 0. A rank that creates it
again while others still have the former life open waits for them. A process that took the place of
a lost worker finds the life that is there.

The values of a store that has ended stay for :data:`KEPT_S`, or until a store is made: a worker
may have failed just after it closed the store, and its replacement goes through the script once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class JoinTracker:
    """The joins of one store."""

    over: int = 0
    """Number of the last join that is over, from 1; 0 before the first."""
    last: dict[int, int] = field(default_factory=dict)
    """Join number -> the rank that joined last; of the newest two, since a rank that missed the end of one
    may ask while others have begun the next."""
    made: dict[int, int] = field(default_factory=dict)
    """Rank -> number of its last join."""
    away: frozenset[int] = field(init=False)
    """Ranks that have joined, and wait for the others."""

    def __post_init__(self) -> None:
        self._note()

    def _note(self) -> None:
        self.away = frozenset([rank for rank, call in self.made.items() if call > self.over])

    def join(self, rank: int, call: int) -> None:
        """Note that ``rank`` has run out of data for the ``call``-th time."""
        if call > self.made.get(rank, 0):
            self.made[rank] = call
            if call > self.over:
                self.last[call] = rank
                self.last.pop(call - 2, None)
            self._note()

    def missing(self, needed: frozenset[int]) -> tuple[int, ...]:
        """Return the ranks of ``needed`` that the next join waits for."""
        return tuple([rank for rank in sorted(needed) if self.made.get(rank, 0) <= self.over])

    def judge(self, needed: frozenset[int]) -> int:
        """Return the number of the last join that all ranks ``needed`` have made."""
        return min([self.made.get(rank, 0) for rank in needed], default=0)

    def end(self, call: int) -> bool:
        """End the ``call``-th join; return whether it was not over before."""
        if call <= self.over:
            return False
        self.over = call
        self._note()
        return True


KEPT_S = 60.0
"""Seconds for which the values of a store that has ended are kept at most."""
KNOWN_MAX = 1024
"""Stores without values whose last life is remembered."""


@dataclass(slots=True)
class StoreLife:
    """The present life of a store, or its last one."""

    life: int
    closed: dict[int, int] = field(default_factory=dict)
    """Rank -> the incarnation that has closed it."""
    ended_at: float | None = None
    """When it was first seen that it has ended; None while it has not."""


class EndedStores:
    """The present life of each store of one server, and the last life of stores without values."""

    def __init__(self) -> None:
        self._lives: dict[str, StoreLife] = {}

    def of(self, store: str) -> StoreLife | None:
        """Return the present or last life of a store; None for one that is not known."""
        return self._lives.get(store)

    def all(self) -> Mapping[str, StoreLife]:
        """Return all lives that are known, the oldest first."""
        return self._lives

    def begin(self, store: str, life: int) -> None:
        """Note that a life of a store begins."""
        self._lives.pop(store, None)
        self._lives[store] = StoreLife(life)

    def close(self, store: str, life: int, rank: int, incarnation: int) -> None:
        """Note that a process has closed a life of a store; of a former one, that changes nothing."""
        known = self._lives.setdefault(store, StoreLife(life))
        if life >= known.life:
            known.closed[rank] = max(incarnation, known.closed.get(rank, 0))

    def open(self, store: str, rank: int, incarnation: int) -> None:
        """Note that a process uses a store; it may have taken the place of one that had closed it."""
        known = self._lives[store]
        if known.closed.get(rank, incarnation) < incarnation:
            del known.closed[rank]
            known.ended_at = None

    def is_due(self, store: str, now: float) -> bool:
        """Return whether a store that has ended was kept for long enough."""
        known = self._lives[store]
        if known.ended_at is None:
            known.ended_at = now
        return now >= known.ended_at + KEPT_S

    def forget(self, held: frozenset[str]) -> None:
        """Forget the oldest of too many stores, but for those that are ``held``."""
        gone = [store for store in self._lives if store not in held]
        for store in gone[: max(0, len(gone) - KNOWN_MAX)]:
            del self._lives[store]
