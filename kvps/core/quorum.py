"""The quorum: the worker ranks that a round waits for in the newest view."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Quorum:
    """The worker ranks that rounds may have to wait for."""

    held: frozenset[int]
    """Held by a live worker (or not yet taken for the first time)."""
    lost: frozenset[int]
    """Lost: it did not leave, so its gradient is missing until a replacement brings it."""
    away: frozenset[int] = frozenset()
    """Of a store: those that have joined, as they have run out of batches."""

    def required(self, on_worker_lost: str) -> frozenset[int]:
        """The ranks that a round of a store with this policy waits for."""
        members = self.members(on_worker_lost)
        return members - self.away if self.away else members

    def members(self, on_worker_lost: str) -> frozenset[int]:
        """The ranks that take part in a store with this policy, those that are away among them."""
        # Asked for each push, so that nothing is made where nobody is lost.
        return self.held | self.lost if self.lost and on_worker_lost != "shrink" else self.held

    @property
    def live(self) -> frozenset[int]:
        """The ranks whose clocks count."""
        return self.held - self.away if self.away else self.held

    def without(self, away: frozenset[int]) -> Quorum:
        """Return this quorum in a store that these ranks have joined."""
        return replace(self, away=away) if away else self
