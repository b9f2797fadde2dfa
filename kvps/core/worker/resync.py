"""Resynchronisation of a worker's stores after a rollback.

All requests under way are void, and so is all that was counted: the keys lie elsewhere now, at earlier versions. So
a store *rejoins*: it opens itself anew, finds its keys, and numbers its pushes by what the servers say this rank
owes. Calls that come meanwhile wait. Then the user is told, once: calls that were under way end with
:class:`~kvps.errors.EpochChanged`; without any, the next call does. A store that knew no key has nothing to tell,
and its calls are made again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvps.core.worker.quiesce import DeferredCall
from kvps.core.worker.store import WorkerStore
from kvps.errors import EpochChanged
from kvps.phrases import some_of

NAMED_MAX = 3
"""Most keys that the text names."""


@dataclass(slots=True)
class StoreResync:
    """One store on its way into a new epoch."""

    before: dict[str, int]
    """Key -> the version that this rank had seen."""
    optimize_calls: int
    """Number of times that the optimizer was set, as far as this rank could know."""
    held: list[DeferredCall] = field(default_factory=list)
    """Calls that were under way, and calls that came since."""
    after: dict[str, int] = field(default_factory=dict)
    """Key -> the version that the servers have now."""


def epoch_changed(store: WorkerStore, epoch: int, resync: StoreResync) -> EpochChanged:
    """Return the error by which the user is told."""
    moved = [
        f"{name!r} {version} -> {resync.after.get(name, 'absent')}"
        for name, version in resync.before.items()
    ]
    return EpochChanged(
        f"a server was lost, and all servers rolled back to the last checkpoint (epoch {epoch}): "
        f"keys of store {store.name!r} changed ({some_of(moved, NAMED_MAX)}). Pushes since "
        "then are lost, and calls in flight were not carried out. Pull the weights and continue "
        "from there; front ends (Trainer, DistributedOptimizer, LocalSGD, DiLoCo) do so by themselves",
        resync.before,
        resync.after,
        has_optimizer=store.optimized.number >= resync.optimize_calls,
    )
