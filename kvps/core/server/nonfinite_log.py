"""Updates that are not made because their gradient is not finite: to find, count and tell them.

A store drops such an update if it was opened with ``on_nonfinite`` "skip" or "error": weights and
optimizer state stay as they were, though the round is closed and the push is taken in. Looked at is
the gradient as the optimizer gets it, half types summed in float32; without an optimizer the sum as
the key would hold it, where a float16 may overflow. Integers are always finite.

A server remembers of each key how many were dropped, and with "error" which was the last. That
is said along with the values whenever a worker pulls them, and each worker knows what it was told
before: so nothing depends on which answer was lost, on who asks along with whom, or on who asks twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from kvps.core.effects import Note
from kvps.core.plan import Key
from kvps.errors import NonFinite
from kvps.messages import Ask, Dropped, Piece

ACTIONS = ("apply", "skip", "error")
"""What becomes of an update whose gradient is not finite."""
RANKS_MAX = 20
"""Ranks that a text names."""


def count_nonfinite(values: torch.Tensor) -> int:
    """Return how many of ``values``, a flat tensor, are NaN or infinity.

    Where the sum of all is finite none is: NaN and infinity never add up to a number. A sum is
    several times faster than to look at each, and reads at the speed of memory. It may overflow
    where every value is finite; then each is looked at.

    Example:
        >>> count_nonfinite(torch.tensor([1.0, float("nan"), float("inf")]))
        2
    """
    if values.sum(dtype=_SUMMED_IN.get(values.dtype)).isfinite():
        return 0
    return len(values) - int(values.isfinite().sum())


_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Flaw(NamedTuple):
    """What is not finite in a gradient."""

    values: int
    """How many."""
    ranks: tuple[int, ...]
    """Among whose pushes they are; empty where all pushes are finite and their sum is not."""


class Drops:
    """The updates of one store that one server has dropped."""

    def __init__(self, store: str, is_error: bool) -> None:
        self._store = store
        self._is_error = is_error
        self.counts: dict[str, int] = {}
        """How many updates of each key were dropped."""
        self._last: dict[tuple[int, int | None], dict[int, Dropped]] = {}
        """By chunk, and by rank where each push is applied by itself: of each key that begins
        somewhere in it the last."""
        self._news: list[tuple[str, int | None, int, Flaw]] = []
        """What no line of log has named yet."""
        self._is_quiet = False
        """A line was written a short while ago."""

    def add(
        self, key: str, pieces: Iterable[Piece], rank: int | None, number: int, flaw: Flaw
    ) -> None:
        """Remember that an update of ``key``, whose ``pieces`` are here, was dropped.

        Args:
            key: which key.
            pieces: where it lies on this server.
            rank: whose push it was; None for a round.
            number: of the round, or of the push.
            flaw: what was wrong with it.
        """
        self.counts[key] = self.counts.get(key, 0) + 1
        self._news.append((key, rank, number, flaw))
        for piece in pieces if self._is_error else ():
            last = self._last.setdefault((piece.chunk, rank), {})
            last[piece.start] = Dropped(piece.start, number, *flaw)

    def among(self, chunk: int, rank: int | None, asks: Sequence[Ask]) -> tuple[Dropped, ...]:
        """Return the last dropped update of each key in these elements of ``chunk``."""
        found = self._last.get((chunk, rank), {})
        return tuple(
            [
                found[start]
                for start in sorted(found)
                if any(ask.start <= start < ask.start + ask.size for ask in asks)
            ]
        )

    def forget(self, pieces: Iterable[Piece]) -> None:
        """These places are another key's, or nobody's."""
        places = {(piece.chunk, piece.start) for piece in pieces}
        for (chunk, _), last in self._last.items():
            for start in [one for one in last if (chunk, one) in places]:
                del last[start]

    # --- the log ----------------------------------------------------------------------------------

    def report(self) -> Iterator[Note]:
        """Say what is new, unless a line was written a short while ago."""
        if self._news and not self._is_quiet:
            self._is_quiet = True
            yield self._line()

    def look(self) -> Iterator[Note]:
        """Say in one line what is new; called once in a while."""
        self._is_quiet = bool(self._news)
        if self._news:
            yield self._line()

    def _line(self) -> Note:
        (key, rank, number, flaw), more = self._news[0], len(self._news) - 1
        self._news = []
        what = f"round {number}" if rank is None else f"push {number} of rank {rank}"
        others = f"; and {more} more" if more else ""
        return Note("warning", f"store {self._store!r}: {what} dropped: {_flaw(key, flaw)}{others}")


def complain(
    store: str, is_ordered: bool, keys: Mapping[str, Key], found: Mapping[str, Dropped]
) -> None:
    """Tell a worker of the updates in ``found``, by key, of which it was not told before.

    Args:
        store: whose keys they are.
        is_ordered: whether updates are rounds.
        keys: what the worker knows of all keys; it is noted there that it was told.
        found: what the servers say.

    Raises:
        NonFinite: if there are any.
    """
    news = {name: one for name, one in found.items() if one.number >= keys[name].heard}
    if not news:
        return
    for name, one in news.items():
        keys[name].heard = one.number + 1
    name, one = next(iter(news.items()))
    what = f"round {one.number}" if is_ordered else f"push {one.number} of this rank"
    others = f" (and of {len(news) - 1} more)" if len(news) > 1 else ""
    raise NonFinite(
        f"store {store!r}: {what} of key {name!r}{others} was dropped: "
        f"{_flaw(name, Flaw(one.values, one.ranks))}. The weights and the optimizer's state are as "
        "they were before it, on every server; go on with the next push, and look at the loss and "
        "the learning rate if this comes again"
    )


def _flaw(key: str, flaw: Flaw) -> str:
    what = "1 value" if flaw.values == 1 else f"{flaw.values} values"
    verb = "is" if flaw.values == 1 else "are"
    return f"{what} of key {key[:64]!r} {verb} not finite ({_source(flaw.ranks)})"


def _source(ranks: Sequence[int]) -> str:
    if not ranks:
        return "every push is finite, their sum is not"
    if len(ranks) == 1:
        return f"from rank {ranks[0]}"
    named, more = ", ".join(map(str, ranks[:RANKS_MAX])), len(ranks) - RANKS_MAX
    others = f" and {more} more" if more > 0 else ""
    return f"from ranks among {named}{others}, or from their sum"
