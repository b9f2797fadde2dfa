"""Which worker ranks a round waits for, as the newest view has it."""

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
        return self.members(on_worker_lost) - self.away

    def members(self, on_worker_lost: str) -> frozenset[int]:
        """The ranks that take part in a store with this policy, those that are away among them."""
        return self.held if on_worker_lost == "shrink" else self.held | self.lost

    @property
    def live(self) -> frozenset[int]:
        """The ranks whose clocks count."""
        return self.held - self.away

    def without(self, away: frozenset[int]) -> Quorum:
        """Return this quorum in a store that these ranks have joined."""
        return replace(self, away=away) if away else self
