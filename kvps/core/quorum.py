"""Which worker ranks a round waits for, as the newest view has it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quorum:
    """The worker ranks that rounds may have to wait for."""

    held: frozenset[int]
    """Held by a live worker (or not yet taken for the first time)."""
    lost: frozenset[int]
    """Lost: it did not leave, so its gradient is missing until a replacement brings it."""

    def required(self, on_worker_lost: str) -> frozenset[int]:
        """The ranks that a round of a store with this policy waits for."""
        # Asked for each push, so that nothing is made where nobody is lost.
        return self.held | self.lost if self.lost and on_worker_lost != "shrink" else self.held
