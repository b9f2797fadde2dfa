"""Rounds of a span: the pushes of each rank, which of them are duplicates, and when a round closes.

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

A round may close at a quorum, without ranks that it would wait for. A push that comes after that
is *late*. It is dropped, or, in a :class:`LateSpan`, it counts in the first open round that does not have
its rank yet: then number and round differ, but the two invariants above are the same.

A store that applies each push by itself has no rounds: its spans are each a :class:`FreeSpan`. Which of the
three a store has is settled when it is opened.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import itemgetter

from kvps.compression.spec import CodecSpec
from kvps.core.gradients import DenseGradient, GradientSum, OwnSum, Part
from kvps.core.nonfinite import Flaw
from kvps.core.row_gradients import RowGradient
from kvps.protocol.envelope import WINDOW
from kvps.protocol.values import StepPart

GRACE_SHARE = 0.25
"""The grace of a round, where its store does not give one, as a share of the time that its quorum took."""
LENT_MAX = 8
"""Maximum gradients of a round that stay in their senders' memory."""


_RANKS = itemgetter(1)


class Verdict(enum.Enum):
    """The verdict on a push."""

    COUNTED = "counted"
    DUPLICATE = "duplicate"
    """Taken in before, or its round closed without it: acknowledge again, do not apply."""
    EARLY = "early"
    """An earlier push is missing, or the window is full: not accepted, it must be sent again."""
    CONFLICT = "conflict"
    """It speaks for ranks of which some have been counted and some have not."""


COUNTED, EARLY = Verdict.COUNTED, Verdict.EARLY


@dataclass(slots=True)
class Round:
    """The pushes of one number.

    They are added up when the round closes: then the sum goes where it is needed, in one pass. Of those
    that came in frames, two are added up when a third comes, so that a round of many ranks needs no
    more memory than one of two; those that lie in their senders' memory are left there, up to
    :data:`LENT_MAX`, and so are those of which only some rows are there. Where sums must be taken in
    rank order, all are kept.
    """

    number: int
    opened_at: float
    ranks: set[int] = field(default_factory=set)
    parts: dict[tuple[int, tuple[int, ...]], Part] = field(default_factory=dict)
    """(Kind, ranks) -> their gradients: as they came, or added up (kind -1). A sum has them in this order."""
    backs: tuple[CodecSpec | None, ...] = ()
    """The different codecs in which its pushes want the update."""
    weights: list[float] = field(default_factory=list)
    """The weight of each push in the mean."""
    moved: Mapping[int, int] = field(default_factory=dict)
    """Ranks whose push here had the number of an earlier round -> that number."""
    closes_at: float | None = None
    """When it closes without the ranks that it lacks; None while its quorum is not in, or it is
    not the oldest."""
    step: StepPart | None = None
    """The step that it belongs to, where gradients are clipped by their global norm."""

    def add(self, ranks: tuple[int, ...], gradient: Part, *, keep: bool, weight: float = 1.0) -> None:
        """Count ``ranks`` in.

        Args:
            ranks: the ranks that pushed.
            gradient: of all of them. It belongs to the round from here on, unless it is lent.
            keep: sums must be taken in rank order.
            weight: the weight by which ``gradient`` is multiplied already.
        """
        parts = self.parts
        if len(parts) > 1 and not keep and len(parts) >= (LENT_MAX if gradient.is_lent else 2):
            self._add_up()
        self.ranks.update(ranks)
        self.weights.append(weight)
        self.parts[gradient.kind, ranks if len(ranks) == 1 else tuple(sorted(ranks))] = gradient

    def _add_up(self) -> None:
        """Let the sum of the gradients take their place."""
        total = self.sum()
        first, whose = total.parts[0], tuple(sorted(self.ranks))
        if total.is_sparse:
            self.parts = {(RowGradient.kind, whose): total.gathered()}
            return
        row = first.joined() if first.may_be_sum else total.new()
        total.into(row, 0, len(total))
        self.parts = {(-1, whose): DenseGradient([row])}

    def sum(self) -> GradientSum:
        """Return the sum; in rank order where all pushes were kept, of either kind by itself."""
        return self.total().sum

    def mean(self) -> PendingUpdate:
        """Return the update that closes this round in a store of means: the mean by weight."""
        # fsum() gives the same bits in whatever order the pushes came.
        return self.total(math.fsum(self.weights))

    def total(self, divisor: float = 1) -> PendingUpdate:
        """Return the update that closes this round: the sum by ``divisor``, dense gradients first."""
        order = sorted(self.parts)
        parts = tuple(map(self.parts.__getitem__, order))
        is_own = divisor == len(parts) == 1 and parts[0].may_be_sum
        total = (OwnSum if is_own else GradientSum)(parts, divisor)
        whose = tuple(map(_RANKS, order))
        return PendingUpdate(self.number, (), total, whose, self.backs, step=self.step, moved=self.moved)

    def cut(self, at: int) -> Round:
        """Split off the elements from ``at`` on; both halves share this round's memory."""
        right = replace(self, ranks=set(self.ranks), parts={}, weights=list(self.weights))
        for whose, gradient in self.parts.items():
            self.parts[whose] = gradient.part(0, at)
            right.parts[whose] = gradient.part(at, len(gradient))
        return right


