"""Resynchronisation of a worker's stores after a rollback.

What it had asked for is void, and so is all that it counted: its keys lie elsewhere now, at versions
that it has left behind. So a store *rejoins*: it opens itself anew, finds its keys, and numbers its
pushes by what the servers say this rank owes. Calls that come meanwhile wait. Then the user is told,
once: his calls that were under way end with :class:`~kvps.errors.EpochChanged`; without any, the next
one does. A store that knew no key has nothing to tell, and its calls are made again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvps.core.worker.quiesce import DeferredCall
from kvps.core.worker.store import WorkerStore
from kvps.errors import EpochChanged

NAMED_MAX = 3
"""How many keys the text names."""


@dataclass(slots=True)
class StoreResync:
    """One store on its way into a new epoch."""

    before: dict[str, int]
    """By key, the version that this rank had seen."""
    optimize_calls: int
    """How often it had set the optimizer."""
    held: list[DeferredCall] = field(default_factory=list)
    """Calls that were under way, and that came since."""
    after: dict[str, int] = field(default_factory=dict)
    """By key, the version that the servers have now."""


def epoch_changed(store: WorkerStore, epoch: int, one: StoreResync) -> EpochChanged:
    """Return what the user is told."""
    moved = [
        f"{name!r} {version} -> {one.after.get(name, 'absent')}"
        for name, version in one.before.items()
    ]
    more = f" and {len(moved) - NAMED_MAX} more" if len(moved) > NAMED_MAX else ""
    return EpochChanged(
        f"a server was lost, and all servers returned to the last checkpoint (epoch {epoch}): keys "
        f"of store {store.name!r} went back ({', '.join(moved[:NAMED_MAX])}{more}). What was "
        "pushed since is void, and calls under way were not carried out. Pull the weights and go on "
        "from there",
        one.before,
        one.after,
        has_optimizer=store.optimized.number >= one.optimize_calls,
    )
