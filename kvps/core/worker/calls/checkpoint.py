"""The calls checkpoint() and restore(), which all ranks of a store make together, and the rejoin after a rollback.

Either call begins at a barrier: before it, all pushes of all ranks are in. The scheduler is told by
every rank, so that each waits for the checkpoint to be complete; a rank that comes late, or asks
again, is answered with the one that was taken. A store is restored by rank 0, between two barriers.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from kvps import protocol as p
from kvps.core.worker.calls.base import Call, OnTimeout, Operation, Values
from kvps.core.worker.calls.collective import barrier
from kvps.core.worker.calls.dense import inherit
from kvps.core.worker.calls.keys import lookup
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import Step, read_versions
from kvps.core.worker.store import WorkerStore
from kvps.errors import REFUSED, StorageError
from kvps.protocol.envelope import Packet

CHECKPOINT, RESTORE = "kvps.checkpoint", "kvps.restore"
"""The barriers at which these calls begin."""


@dataclass(frozen=True, slots=True)
class TakeCheckpoint(Call):
    """Have a checkpoint taken, together with all ranks; finishes with its number."""

    title = "checkpoint()"
    on_timeout = OnTimeout.RESUME

    tag: str

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield from barrier(store, CHECKPOINT, f"checkpoint({self.tag!r})")
        number = store.barriers[CHECKPOINT]
        (answer,) = yield [Request(None, p.Checkpoint(store.name, self.tag, number))]
        assert isinstance(answer.message, p.Checkpointed)
        return answer.message.cut


@dataclass(frozen=True, slots=True)
class RestoreCheckpoint(Call):
    """Give the store the values of the newest checkpoint of ``tag`` that all servers have, together with all ranks.

    Finishes with its number.
    """

    title = "restore()"
    on_timeout = OnTimeout.RESUME
    creates = True

    tag: str

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield from barrier(store, RESTORE, f"restore({self.tag!r})")
        if store.rank == 0:
            try:
                servers = range(store.servers)
                listing, name = p.Revive(store.name, self.tag, 0), store.name
                answers = yield [Request(server, listing) for server in servers]
                cut = _common(self.tag, [_cuts(answer) for answer in answers])
                yield [Request(server, p.Revive(name, self.tag, cut)) for server in servers]
            except REFUSED as error:
                yield from barrier(store, RESTORE, failure=error)
                raise
        yield from barrier(store, RESTORE)
        yield from recount(store, tuple(store.keys))
        return store.restored


def recount(
    store: WorkerStore, names: tuple[str, ...]
) -> Generator[Step, list[Packet], dict[str, int]]:
    """Find these keys as if for the first time; return their versions.

    Pushes are numbered from what this rank owes, and calls of all ranks from what the servers know. A key
    that is not there is not known any more.
    """
    store.keys.clear()
    yield from lookup(store, names)
    plan = store.plan(tuple(store.keys))
    read = yield from read_versions(store, plan, 0, 0)
    versions: dict[str, int] = {}
    yield from inherit(store)
    for key, parts in zip(plan.keys, read.by_key(), strict=True):
        key.number = key.heard = min((owed for _, owed in parts.values()), default=0)
        versions[key.name] = min((version for version, _ in parts.values()), default=0)
    return versions


def _cuts(answer: Packet) -> frozenset[int]:
    assert isinstance(answer.message, p.Revived)
    return frozenset(answer.message.cuts)


def _common(tag: str, cuts: list[frozenset[int]]) -> int:
    """Return the newest cut that all servers have.

    Raises:
        StorageError: if there is none.
    """
    common = frozenset.intersection(*cuts)
    if not common:
        wanted = f"no checkpoint with tag {tag!r}" if tag else "no checkpoint"
        raise StorageError(
            f"{wanted} is complete on all {len(cuts)} servers; `kvps checkpoint list DIR` shows "
            "what is there"
        )
    return max(common)


@dataclass(frozen=True, slots=True)
class RejoinStore(Call):
    """Open the store anew, and count from what the servers hold; finishes with the version of each key.

    The core makes it itself, when the servers have returned to a cut.
    """

    title = "the return to a checkpoint"

    keys: tuple[str, ...]
    """The keys that this rank knew; another epoch may begin before they are found again."""

    def run(self, store: WorkerStore, values: Values) -> Operation:
        store.forget()
        yield [Request(server, store.opened) for server in range(store.servers)]
        return (yield from recount(store, self.keys))
