"""Capture of an embedding table into a snapshot, and its restoration.

A server takes the rows whose ids are its own from whatever snapshots hold them: those of as many servers,
or of any other number. Rows come back in blocks, so that the memory for them is needed once, and so that a
server speaks in between: it is taken for lost when it is silent. They take their place when all are there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

import torch

from kvps.core.embedding.id_hash import servers_of
from kvps.core.embedding.stored import StoredRows, loaded
from kvps.core.embedding.table import EmbeddingRows, TableState
from kvps.core.server.chunks.slab import Chunk, Chunks
from kvps.core.server.rules import table as embedding_rows
from kvps.core.server.snapshot.elements import history_of, put_history
from kvps.core.server.snapshot.model import RowsSnapshot, StoreSnapshot, TableSnapshot
from kvps.core.server.store import ServerStore, Shard
from kvps.errors import Mismatch
from kvps.protocol.stores import Piece

BLOCK_BYTES = 1 << 20
"""Bytes of the rows that are restored at once."""

FilledTables = dict[tuple[str, str], EmbeddingRows]
"""(store, key) -> the rows of a table."""


def snapshot_of(shard: Shard, chunk: Chunk) -> TableSnapshot:
    """Return a table as :meth:`~kvps.core.server.chunks.slab.Chunk.keep` has kept it."""
    rows, kept = chunk.table, chunk.kept
    assert kept is not None, "the chunk of an image is kept"
    (span,) = chunk.spans
    return TableSnapshot(shard.key, rows.recipe, kept.lr, history_of(span), (rows_of(rows, kept),))


def rows_of(rows: EmbeddingRows, kept: TableState) -> RowsSnapshot:
    """Return the rows of a frozen table."""
    used = len(kept.ids)
    nothing = torch.empty((0, 0), dtype=torch.uint8)
    return RowsSnapshot(
        torch.from_numpy(kept.ids),
        torch.from_numpy(kept.stamps),
        {
            name: tuple(
                [arena.columns[name][: used - arena.start] for arena in kept.arenas if arena.start < used]
            )
            for name in rows.arenas.columns
        },
        nothing if kept.counts is None else torch.from_numpy(kept.counts),
        kept.counted,
    )


def filled(stores: Iterable[StoreSnapshot], chunks: Chunks) -> Generator[None, None, FilledTables]:
    """Make the rows of the tables of some stores that belong on this server; return them.

    It yields after every block.

    Raises:
        StorageError: if rows cannot be read, or cannot be put on the disk.
    """
    found: FilledTables = {}
    taken = 0
    for store in stores:
        for table in store.tables:
            rows = found[store.name, table.key] = EmbeddingRows(table.recipe, chunks.servers, chunks.tier)
            rows.set_rate(table.lr)
            for part in table.parts:
                if part.counts.numel():
                    rows.count_in(part.counts.numpy(), part.counted)
                at_once = max(1, BLOCK_BYTES // rows.arenas.record_bytes)
                for begin in range(0, len(part.ids), at_once):
                    if taken and taken + at_once * rows.arenas.record_bytes > BLOCK_BYTES:
                        yield
                        taken = 0
                    stop = min(begin + at_once, len(part.ids))
                    _put(rows, part, begin, stop, chunks)
                    taken += (stop - begin) * rows.arenas.record_bytes
    return found


def check(store: ServerStore, table: TableSnapshot) -> None:
    """Check that a store can take a table.

    Raises:
        Mismatch: if it has one of this name by another recipe.
    """
    shard = store.shards.get(table.key)
    if shard is None:
        return
    recipe = store.chunk_at(shard.pieces[0]).table.recipe
    if difference := recipe.difference(table.recipe):
        raise Mismatch(
            f"table {embedding_rows.name_of(table.key)!r} of store {store.name!r} has another {difference} "
            "in the checkpoint; make it as it was made then"
        )


def revive(store: ServerStore, table: TableSnapshot, chunks: Chunks, rows: EmbeddingRows) -> Piece:
    """Make a table of a store from a snapshot's, or replace it, by its rows; return its piece."""
    piece = embedding_rows.embed(store, table.key, table.recipe, chunks.server, chunks.servers)
    chunk = store.chunk_at(piece)
    before = len(chunk.table)
    store.replace_rows(chunk, rows)
    store.grow((len(rows) - before) * rows.arenas.counted_row_bytes)
    chunk.writable()[piece.start] = len(rows)
    (span,) = chunk.spans
    put_history(span, table.history)
    return piece


def _put(rows: EmbeddingRows, part: RowsSnapshot, begin: int, stop: int, chunks: Chunks) -> None:
    ids, stamps = part.ids[begin:stop].numpy(), part.stamps[begin:stop].numpy()
    is_mine = (stamps > 0) & (servers_of(ids, chunks.servers) == chunks.server)
    mask = torch.from_numpy(is_mine)
    columns = {name: _within(column, begin, stop)[mask] for name, column in part.columns.items()}
    rows.put(ids[is_mine], stamps[is_mine], columns)


def _within(column: tuple[torch.Tensor | StoredRows, ...], start: int, stop: int) -> torch.Tensor:
    """Return the rows from ``start`` to ``stop`` of tensors that lie end to end."""
    parts, at = [], 0
    for tensor in column:
        low, high = max(start - at, 0), min(stop - at, len(tensor))
        if low < high:
            parts.append(loaded(tensor[low:high]))
        at += len(tensor)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
