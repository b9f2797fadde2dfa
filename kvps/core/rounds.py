"""Who has pushed what: the rounds of a span, and when one of them closes.

Theory of operation
-------------------
A *span* is a run of neighbouring shards of a chunk that have always been pushed together, so one
set of counters serves them all. It counts for every rank how many of that rank's pushes it has
taken in, and keeps a short window of open rounds, because a fast rank may push for round ``r + 1``
while a slow one still owes round ``r``::

    closed | open ...          | too early
    -------+-------------------+-----------
     v - 1   v  v+1 .. v+63      v + 64

A push that touches a part of a span splits it; a push that covers several spans with equal
counters joins them again. So 1,000 keys that are always pushed together cost one round, and a key
that is pushed alone has its own.

Invariants, checked by :meth:`Span.check`:

* A rank counts at most once per round. (Counting *requests* would let one resend close a round
  in place of a rank that has not been heard from.)
* Rounds close in order, and a closed round never reopens: its number is below ``version``.
* Pushes of one rank are taken in by number, each once: the counter of that rank *is* the window
  that recognises duplicates, across resends and across incarnations of the rank.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvps.tensors import accumulator

if TYPE_CHECKING:
    from kvps.core.engine import Reading

WINDOW = 64
"""How many rounds of a span may be open at once."""


class Verdict(enum.Enum):
    """What becomes of a push."""

    COUNTED = "counted"
    DUPLICATE = "duplicate"
    """Taken in before, or its round closed without it: acknowledge again, do not apply."""
    EARLY = "early"
    """An earlier one is missing, or the window is full: not taken in, it must come again."""
    CONFLICT = "conflict"
    """It speaks for ranks of which some have been counted and some have not."""


@dataclass(slots=True)
class Round:
    """The pushes of one number, summed as they come or, if order matters, kept until the end."""

    number: int
    opened_at: float
    ranks: set[int] = field(default_factory=set)
    weight: float = 0.0
    total: torch.Tensor | None = None
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    """By lowest rank, where sums must be taken in rank order; empty otherwise."""

    def add(self, ranks: Iterable[int], weight: float, gradient: torch.Tensor, keep: bool) -> None:
        """Count ``ranks`` in. ``gradient`` belongs to the round from here on."""
        ranks = tuple(ranks)
        self.weight += weight
        self.ranks.update(ranks)
        if keep:
            self.kept[min(ranks)] = gradient
        elif self.total is None:
            self.total = accumulator(gradient)
        else:
            self.total.add_(gradient)

    def sum(self) -> torch.Tensor:
        """Return the sum; in rank order where the pushes were kept."""
        for rank in sorted(self.kept):
            gradient = self.kept.pop(rank)
            if self.total is None:
                self.total = accumulator(gradient)
            else:
                self.total.add_(gradient)
        assert self.total is not None, "a round without pushes cannot be summed"
        return self.total

    def cut(self, at: int) -> Round:
        """Split off the elements from ``at`` on; both halves share this round's memory."""
        right = Round(self.number, self.opened_at, set(self.ranks), self.weight)
        if self.total is not None:
            self.total, right.total = self.total[:at], self.total[at:]
        for rank, gradient in self.kept.items():
            self.kept[rank], right.kept[rank] = gradient[:at], gradient[at:]
        return right


@dataclass(slots=True)
class Due:
    """A summed gradient that waits to be applied (for the norms of the whole tensor)."""

    number: int
    rank: int | None
    gradient: torch.Tensor


