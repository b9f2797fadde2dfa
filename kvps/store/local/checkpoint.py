"""Checkpoints of a store within one process.

It writes what a single server of a job without a name would, so that ``kvps checkpoint`` shows, checks
and exports it like any other; and it reads what servers wrote, however many they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kvps import __version__, config
from kvps.checkpoint.directory import CheckpointDirectory
from kvps.checkpoint.manifest import ImageFile, Manifest, holdings, image_name, now_in_words
from kvps.core.embedding.table import EmbeddingRows
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.placement import BIGARRAY_BOUND, EMBEDDING
from kvps.core.server.snapshot.capture_tables import rows_of
from kvps.core.server.snapshot.model import (
    KeySnapshot,
    Snapshot,
    SnapshotPart,
    SpanHistory,
    StoreSnapshot,
    TableSnapshot,
)
from kvps.dtypes import Spec
from kvps.errors import ConfigError, Mismatch, StorageError
from kvps.protocol.stores import Open
from kvps.tensors import TORCH


@dataclass(slots=True)
class Kept:
    """One key of a store: its value, a flat row, and what was done to it."""

    spec: Spec
    row: torch.Tensor
    version: int = 0
    step: int = 0
    """The number of updates by the optimizer."""
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """The optimizer's, flat rows."""


def directory() -> CheckpointDirectory:
    """Return where checkpoints lie.

    Raises:
        ConfigError: if nobody has said where.
    """
    folder = config.checkpoint_dir()
    if folder is None:
        raise ConfigError("no place for checkpoints: set KVPS_CHECKPOINT_DIR to a directory")
    return CheckpointDirectory(folder, server=0)


def keep(
    name: str,
    hyper: HyperParams | None,
    keys: Mapping[str, Kept],
    tag: str,
    tables: tuple[TableSnapshot, ...] = (),
) -> int:
    """Write a store as a checkpoint of its own; return its number.

    Raises:
        ConfigError: without a place for it. StorageError: if it cannot be written.
    """
    place = directory()
    cut = place.highest() + 1
    snapshot = Snapshot(0, 1, (_store_snapshot(name, hyper, keys, tables),))
    written = place.write(cut, snapshot)
    try:
        place.commit(
            Manifest(
                cut=cut,
                job=bytes(16),
                epoch=0,
                workers=1,
                version=__version__,
                images=(ImageFile(image_name(0, 1), written.size, written.sha256),),
                stores=holdings(snapshot),
                tag=tag,
                written=now_in_words(),
            )
        )
    except StorageError:
        place.drop(cut)
        raise
    return cut


def _store_snapshot(
    name: str,
    hyper: HyperParams | None,
    keys: Mapping[str, Kept],
    tables: tuple[TableSnapshot, ...],
) -> StoreSnapshot:
    opened = Open(name, "sync", 0, True, "wait", BIGARRAY_BOUND)
    rate = hyper.number("lr") if hyper is not None else 0.0
    snapshots = tuple([_key_snapshot(key, kept) for key, kept in keys.items()])
    calls = int(hyper is not None)
    return StoreSnapshot(opened, hyper, hyper, rate, calls, 0, snapshots, tables=tables)


def _key_snapshot(name: str, kept: Kept) -> KeySnapshot:
    history = SpanHistory(kept.version, kept.step, {0: kept.version}, {})
    state = {title: row.cpu() for title, row in kept.state.items()}
    portions = (SnapshotPart(0, history, kept.row.cpu(), state),) if kept.spec.count else ()
    return KeySnapshot(name, kept.spec, 0, portions)


def table_snapshot(name: str, rows: EmbeddingRows, pushes: int) -> TableSnapshot:
    """Return a table that has had so many pushes."""
    kept, release = rows.keep()
    release()  # nobody pushes before this process has written it
    history = SpanHistory(pushes, pushes, {0: pushes}, {})
    return TableSnapshot(EMBEDDING + name, rows.recipe, kept.lr, history, (rows_of(rows, kept),))


def read(
    name: str, tag: str | None
) -> tuple[int, HyperParams | None, dict[str, Kept], dict[str, TableSnapshot]]:
    """Return the number of the newest checkpoint (of ``tag``), and what this store was in it.

    Raises:
        ConfigError: without a place for checkpoints.
        StorageError: if there is none that is whole, or it has no such store.
    """
    place = directory()
    manifest = place.find(tag)
    snapshot = place.load(manifest, 0, 1)
    found = next((store for store in snapshot.stores if store.name == name), None)
    if found is None:
        names = ", ".join(repr(store.name) for store in snapshot.stores) or "none"
        raise StorageError(f"checkpoint {manifest} has no store {name!r}; it has {names}")
    tables = {table.key.removeprefix(EMBEDDING): table for table in found.tables}
    return manifest.cut, found.hyper, {key.name: _kept(key) for key in found.keys}, tables


def _kept(key: KeySnapshot) -> Kept:
    """Put the portions of a key together; where they differ, it stands where the last one does."""
    if not key.portions:
        return Kept(key.spec, torch.empty(0, dtype=TORCH[key.spec.dtype]))
    histories = [part.history for part in key.portions]
    titles = set.intersection(*[set(part.state) for part in key.portions])
    state = {title: torch.cat([part.state[title] for part in key.portions]) for title in titles}
    return Kept(
        key.spec,
        torch.cat([part.weight for part in key.portions]),
        min(history.version for history in histories),
        min(history.step for history in histories),
        state,
    )


def demand_same(name: str, key: str, here: Spec, there: Spec) -> None:
    """Check that a key can take a value that was kept.

    Raises:
        Mismatch: if it is of another shape or type.
    """
    if here != there:
        raise Mismatch(
            f"key {key!r} of store {name!r} is {here}, and {there} in the checkpoint; restore into "
            "the model that was saved"
        )
