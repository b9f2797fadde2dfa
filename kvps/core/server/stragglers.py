"""Log lines about rounds that stay open: when one begins to wait, changes or ends.

A round is open from the first push on. A round that stays open waits for ranks that are slow, hang or are
lost. The log should tell an operator which ranks, and since when, but not every second. What goes on is said
again when it has become twice as old.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvps.core.effects import Note

STALL_AFTER_S = 10.0
"""Seconds that a round may be open before it is logged."""


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
    """Remembers what was logged, so that it is logged once."""

    def __init__(self) -> None:
        self._told: dict[str, Stall] = {}
        """Store -> its stall when it was logged."""

    def look(self, oldest: Iterable[Stall]) -> Iterator[Note]:
        """Log what is new about the oldest open rounds, one for each store that has any."""
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