@dataclass(slots=True)
class Span:
    """Elements ``start`` to ``stop`` of a chunk, with one history."""

    start: int
    stop: int
    version: int = 0
    """Closed rounds, or applied pushes, since init."""
    step: int = 0
    """How often the optimizer has updated these elements."""
    pushed: dict[int, int] = field(default_factory=dict)
    """Of each rank, how many pushes were taken in: the number that it owes next."""
    rounds: deque[Round] = field(default_factory=deque)
    """Open rounds, oldest first; ``rounds[i].number == version + len(due) + i``."""
    due: deque[Due] = field(default_factory=deque)
    waiters: list[Reading] = field(default_factory=list)
    """Requests that wait for this span to move on."""

    def owed(self, rank: int, ordered: bool) -> int:
        """The number of the push that ``rank`` owes next; never that of a closed round."""
        pushed = self.pushed.get(rank, 0)
        return max(pushed, self.version + len(self.due)) if ordered else pushed

    def applied(self, rank: int) -> int:
        """How many pushes of ``rank`` are in the values (where each is applied by itself)."""
        return self.pushed.get(rank, 0) - sum(one.rank == rank for one in self.due)

    def judge(self, ranks: tuple[int, ...], number: int, ordered: bool) -> Verdict:
        """Decide about push ``number`` of ``ranks``; ``ordered`` where numbers are rounds."""
        owed = [self.owed(rank, ordered) for rank in ranks]
        if all(number < one for one in owed):
            return Verdict.DUPLICATE
        if any(number > one for one in owed):
            return Verdict.EARLY
        if any(number < one for one in owed):
            return Verdict.CONFLICT
        if ordered and number - self.version >= WINDOW:
            return Verdict.EARLY
        return Verdict.COUNTED

    def take(self, ranks: tuple[int, ...], number: int) -> None:
        """Remember that push ``number`` of ``ranks`` is in."""
        for rank in ranks:
            self.pushed[rank] = number + 1

    def round(self, number: int, now: float) -> Round:
        """Return the open round ``number``, opening it and those before it where needed."""
        first = self.version + len(self.due)
        while first + len(self.rounds) <= number:
            self.rounds.append(Round(first + len(self.rounds), now))
        return self.rounds[number - first]

    def closable(self, required: frozenset[int]) -> bool:
        """Whether every rank that the oldest open round needs has been counted in it."""
        return (
            bool(self.rounds) and bool(self.rounds[0].ranks) and (required <= self.rounds[0].ranks)
        )

    def missing(self, required: frozenset[int]) -> tuple[int, ...]:
        """The ranks that the oldest open round waits for."""
        return tuple(sorted(required - self.rounds[0].ranks)) if self.rounds else ()

    def ahead(self, rank: int, live: frozenset[int]) -> int:
        """By how many pushes ``rank`` is ahead of the slowest live rank that has pushed."""
        clocks = [self.pushed[one] for one in live if self.pushed.get(one)]
        return self.pushed.get(rank, 0) - min(clocks) if clocks else 0

    def cut(self, at: int) -> Span:
        """Split off the elements from ``at`` on (an index into the chunk)."""
        assert self.start < at < self.stop, (self.start, at, self.stop)
        right = Span(at, self.stop, self.version, self.step, dict(self.pushed))
        right.waiters = list(self.waiters)
        length = at - self.start
        right.rounds = deque(one.cut(length) for one in self.rounds)
        for one in self.due:
            right.due.append(Due(one.number, one.rank, one.gradient[length:]))
            one.gradient = one.gradient[:length]
        self.stop = at
        return right

    def may_join(self, right: Span) -> bool:
        """Whether this span and its right neighbour have one history and nothing open."""
        return (
            self.stop == right.start
            and self.version == right.version
            and self.step == right.step
            and not (self.rounds or right.rounds or self.due or right.due)
            and self.pushed == right.pushed
        )

    def join(self, right: Span) -> None:
        """Take the right neighbour in."""
        assert self.may_join(right)
        self.stop = right.stop
        self.waiters.extend(right.waiters)

    def check(self) -> None:
        """Assert the invariants."""
        assert self.start < self.stop
        first = self.version + len(self.due) if all(d.rank is None for d in self.due) else None
        for offset, one in enumerate(self.rounds):
            assert first is not None
            assert one.number == first + offset
            assert offset < WINDOW
            for rank in one.ranks:
                assert self.pushed[rank] > one.number, (rank, one.number, self.pushed)
