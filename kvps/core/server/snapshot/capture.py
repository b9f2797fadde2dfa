"""Capture of a store into a snapshot, and its restoration.

A store that comes back from a snapshot holds the same values with the same histories, but not in the
same places: keys are placed anew, as if they had been declared one after another. So a snapshot may
come from servers of another number, or join values that were loaded by different calls.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import torch

from kvps.core.optim.torch_rules import create
from kvps.core.placement import EMBEDDING
from kvps.core.server.chunks.slab import Chunks
from kvps.core.server.snapshot import capture_tables
from kvps.core.server.snapshot.capture_tables import FilledTables
from kvps.core.server.snapshot.elements import REST, history_of, put, states_of
from kvps.core.server.snapshot.model import (
    JoinsSnapshot,
    KeySnapshot,
    SnapshotPart,
    SpanHistory,
    StoreSnapshot,
)
from kvps.core.server.store import Run, ServerStore, Setting, Shard
from kvps.errors import Mismatch, StorageError
from kvps.protocol.stores import Piece


def snapshot_of(store: ServerStore, chunks: Chunks) -> StoreSnapshot:
    """Return the contents of a store; the caller freezes its tensors."""
    histories: dict[int, SpanHistory] = {}
    """id(span) -> its history, shared by all of its keys."""
    keys = [
        KeySnapshot(name, shard.spec, shard.call, _portions(shard, chunks, histories))
        for name, shard in store.shards.items()
        if shard.ready and not name.startswith(EMBEDDING)
    ]
    return StoreSnapshot(
        store.opened,
        store.hyper,
        store.sent_optimizer.value,
        store.sent_rate.value,
        store.sent_optimizer.calls,
        store.sent_rate.calls,
        tuple(keys),
        store.sent_optimizer.after,
        store.sent_rate.after,
        JoinsSnapshot(store.joins.over, dict(store.joins.last), dict(store.joins.made)),
        tuple(
            [
                capture_tables.snapshot_of(shard, chunks.by_number[shard.pieces[0].chunk])
                for name, shard in store.shards.items()
                if name.startswith(EMBEDDING)
            ]
        ),
    )


def _portions(shard: Shard, chunks: Chunks, histories: dict[int, SpanHistory]) -> tuple[SnapshotPart, ...]:
    portions = []
    for piece, offset in zip(shard.pieces, shard.offsets, strict=True):
        chunk, stop = chunks.by_number[piece.chunk], piece.start + piece.size
        span = next(chunk.spans_in(piece.start, stop))
        history = histories.get(id(span))
        if history is None:
            history = histories[id(span)] = history_of(span)
        weight = chunk.buffer.tensor[piece.start : stop]
        portions.append(SnapshotPart(offset, history, weight, states_of(chunk, piece.start, stop)))
    return tuple(portions)


def revive(store: ServerStore, chunks: Chunks, snapshot: StoreSnapshot, filled: FilledTables) -> list[Piece]:
    """Give a store the keys of ``snapshot``, and its optimizer if it has none; return their pieces.

    Keys that the store has and the snapshot has not are left as they are. Of tables this server takes the
    rows whose ids are its own, which :func:`~kvps.core.server.snapshot.capture_tables.filled` has made.

    Raises:
        Mismatch: if a key, a table or the optimizer is another here; nothing is changed.
        StorageError: if a key cannot be put where it lies; nothing is changed.
        Overload: if there is no room; nothing is changed.
    """
    for key in snapshot.keys:
        _check(store, key)
    for table in snapshot.tables:
        capture_tables.check(store, table)
    new = [key for key in snapshot.keys if key.name not in store.shards]
    store.check_room({key.name: (key.spec.dtype, _count(key)) for key in new})
    if snapshot.hyper is not None:
        _optimize(store, snapshot)
    for dtype, count in _counts(new).items():
        store.slab(dtype).expect(count)
    written: list[Piece] = []
    for key in snapshot.keys:
        if key.name not in store.shards:
            _place(store, key)
        shard = store.shards[key.name]
        shard.call, shard.loading, shard.empty = max(shard.call, key.call), (-1, (0, 0)), {}
        _fill(store, chunks, shard, key)
        written += shard.pieces
    for table in snapshot.tables:
        rows = filled[store.name, table.key]
        written.append(capture_tables.revive(store, table, chunks, rows))
    return written


def _check(store: ServerStore, key: KeySnapshot) -> None:
    residuals = [part.state[REST] for part in key.portions if REST in part.state]
    if any(key.spec.dtype != "float32" or residual.dtype != torch.float32 for residual in residuals):
        raise StorageError(
            f"key {key.name!r} of store {store.name!r}: the checkpoint has rests for it ({REST}), which "
            "only float32 values have. The image was not written by kvps"
        )
    shard = store.shards.get(key.name)
    if shard is None:
        return
    if shard.spec != key.spec:
        raise Mismatch(
            f"key {key.name!r} of store {store.name!r} is {shard.spec}, and {key.spec} in the "
            "checkpoint; restore into the model that was saved"
        )
    saved = _neighbours([(part.start, len(part.weight)) for part in key.portions])
    held = _neighbours([(at, piece.size) for at, piece in zip(shard.offsets, shard.pieces, strict=True)])
    if saved != held:
        first = saved[0][0] if saved else shard.start
        raise StorageError(
            f"key {key.name!r} of store {store.name!r}: the checkpoint has {_count(key)} elements "
            f"from {first} for this server, which holds {shard.count} from {shard.start}; open the "
            "store with the bigarray_bound that it had"
        )
    if len(_runs(key)) > 1:
        raise StorageError(
            f"key {key.name!r} of store {store.name!r}: its parts have had different pushes; "
            "restore before you initialise it"
        )


def _optimize(store: ServerStore, snapshot: StoreSnapshot) -> None:
    assert snapshot.hyper is not None
    if store.hyper is None:
        store.sent_optimizer = Setting(snapshot.sent_hyper, snapshot.optimize_calls, snapshot.optimize_after)
        store.sent_rate = Setting(snapshot.sent_lr, snapshot.rate_calls, snapshot.rate_after)
        store.use(snapshot.hyper, create(snapshot.hyper))
    elif store.hyper.name != snapshot.hyper.name:
        raise Mismatch(
            f"store {store.name!r} has optimizer {store.hyper.name!r}, and the checkpoint "
            f"{snapshot.hyper.name!r}; set that one, or none, before you restore"
        )


def _place(store: ServerStore, key: KeySnapshot) -> None:
    """Give a key a place; one whose parts have different histories gets a piece for each."""
    parts, is_torn = [(part.start, len(part.weight)) for part in key.portions], len(_runs(key)) > 1
    runs = parts if is_torn else _neighbours(parts) or [(0, 0)]
    store.shards[key.name] = store.shard(key.name, key.spec, runs, as_pieces=is_torn)


def _neighbours(parts: list[Run]) -> list[Run]:
    """Return where elements lie: parts that lie side by side are one run."""
    runs: list[Run] = []
    for start, size in parts:
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + size)
        elif size:
            runs.append((start, size))
    return runs


def _fill(store: ServerStore, chunks: Chunks, shard: Shard, key: KeySnapshot) -> None:
    for piece, offset in zip(shard.pieces, shard.offsets, strict=True):
        chunk, stop = chunks.by_number[piece.chunk], piece.start + piece.size
        cuts = _cuts(key, offset, offset + piece.size)
        chunk.fill(piece.start)
        chunk.forget_changes(piece.start)
        weight = _joined([part.weight for part in cuts])
        put(store, chunk, piece.start, stop, weight, _states(cuts), cuts[0].history)


def _cuts(key: KeySnapshot, start: int, stop: int) -> list[SnapshotPart]:
    """Return the parts of ``key`` from element ``start`` to ``stop``."""
    cuts = []
    for part in key.portions:
        low, high = max(start, part.start) - part.start, min(stop, part.start + len(part.weight))
        high -= part.start
        if low < high:
            state = {name: row[low:high] for name, row in part.state.items()}
            cuts.append(SnapshotPart(part.start + low, part.history, part.weight[low:high], state))
    return cuts


def _states(cuts: list[SnapshotPart]) -> dict[str, torch.Tensor]:
    """Return the states of neighbours; none of the optimizer's where one of them was never updated.

    A chunk has states as soon as one of its keys was updated, so of two parts of a key that was not
    one may have some; they are as new, then.
    """
    names = cuts[0].state.keys() - {REST}
    if any(part.state.keys() - {REST} != names for part in cuts):
        names = set()
    states = {name: _joined([part.state[name] for part in cuts]) for name in names}
    if any(REST in part.state for part in cuts):
        rests = [part.state.get(REST, torch.zeros(len(part.weight), dtype=torch.float32)) for part in cuts]
        states[REST] = _joined(rests)
    return states


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _runs(key: KeySnapshot) -> list[SpanHistory]:
    """Return the histories of a key's parts, each once where neighbours have the same."""
    return [history for history, _ in groupby(key.portions, lambda part: part.history)]


def _count(key: KeySnapshot) -> int:
    return sum([len(part.weight) for part in key.portions])


def _counts(keys: list[KeySnapshot]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for key in keys:
        counts[key.spec.dtype] += _count(key)
    return counts
