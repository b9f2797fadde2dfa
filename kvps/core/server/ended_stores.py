"""The end of stores: which ranks have closed a store, and when no rank uses it any more.

A store *ends* when every worker that takes part has closed it or left. If it is created again under its name, it
begins anew: that is its next *life*, counted from 0. A rank that creates it again while others still have the former
life open waits for them. A process that took the place of a lost worker finds the life that is there.

The values of a store that has ended stay for :data:`KEPT_S`, or until a store is made: a worker may have failed just
after it closed the store, and its replacement goes through the script once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
