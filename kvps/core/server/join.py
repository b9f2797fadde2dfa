"""Joins of one store on one server: the ranks that ran out of data, and their join numbers.

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
"""

from __future__ import annotations

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
