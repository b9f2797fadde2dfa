"""Embedding tables on a server: declaration, pushes and pulls by id.

A table has one key, of which every server holds one element in a chunk of its own: how many rows of
the table are there. So the table has a span, and with it the history of any key: versions, numbers of
pushes, rounds, quorums, staleness, who waits. What differs is a gradient, which is ids and rows
(:class:`TableGradient`), and that the rows (:class:`~kvps.core.embedding.table.EmbeddingRows`) are moved by it.

An id belongs to one server. Each server has its share of every push, also an empty one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvps.core.embedding.id_hash import Ids, Initializer, servers_of
from kvps.core.embedding.spec import EmbeddingSpec, spec_of
from kvps.core.embedding.table import EmbeddingRows
from kvps.core.gradients import DenseGradient
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.placement import EMBEDDING
from kvps.core.server.chunks.rounds import PendingUpdate, Span
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.store import ServerStore, Shard
from kvps.dtypes import BY_ID, BY_NAME, summed_in
from kvps.errors import ConfigError, Mismatch, ProtocolError
from kvps.protocol.stores import Field, Piece
from kvps.protocol.values import Embed, Export, Exported, PullIds, PushIds
from kvps.tensors import dtype_of, from_frame, to_frame

EXPORT_BYTES = 32 << 20
"""Maximum bytes of one frame in an answer to EXPORT."""


class TableGradient(DenseGradient):
    """A gradient of some rows of a table; as a dense gradient it is the table's one element here."""

    __slots__ = ("ids", "rows")

    def __init__(self, ids: Ids, rows: torch.Tensor) -> None:
        super().__init__([torch.zeros(1)])
        self.ids = ids
        """int64 [k], ascending, each once."""
        self.rows = rows
        """[len(ids), dim]."""


def recipe_of(message: Embed) -> EmbeddingSpec:
    """Return the specification that a peer sent, checked.

    Raises:
        ConfigError: naming what cannot be.
    """
    return EmbeddingSpec(
        message.dim,
        BY_ID[message.dtype].name,
        Initializer(message.init, message.scale),
        message.seed,
        message.admit,
        message.max_age,
        message.max_rows,
        HyperParams.from_wire(message.optimizer, message.numbers),
    ).check()


def embed(store: ServerStore, key: str, recipe: EmbeddingSpec, server: int, servers: int) -> Piece:
    """Make a table on this server, or find the one that is there; return where it is.

    Raises:
        Mismatch: if there is one by another recipe. ConfigError: if the store can have none.
        ProtocolError: if the key is none of a table's. In all these cases nothing is changed.
    """
    if not key.startswith(EMBEDDING):
        raise ProtocolError(f"key {key!r:.60}: the key of a table begins with {EMBEDDING!r}")
    if store.drops is not None:
        raise ConfigError(
            f"store {store.name!r} looks whether gradients are finite, which tables do not; create "
            "one with on_nonfinite='apply' for tables"
        )
    shard = store.shards.get(key)
    if shard is None:
        return _make(store, key, recipe, server, servers)
    (piece,) = shard.pieces
    there = store.embedding_at(piece).recipe
    if difference := there.difference(recipe):
        raise Mismatch(
            f"table {name_of(key)!r} of store {store.name!r} has {difference} "
            f"{getattr(there, difference)!s:.100}, asked for was "
            f"{getattr(recipe, difference)!s:.100}; give the same arguments on every worker"
        )
    return piece


def _make(store: ServerStore, key: str, recipe: EmbeddingSpec, server: int, servers: int) -> Piece:
    rows = EmbeddingRows(recipe, servers)  # if it cannot be made, nothing was
    store.check_room({key: ("int64", 1)})
    (piece,) = store.slab("int64").place(key, 1, (1,))
    chunk = store.chunk_at(piece)
    chunk.embedding = rows
    chunk.writable().zero_()
    chunk.fill(piece.start)
    store.shards[key] = Shard(key, spec_of(servers), server, 1, (piece,), call=0)
    return piece


def name_of(key: str) -> str:
    """Return the user's name of the table of ``key``."""
    return key.removeprefix(EMBEDDING)


def embedding_of(chunk: Chunk) -> EmbeddingRows:
    """Return the table whose element a chunk holds.

    Raises:
        ProtocolError: if it is none's.
    """
    if chunk.embedding is None:
        raise ProtocolError(f"chunk {chunk.number} holds keys, and no embedding table")
    return chunk.embedding


# --- pushes ---------------------------------------------------------------------------------------


