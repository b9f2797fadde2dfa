"""Resynchronisation of a worker's stores after a rollback.

What it had asked for is void, and so is all that it counted: its keys lie elsewhere now, at versions
that it has left behind. So a store *rejoins*: it opens itself anew, finds its keys, and numbers its
pushes by what the servers say this rank owes. Calls that come meanwhile wait. Then the user is told,
once: his calls that were under way end with :class:`~kvps.errors.EpochChanged`; without any, the next
one does. A store that knew no key has nothing to tell, and its calls are made again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvps.core.worker.connection import Request
from kvps.core.worker.operations.base import Conversation
from kvps.core.worker.operations.checkpoint import recount
from kvps.core.worker.quiesce import DeferredCall
from kvps.core.worker.store import WorkerStore
from kvps.errors import EpochChanged
from kvps.phrases import some_of

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


def rejoin(book: WorkerStore, names: tuple[str, ...]) -> Conversation:
    """Open the store anew, and count from what this rank owes; return the version of each key.

    ``names`` are the keys that this rank knew; another epoch may begin before they are found again.
    """
    book.forget()
    yield [Request(server, book.opened) for server in range(book.servers)]
    return (yield from recount(book, names))


def epoch_changed(book: WorkerStore, epoch: int, one: StoreResync) -> EpochChanged:
    """Return what the user is told."""
    moved = [
        f"{name!r} {version} -> {one.after.get(name, 'absent')}"
        for name, version in one.before.items()
    ]
    return EpochChanged(
        f"a server was lost, and all servers returned to the last checkpoint (epoch {epoch}): keys "
        f"of store {book.opened.store!r} went back ({some_of(moved, NAMED_MAX)}). What was "
        "pushed since is void, and calls under way were not carried out. Pull the weights and go on "
        "from there",
        one.before,
        one.after,
        has_optimizer=book.optimized.number >= one.optimize_calls,
    )