@dataclass(slots=True)
class PendingUpdate:
    """A summed gradient that waits to be applied (for what must be known of the whole tensor)."""

    number: int
    ranks: tuple[int, ...]
    """Ranks that pushed it; empty for the sum of a round."""
    sum: GradientSum
    whose: tuple[tuple[int, ...], ...] = ()
    """The ranks of each part of the sum, as it was when the round was closed."""
    backs: Collection[CodecSpec | None] = ()
    """The codecs in which its pushes want it."""
    flaw: Flaw | None = None
    """Values of this piece that are not finite, if the store checks; None for none."""
    age: int | None = None
    """By how many versions the values have moved since the rank of a push read them; None if that
    is not known."""
    step: StepPart | None = None
    """The step whose norm it waits for; None for none."""
    factor: float | None = None
    """The factor by which the step is clipped; None while it is not known."""
    moved: Mapping[int, int] = field(default_factory=dict)
    """As of its round."""

    @property
    def back(self) -> CodecSpec | None:
        """The codec in which the update is published; None for none."""
        return next(iter(self.backs)) if len(self.backs) == 1 else None

    @property
    def rank(self) -> int | None:
        """The rank whose push it is; None for a round."""
        return self.ranks[0] if self.ranks else None


@dataclass(slots=True)
class Span:
    """Elements ``start`` to ``stop`` of a chunk, with one history; its rounds wait for all ranks."""

    start: int
    stop: int
    version: int = 0
    """Closed rounds, or applied pushes, since init."""
    step: int = 0
    """Number of optimizer updates of these elements."""
    pushed: dict[int, int] = field(default_factory=dict)
    """Rank -> pushes taken in: the number that it owes next."""
    head_start: dict[int, int] = field(default_factory=dict)
    """Replaced rank -> by how much its clock is ahead of its pushes."""
    clock_from: dict[int, int] = field(default_factory=dict)
    """Rank -> pushes that its clock leaves out: those before the end of the store's last join."""
    rounds: deque[Round] = field(default_factory=deque)
    """Open rounds, oldest first; ``rounds[i].number == version + len(due) + i``."""
    due: deque[PendingUpdate] = field(default_factory=deque)
    moved_at: float | None = None
    """When the last round closed here, or push was applied; None before the first."""

    @property
    def is_open(self) -> bool:
        """Whether it holds gradients that are not applied yet."""
        return bool(self.rounds or self.due)

    def owed(self, rank: int) -> int:
        """Return the number of the push that ``rank`` owes next; never that of a closed round."""
        return max(self.pushed.get(rank, 0), self.version + len(self.due))

    def judge(self, ranks: tuple[int, ...], number: int, since: int | None) -> Verdict:
        """Decide about a push.

        So much may wait for other servers, and no more: they remember what they told of the last
        WINDOW updates.

        Args:
            ranks: the ranks that the push speaks for.
            number: its number.
            since: where late pushes count, the number after the sender's push before this one.
        """
        first = self.version + len(self.due)
        low = high = self.pushed.get(ranks[0], 0)
        if len(ranks) > 1:
            pushed = [*map(self.pushed.get, ranks, repeat(0))]
            low, high = min(pushed), max(pushed)
        low, high = max(low, first), max(high, first)
        if number != low or number != high:
            return _verdict(number, low)
        return EARLY if number - self.version >= WINDOW else COUNTED

    def note(self, ranks: tuple[int, ...], number: int) -> None:
        """Remember that push ``number`` of ``ranks`` is in."""
        for rank in ranks:
            self.pushed[rank] = number + 1

    def take(self, ranks: tuple[int, ...], number: int, now: float) -> Round:
        """Remember that push ``number`` of ``ranks`` is in; return its round, opened if it is the next."""
        for rank in ranks:
            self.pushed[rank] = number + 1
        at = number - self.version - len(self.due)
        if at == len(self.rounds):
            self.rounds.append(Round(number, now))
        return self.rounds[at]

    def due_of(self, rank: int) -> int:
        """Return the version at which no push of ``rank`` is in an open round."""
        waits = [update.number for update in self.due]  # of all ranks: they close soon
        waits += [round_.number for round_ in self.rounds if rank in round_.ranks]
        return max(waits, default=self.version - 1) + 1

    def closes_at(self, quorum: int, grace_s: float, now: float) -> float | None:
        """Return when the oldest open round closes without the ranks that it lacks; None if it does not.

        Args:
            quorum: how many ranks it needs at least; 0 for all.
            grace_s: seconds to wait for the others; below 0 for a share of the time that the quorum took.
            now: the time.
        """
        if not quorum or not self.rounds or len(self.rounds[0].ranks) < quorum:
            return None
        oldest = self.rounds[0]
        if oldest.closes_at is None:
            began = oldest.opened_at if self.moved_at is None else self.moved_at
            grace_s = (now - began) * GRACE_SHARE if grace_s < 0 else grace_s
            oldest.closes_at = now + grace_s
        return oldest.closes_at

    def missing(self, required: frozenset[int]) -> tuple[int, ...]:
        """Return the ranks that the next round waits for."""
        return tuple(sorted(required - self.rounds[0].ranks if self.rounds else required))

    def cut(self, at: int) -> Span:
        """Split off the elements from ``at`` on (an index into the chunk)."""
        assert self.start < at < self.stop, (self.start, at, self.stop)
        length = at - self.start
        due = [(update, update.sum.cut(length)) for update in self.due]
        right = replace(
            self,
            start=at,
            pushed=dict(self.pushed),
            head_start=dict(self.head_start),
            clock_from=dict(self.clock_from),
            rounds=deque([round_.cut(length) for round_ in self.rounds]),
            due=deque([replace(update, sum=halves[1]) for update, halves in due]),
        )
        for update, halves in due:
            update.sum = halves[0]
        self.stop = at
        return right

    def may_join(self, right: Span) -> bool:
        """Return whether this span and its right neighbour have equal histories and nothing open."""
        return (
            self.stop == right.start
            and self.version == right.version
            and self.step == right.step
            and not self.is_open
            and not right.is_open
            and self.pushed == right.pushed
            and self.head_start == right.head_start
            and self.clock_from == right.clock_from
        )

    def join(self, right: Span) -> None:
        """Absorb the right neighbour."""
        assert self.may_join(right)
        self.stop = right.stop

    def check(self) -> None:
        """Assert the invariants."""
        assert self.start < self.stop
        for due in self.due:
            assert len(due.sum) == self.stop - self.start
        first = self.version + len(self.due)
        assert len(self.rounds) <= WINDOW
        for offset, round_ in enumerate(self.rounds):
            assert round_.number == first + offset
            assert round_.ranks, round_.number
            for gradient in round_.parts.values():
                assert len(gradient) == self.stop - self.start
            for rank in round_.ranks - round_.moved.keys():
                assert self.pushed[rank] > round_.number, (rank, round_.number, self.pushed)
            assert all(self.pushed[rank] for rank in round_.moved)


