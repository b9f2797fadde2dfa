"""Lines of a server's log about rounds: those that were dropped since their gradient was not finite, with the
counts and the news for workers; and those that stay open, when one begins to wait, changes or ends.

A store drops an update whose gradient is not finite if it was opened with ``on_nonfinite`` "skip" or
"error": weights and optimizer state stay as they were, though the round is closed and the push is taken in.
Looked at is the gradient as the optimizer gets it, half types summed in float32; without an optimizer the sum
as the key would hold it, where a float16 may overflow. Integers are always finite. For each key a server
remembers how many rounds were dropped, and with "error" the last of them. It sends both with the values
whenever a worker pulls them, and each worker knows what it was told before. So lost answers, merged pulls and
repeated pulls make no difference.

A round is open from the first push on. A round that stays open waits for ranks that are slow, hang or are
lost. The log should tell an operator which ranks, and since when, but not every second. What goes on is said
again when it has become twice as old.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvps.core.effects import Note
from kvps.core.nonfinite import Flaw, describe
from kvps.protocol.replicas import CopiedDrop
from kvps.protocol.stores import Piece
from kvps.protocol.values import Ask, Dropped

STALL_AFTER_S = 10.0
"""Seconds that a round may be open before it is logged."""


class NonFiniteLog:
    """The updates of one store that one server has dropped."""

    def __init__(self, store: str, is_error: bool) -> None:
        self._store = store
        self._is_error = is_error
        self.counts: dict[str, int] = {}
        """Key -> number of dropped updates."""
        self._last: dict[tuple[int, int | None], dict[int, Dropped]] = {}
        """(chunk, rank or None) -> {start of a piece: its last dropped update}; the rank is set in
        stores that apply each push by itself."""
        self._news: list[tuple[str, int | None, int, Flaw]] = []
        """Dropped updates that were not logged yet."""
        self._is_quiet = False
        """A line was logged since the last :meth:`look`."""

    def add(self, key: str, pieces: Iterable[Piece], rank: int | None, number: int, flaw: Flaw) -> None:
        """Remember that an update of ``key``, whose ``pieces`` are here, was dropped.

        Args:
            key: which key.
            pieces: where it lies on this server.
            rank: whose push it was; None for a round.
            number: of the round, or of the push.
            flaw: the reason, such as the count of NaN.
        """
        self.counts[key] = self.counts.get(key, 0) + 1
        self._news.append((key, rank, number, flaw))
        for piece in pieces if self._is_error else ():
            last = self._last.setdefault((piece.chunk, rank), {})
            last[piece.start] = Dropped(piece.start, number, *flaw)

    def within(self, chunk: int, start: int, stop: int) -> tuple[CopiedDrop, ...]:
        """Return the last dropped updates of all readers in a range of ``chunk``, for another copy."""
        return tuple(
            [
                CopiedDrop(0 if rank is None else rank + 1, *update)
                for (number, rank), last in self._last.items()
                for update in last.values()
                if number == chunk and start <= update.start < stop
            ]
        )

    def put(self, chunk: int, start: int, stop: int, dropped: Iterable[CopiedDrop]) -> None:
        """Take in what another copy returned by :meth:`within`, in place of what was known there."""
        for (number, _), last in self._last.items():
            for begin in [begin for begin in last if number == chunk and start <= begin < stop]:
                del last[begin]
        for rank, start, number, values, ranks in dropped:
            last = self._last.setdefault((chunk, rank - 1 if rank else None), {})
            last[start] = Dropped(start, number, values, ranks)

    def among(self, chunk: int, rank: int | None, asks: Sequence[Ask]) -> tuple[Dropped, ...]:
        """Return the last dropped update of each key in these elements of ``chunk``."""
        last = self._last.get((chunk, rank), {})
        return tuple(
            [
                last[start]
                for start in sorted(last)
                if any(ask.start <= start < ask.start + ask.size for ask in asks)
            ]
        )

    def forget(self, pieces: Iterable[Piece]) -> None:
        """Forget the updates of these pieces, which no longer belong to their keys."""
        places = {(piece.chunk, piece.start) for piece in pieces}
        for (chunk, _), last in self._last.items():
            for start in [begin for begin in last if (chunk, begin) in places]:
                del last[start]

    # --- the log ----------------------------------------------------------------------------------

    def report(self) -> Iterator[Note]:
        """Log news, unless a line was logged a short while ago."""
        if self._news and not self._is_quiet:
            self._is_quiet = True
            yield self._line()

    def look(self) -> Iterator[Note]:
        """Log all news in one line; called periodically."""
        self._is_quiet = bool(self._news)
        if self._news:
            yield self._line()

    def _line(self) -> Note:
        (key, rank, number, flaw), more = self._news[0], len(self._news) - 1
        self._news = []
        what = f"round {number}" if rank is None else f"push {number} of rank {rank}"
        others = f"; and {more} more" if more else ""
        return Note("warning", f"store {self._store!r}: {what} dropped: {describe(key, flaw)}{others}")


class Stall(NamedTuple):
    """The oldest open round of a store."""

    store: str
    key: str
    number: int
    age_s: float
    missing: tuple[int, ...]
    who: str
    """These ranks and their state, in words."""


class StragglerLog:
    """Remembers the rounds that were logged, so that each is logged once."""

    def __init__(self) -> None:
        self._told: dict[str, Stall] = {}
        """Store -> its stall when it was logged."""

    def look(self, oldest: Iterable[Stall]) -> Iterator[Note]:
        """Log news of the oldest open rounds, one for each store that has any."""
        now = {stall.store: stall for stall in oldest if stall.age_s >= STALL_AFTER_S and stall.missing}
        told = {}
        for store, stall in now.items():
            before = told[store] = self._told.get(store, stall)
            is_new = before is stall or before.missing != stall.missing
            if is_new or stall.age_s >= 2 * before.age_s:
                told[store] = stall
                yield Note(
                    "warning",
                    f"store {store!r}: round {stall.number} of key {stall.key[:64]!r} has been open "
                    f"for {stall.age_s:.0f} s and waits for {stall.who}",
                    {**stall._asdict(), "age_s": round(stall.age_s, 3), "missing": list(stall.missing)},
                )
        for store in self._told.keys() - now.keys():
            yield Note("warning", f"store {store!r}: rounds close again")
        self._told = told
