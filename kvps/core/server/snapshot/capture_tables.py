"""From an embedding table on a server to its image, and back.

A server takes the rows whose ids are its own from whatever images hold them: those of as many servers,
or of any other number. Rows come back in blocks, so that the memory for them is needed once.
"""

from __future__ import annotations

import torch

from kvps.core import by_ids
from kvps.core.embedding import Embedding, Kept
from kvps.core.ids import servers_of
from kvps.core.image import History, RowsImage, TableImage
from kvps.core.namespace import Namespace, Shard
from kvps.core.rounds import Span
from kvps.core.slab import Chunk
from kvps.errors import Mismatch
from kvps.messages import Piece

BLOCK_ROWS = 1 << 16
"""How many rows are put back at once."""


def history_of(span: Span) -> History:
    """Return what was done to the elements of a span."""
    return History(span.version, span.step, dict(span.pushed), dict(span.head_start))


def image_of(shard: Shard, chunk: Chunk) -> TableImage:
    """Return a table as :meth:`~kvps.core.slab.Chunk.keep` has kept it."""
    rows, kept = by_ids.embedding_of(chunk), chunk.kept
    assert kept is not None, "the chunk of an image is kept"
    (span,) = chunk.spans
    return TableImage(shard.key, rows.recipe, kept.lr, history_of(span), (rows_of(rows, kept),))


def rows_of(rows: Embedding, kept: Kept) -> RowsImage:
    """Return the rows that were kept."""
    used = len(kept.ids)
    nothing = torch.empty((0, 0), dtype=torch.uint8)
    return RowsImage(
        torch.from_numpy(kept.ids),
        torch.from_numpy(kept.stamps),
        {
            name: tuple(
                [one.columns[name][: used - one.start] for one in kept.arenas if one.start < used]
            )
            for name in rows.columns
        },
        nothing if kept.counts is None else torch.from_numpy(kept.counts),
        kept.counted,
    )


def filled(table: TableImage, server: int = 0, servers: int = 1) -> Embedding:
    """Return the rows of an image that belong on one server."""
    rows = Embedding(table.recipe, servers)
    rows.set_rate(table.lr)
    for part in table.parts:
        _put(rows, part, server, servers)
    return rows


def check(space: Namespace, table: TableImage) -> None:
    """Check that a store can take a table.

    Raises:
        Mismatch: if it has one of this name by another recipe.
    """
    shard = space.shards.get(table.key)
    if shard is None:
        return
    recipe = space.embedding_at(shard.pieces[0]).recipe
    if difference := recipe.difference(table.recipe):
        raise Mismatch(
            f"table {by_ids.name_of(table.key)!r} of store {space.name!r} has another {difference} in "
            "the checkpoint; make it as it was made then"
        )


def revive(space: Namespace, table: TableImage, server: int, servers: int) -> Piece:
    """Give a store a table as it was, in place of what it has; return its piece."""
    piece = by_ids.embed(space, table.key, table.recipe, server, servers)
    chunk = space.chunk_at(piece)
    before = len(by_ids.embedding_of(chunk))
    chunk.embedding = rows = filled(table, server, servers)
    space.grow((len(rows) - before) * rows.row_bytes)
    chunk.writable()[piece.start] = len(rows)
    (span,) = chunk.spans
    span.rounds.clear()  # what was pushed to other rows is void
    span.version, span.step = table.history.version, table.history.step
    span.pushed, span.head_start = dict(table.history.pushed), dict(table.history.head_start)
    return piece


def _put(rows: Embedding, part: RowsImage, server: int, servers: int) -> None:
    if part.counts.numel():
        rows.count_in(part.counts.numpy(), part.counted)
    for begin in range(0, len(part.ids), BLOCK_ROWS):
        stop = min(begin + BLOCK_ROWS, len(part.ids))
        ids, stamps = part.ids[begin:stop].numpy(), part.stamps[begin:stop].numpy()
        is_mine = (stamps > 0) & (servers_of(ids, servers) == server)
        mask = torch.from_numpy(is_mine)
        columns = {
            name: _within(column, begin, stop)[mask] for name, column in part.columns.items()
        }
        rows.put(ids[is_mine], stamps[is_mine], columns)


def _within(column: tuple[torch.Tensor, ...], start: int, stop: int) -> torch.Tensor:
    """Return the rows from ``start`` to ``stop`` of tensors that lie end to end."""
    found, at = [], 0
    for one in column:
        low, high = max(start - at, 0), min(stop - at, len(one))
        if low < high:
            found.append(one[low:high])
        at += len(one)
    return found[0] if len(found) == 1 else torch.cat(found)