def _verdict(number: int, low: int) -> Verdict:
    """Return the verdict on a push that does not count, where its ranks owe ``low`` or later ones."""
    if number > low:
        return Verdict.EARLY
    return Verdict.DUPLICATE if number < low else Verdict.CONFLICT


@dataclass(slots=True)
class LateSpan(Span):
    """Elements of a store in which a push counts whose round closed without it."""

    def judge(self, ranks: tuple[int, ...], number: int, since: int | None) -> Verdict:
        """Decide about a push.

        Rounds from ``since`` on closed without the sender, so it owes them no push; but a push below may
        still be on its way.
        """
        assert since is not None, "checked with the push"
        pushed = [*map(self.pushed.get, ranks, repeat(0))]
        low, high = min(pushed), max(pushed)
        if number > max(low, self.version + len(self.due)) or any(turn < since <= number for turn in pushed):
            return Verdict.EARLY
        if number < high:
            return Verdict.DUPLICATE if number < low else Verdict.CONFLICT
        return Verdict.EARLY if self._place(ranks, number) - self.version >= WINDOW else Verdict.COUNTED

    def _place(self, ranks: tuple[int, ...], number: int) -> int:
        """Return the round in which a push counts: the first without ``ranks``."""
        first = self.version + len(self.due)
        at = max(number, first)
        while at - first < len(self.rounds) and not self.rounds[at - first].ranks.isdisjoint(ranks):
            at += 1
        return at

    def take(self, ranks: tuple[int, ...], number: int, now: float) -> Round:
        """Remember that push ``number`` of ``ranks`` is in; return the round in which it counts."""
        round_ = Span.take(self, ranks, self._place(ranks, number), now)
        if round_.number != number:
            round_.moved = {**round_.moved, **dict.fromkeys(ranks, number)}
            self.note(ranks, number)
        return round_