def gradient_of(
    chunk: Chunk, message: PushIds, payload: Sequence[memoryview], server: int, servers: int
) -> TableGradient:
    """Return the gradient that was pushed, checked.

    Raises:
        Mismatch: for another element type or length of rows than the table's.
        ProtocolError: for ids that are not in order, or of another server.
    """
    recipe = embedding_of(chunk).recipe
    dtype = BY_ID[message.dtype].name
    if dtype not in (recipe.dtype, summed_in(recipe.dtype)) or message.dim != recipe.dim:
        raise Mismatch(
            f"chunk {chunk.number} is a table of {recipe.dtype}[{recipe.dim}], pushed were rows of "
            f"{dtype}[{message.dim}]"
        )
    if not message.count:
        return TableGradient(
            np.empty(0, np.int64), from_frame(memoryview(b""), dtype).view(0, recipe.dim)
        )
    ids = ids_of(payload[0], server, servers)
    if (ids[1:] <= ids[:-1]).any():
        raise ProtocolError(
            f"chunk {chunk.number}: the {len(ids)} ids of a push are not in ascending order, each once"
        )
    return TableGradient(ids, from_frame(payload[1], dtype).view(-1, recipe.dim))


def ids_of(frame: memoryview, server: int, servers: int) -> Ids:
    """Return the ids in a frame.

    Raises:
        ProtocolError: if the rows of some are not on this server.
    """
    ids = from_frame(frame, "int64").numpy().copy()  # what was checked, its sender must not change
    foreign = servers_of(ids, servers) != server
    if foreign.any():
        raise ProtocolError(
            f"{np.count_nonzero(foreign)} of {len(ids)} ids belong on other servers than {server}, "
            f"the first of them {ids[foreign][0]}"
        )
    return ids


def update(chunk: Chunk, span: Span, due: PendingUpdate) -> int:
    """Update the rows of a table by one round or one push; return the number of new rows.

    The span's version becomes one higher after that.
    """
    rows = embedding_of(chunk)
    before = len(rows)
    ids, total = summed([part for part in due.sum.parts if isinstance(part, TableGradient)], rows)
    if due.sum.divisor != 1:
        total.div_(due.sum.divisor)
    span.step += 1
    rows.push(ids, total, version=span.version + 1, step=span.step)
    chunk.writable()[span.start] = len(rows)
    return len(rows) - before


def summed(parts: Sequence[TableGradient], rows: EmbeddingRows) -> tuple[Ids, torch.Tensor]:
    """Return the sum of gradients, added up in their order, in memory of its own."""
    if len(parts) == 1:
        return parts[0].ids, parts[0].rows.to(rows.summed_in, copy=True)
    ids = np.unique(np.concatenate([part.ids for part in parts]))
    total = torch.zeros((len(ids), rows.recipe.dim), dtype=rows.summed_in)
    for part in parts:
        places = torch.from_numpy(np.searchsorted(ids, part.ids))
        total.index_add_(0, places, part.rows.to(rows.summed_in))
    return ids, total


# --- pulls and exports ------------------------------------------------------------------------------

ANSWER_BYTES = 64 << 20
"""Maximum bytes of one payload frame."""


def asked_ids(
    chunk: Chunk, message: PullIds, payload: Sequence[memoryview], server: int, servers: int
) -> Ids:
    """Return the ids of a pull, checked as :func:`ids_of` does.

    Raises:
        ProtocolError: also if their rows do not fit in one frame.
    """
    rows = embedding_of(chunk)
    size = message.count * rows.recipe.dim * BY_NAME[rows.recipe.dtype].itemsize
    if size > ANSWER_BYTES:
        raise ProtocolError(
            f"chunk {chunk.number}: {message.count} rows are {size} octets, and an answer has "
            f"{ANSWER_BYTES} at most; ask for fewer at once"
        )
    if not message.count:
        return np.empty(0, np.int64)
    return ids_of(payload[0], server, servers)


def exported(seq: int, chunk: Chunk, message: Export) -> tuple[Exported, tuple[memoryview, ...]]:
    """Return the answer to EXPORT, and its payload.

    Raises:
        ProtocolError: for no rows.
    """
    rows = embedding_of(chunk)
    if not message.count:
        raise ProtocolError(f"chunk {chunk.number}: an export of no rows")
    widest = max(8, rows.recipe.dim * 8)  # no element is longer
    limit = min(message.count, max(1, EXPORT_BYTES // widest))
    block = rows.block(message.start, limit, message.since, with_state=message.state)
    count = len(block.ids)
    columns = {name: column.reshape(-1) for name, column in block.columns.items()}
    fields = tuple(
        [Field(name, dtype_of(column).id, column.numel()) for name, column in columns.items()]
    )
    answer = Exported(seq, block.next, count, fields)
    if not count:
        return answer, ()
    heads = (torch.from_numpy(block.ids), torch.from_numpy(block.stamps))
    return answer, tuple([to_frame(tensor) for tensor in (*heads, *columns.values())])
