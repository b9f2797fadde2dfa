"""The calls checkpoint() and restore(), which all ranks of a store make together, and the rejoin
after a rollback.

Either call begins at a barrier: before it, all pushes of all ranks are in. The scheduler is told by
every rank, so that each waits for the checkpoint to be complete; a rank that comes late, or asks
again, is answered with the one that was taken. A store is restored by rank 0, between two barriers.

:func:`candidates` decides which checkpoint that is: the newest that has the store. A checkpoint in
which the store was never pushed to is passed over for one in which it was, unless this job has
asked for it: a job that is about to restore its store may have written it, for the sake of another store.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from kvps import protocol as p
from kvps.core.worker.calls.base import Call, OnTimeout, Operation, Values, frozen
from kvps.core.worker.calls.collective import barrier
from kvps.core.worker.calls.keys import lookup
from kvps.core.worker.calls.resume import inherit
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import Step, read_versions
from kvps.core.worker.plan import ANY
from kvps.core.worker.store import WorkerStore
from kvps.errors import REFUSED, StorageError
from kvps.protocol.envelope import Packet

CHECKPOINT, RESTORE = "kvps.checkpoint", "kvps.restore"
"""The barriers at which these calls begin."""


@frozen
class TakeCheckpoint(Call):
    """Have a checkpoint taken, together with all ranks; finishes with its number."""

    title = "checkpoint()"
    on_timeout = OnTimeout.RESUME

    tag: str

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield from barrier(store, CHECKPOINT, f"checkpoint({self.tag!r})")
        # A replacement may pass without a number: it asks for the newest checkpoint that was granted.
        number = store.barriers.get(CHECKPOINT, 0)
        (answer,) = yield [Request(None, p.Checkpoint(store.label, self.tag, number))]
        assert isinstance(answer.message, p.Checkpointed)
        store.checkpointed = answer.message.cut
        return answer.message.cut


class Restored(NamedTuple):
    """The checkpoint that a store was restored from."""

    cut: int
    told: str = ""
    """The choice in words, on the rank that has chosen; "" on others."""
    is_odd: bool = False
    """There is a newer checkpoint, or one of a higher version."""


@frozen
class RestoreCheckpoint(Call):
    """Give the store the values of the newest checkpoint of ``tag`` that all servers have,
    together with all ranks.

    Finishes with a :class:`Restored`.
    """

    title = "restore()"
    on_timeout = OnTimeout.RESUME
    creates = True

    tag: str

    def run(self, store: WorkerStore, values: Values) -> Operation:
        store.restoring = f"restore({self.tag!r})" if self.tag else "restore()"
        try:
            return (yield from self._restore(store))
        finally:
            store.restoring = ""

    def _restore(self, store: WorkerStore) -> Operation:
        if (yield from barrier(store, RESTORE, store.restoring)):
            return Restored(store.restored)  # a predecessor made this call, and the job went on
        told, is_odd = "", False
        if store.rank == 0:
            try:
                answers = yield store.everywhere(p.Revive(store.name, self.tag, 0))
                there = _common(self.tag, answers)
                told, is_odd = yield from self._revive(store, there)
            except REFUSED as error:
                yield from barrier(store, RESTORE, failure=error)
                raise
        yield from barrier(store, RESTORE)
        yield from recount(store, tuple(store.keys))
        return Restored(store.restored, told, is_odd)

    def _revive(
        self, store: WorkerStore, there: dict[int, int]
    ) -> Generator[Step, list[Packet], tuple[str, bool]]:
        """Have the servers take the first candidate that all of them can read; return what to tell."""
        taken = candidates(there, is_any=bool(self.tag) or store.checkpointed in there)
        damaged: list[int] = []
        while True:
            cut, *older = taken
            try:
                yield store.everywhere(p.Revive(store.name, self.tag, cut))
            except StorageError:
                if self.tag or not older or there[cut] < 0:
                    raise
                damaged.append(cut)
                taken = older
                continue
            return _told(store.name, cut, there, damaged)


def recount(store: WorkerStore, names: tuple[str, ...]) -> Generator[Step, list[Packet], dict[str, int]]:
    """Find these keys as if for the first time; return their versions.

    Pushes are numbered from what this rank owes, and calls of all ranks from what the servers know. A key
    that is not there is not known any more.
    """
    store.keys.clear()
    yield from lookup(store, names)
    plan = store.plan(tuple(store.keys))
    read = yield from read_versions(store, plan, ANY, ANY)
    versions: dict[str, int] = {}
    yield from inherit(store)
    for key, parts in zip(plan.keys, read.by_key(), strict=True):
        key.number = key.heard = min((owed for _, owed in parts.values()), default=0)
        versions[key.name] = min((version for version, _ in parts.values()), default=0)
    return versions


def _common(tag: str, answers: list[Packet]) -> dict[int, int]:
    """Return the cuts that all servers have, and for each the version of the store; -1 if it lacks the store.

    Raises:
        StorageError: if there is none.
    """
    found: list[dict[int, int]] = []
    for answer in answers:
        assert isinstance(answer.message, p.Revived)
        held = [version - 1 for version in answer.message.versions]
        found.append(dict(zip(answer.message.cuts, held, strict=True)))
    common = frozenset[int].intersection(*map(frozenset, found))
    if not common:
        wanted = f"no checkpoint with tag {tag!r}" if tag else "no checkpoint"
        raise StorageError(
            f"{wanted} is complete on all {len(answers)} servers; `kvps checkpoint list DIR` shows "
            "what is there"
        )
    return {cut: found[0][cut] for cut in sorted(common)}


def candidates(there: dict[int, int], *, is_any: bool) -> list[int]:
    """Return the cuts to restore a store from, the best first; at least one.

    Args:
        there: cut -> the version of the store in it, -1 for a cut without the store.
        is_any: whether a cut will do in which the store was never pushed to.
    """
    least = max(there.values()) if max(there.values()) < 1 else 0 if is_any else 1
    return sorted([cut for cut, version in there.items() if version >= least], reverse=True)


def _told(store: str, cut: int, there: dict[int, int], damaged: list[int]) -> tuple[str, bool]:
    """Return a line on the choice of ``cut``, and whether there is something odd about it."""
    text = f"store {store!r} continues from checkpoint {cut}, at version {there[cut]}"
    newer = [number for number in there if number > cut and number not in damaged]
    higher = [number for number, version in there.items() if version > there[cut] and number not in damaged]
    if damaged:
        text += f"; checkpoints {damaged} could not be read"
    if newer:
        text += f"; passed over checkpoints {newer}, which do not have the store or no push to it"
    if higher:
        versions = ", ".join(f"{number} (version {there[number]})" for number in higher[:4])
        text += (
            f"; an older checkpoint is further: {versions}. Give it a tag, or remove the newer "
            "ones, to take it"
        )
    older = [number for number in there if number < cut and number not in higher and there[number] >= 0]
    if older:
        text += f"; older checkpoints: {older[-4:]}"
    return text, bool(damaged or newer or higher)


@frozen
class RejoinStore(Call):
    """Open the store anew, count from the versions of the servers; finishes with each key's version.

    The core makes it itself, when the servers have returned to a cut.
    """

    title = "the return to a checkpoint"

    keys: tuple[str, ...]
    """The keys that this rank knew; another epoch may begin before they are found again."""

    def run(self, store: WorkerStore, values: Values) -> Operation:
        store.forget()
        yield store.everywhere(store.opened)
        return (yield from recount(store, self.keys))