@dataclass(slots=True)
class FreeSpan(Span):
    """Elements of a store that applies each push by itself."""

    def owed(self, rank: int) -> int:
        """Return the number of the push that ``rank`` owes next."""
        return self.pushed.get(rank, 0)

    def applied(self, rank: int) -> int:
        """Return the number of pushes of ``rank`` that are in the values."""
        waiting = [update.number for update in self.due if rank in update.ranks]
        return min(waiting, default=self.pushed.get(rank, 0))

    def judge(self, ranks: tuple[int, ...], number: int, since: int | None) -> Verdict:
        """Decide about a push; see :meth:`Span.judge`."""
        pushed = [*map(self.pushed.get, ranks, repeat(0))]
        if number != min(pushed) or number != max(pushed):
            return _verdict(number, min(pushed))
        is_early = number - min(map(self.applied, ranks)) >= WINDOW
        return Verdict.EARLY if is_early else Verdict.COUNTED

    def ahead(self, rank: int, live: frozenset[int]) -> int:
        """Return by how many pushes ``rank`` is ahead of the slowest live rank that has pushed."""
        clocks = [self._clock(other) for other in live if self.pushed.get(other)]
        # A head start keeps the others from waiting for what a replacement has still to push
        # again; it does not make the replacement wait for them.
        return self.pushed.get(rank, 0) - self.clock_from.get(rank, 0) - min(clocks) if clocks else 0

    def slowest(self, live: frozenset[int]) -> int:
        """Return the live rank with the fewest pushes, of those that have pushed."""
        return min((other for other in sorted(live) if self.pushed.get(other)), key=self._clock)

    def replace(self, rank: int, live: frozenset[int]) -> None:
        """Let the clock of ``rank``, which a new process holds, start at the slowest live rank's."""
        others = [self._clock(other) for other in live - {rank} if self.pushed.get(other)]
        if others and self.pushed.get(rank):
            own = self.pushed[rank] - self.clock_from.get(rank, 0)
            self.head_start[rank] = max(0, min(others) - own)

    def admit(self, rank: int, live: frozenset[int]) -> None:
        """Let a worker that was added as ``rank`` begin: its pushes are counted from 0, and its clock starts
        at the slowest live rank's, as all clocks do."""
        self.pushed.pop(rank, None)  # the last one may have ended between two parts of a push
        least = min([self._clock(other) for other in live - {rank} if self.pushed.get(other)], default=0)
        self.clock_from = {other: self.clock_from.get(other, 0) + least for other in self.pushed}
        self.head_start.pop(rank, None)

    def level(self) -> None:
        """Let the clocks of all ranks start anew, at 0: a rank that ran out of data early owes
        nobody a push."""
        self.clock_from = dict(self.pushed)
        self.head_start.clear()

    def _clock(self, rank: int) -> int:
        start = self.clock_from.get(rank, 0)
        return self.applied(rank) - start + self.head_start.get(rank, 0)
