"""Embedding tables on a server: declaration, pushes and pulls by id.

A table has one key, of which every server holds one element in a chunk of its own: how many rows of the table
are there. So the table has a span, and with it the history of any key: versions, numbers of pushes, rounds,
quorums, staleness, waiting requests. A gradient is one of rows, numbered by their ids; it moves the rows
(:class:`~kvps.core.embedding.table.EmbeddingRows`), and the element only counts them.

An id belongs to one server. Each server has its share of every push, also an empty one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvps.core.embedding.id_hash import Initializer, servers_of
from kvps.core.embedding.spec import EmbeddingSpec, spec_of
from kvps.core.embedding.table import EmbeddingRows
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.placement import EMBEDDING
from kvps.core.row_gradients import RowGradient
from kvps.core.server.chunks.rounds import PendingUpdate, Span
from kvps.core.server.chunks.slab import Chunk, Chunks
from kvps.core.server.rules.rule import Rule
from kvps.core.server.store import ServerStore, Shard
from kvps.dtypes import BY_ID, summed_in
from kvps.errors import ConfigError, Mismatch, ProtocolError
from kvps.protocol.stores import Field, Piece
from kvps.protocol.values import Embed, Export, Exported, PullIds, Push, PushIds
from kvps.tensors import dtype_of, from_frame, to_frame

EXPORT_BYTES = 32 << 20
"""Maximum bytes of one frame in an answer to EXPORT."""


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
    """Create a table on this server, or find the existing table; return its place.

    Raises:
        Mismatch: if there is one by another recipe. ConfigError: if the store can have none.
        ProtocolError: if the key is none of a table's. In all these cases nothing is changed.
    """
    if not key.startswith(EMBEDDING):
        raise ProtocolError(f"key {key!r:.60}: the key of a table begins with {EMBEDDING!r}")
    if store.drops is not None:
        raise ConfigError(
            f"store {store.name!r} checks whether gradients are finite, which tables do not support; create "
            "a store with on_nonfinite='apply' for tables"
        )
    shard = store.shards.get(key)
    if shard is None:
        return _make(store, key, recipe, server, servers)
    (piece,) = shard.pieces
    there = store.embedding_at(piece).recipe
    if difference := there.difference(recipe):
        raise Mismatch(
            f"table {name_of(key)!r} of store {store.name!r} has {difference} "
            f"{getattr(there, difference)!s:.100}, but {getattr(recipe, difference)!s:.100} "
            f"was requested; give the same arguments on every worker"
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
    store.shards[key] = Shard(key, spec_of(servers), server, 1, (piece,), (server,), call=0)
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
        raise ProtocolError(f"chunk {chunk.number} holds keys, not an embedding table")
    return chunk.embedding


# --- pushes and pulls -------------------------------------------------------------------------------

ANSWER_BYTES = 64 << 20
"""Maximum bytes of one payload frame."""


class TableGradient(RowGradient):
    """A gradient of some rows of a table; in its chunk it stands for the table's one element."""

    __slots__ = ()

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class TableRows:
    """An embedding table as a server's rows, numbered by their ids."""

    chunk: Chunk
    rows: EmbeddingRows
    pieces: tuple[Piece, ...]
    """The one element that counts for all rows here."""
    server: int
    servers: int

    @classmethod
    def of(cls, chunks: Chunks, number: int) -> TableRows:
        """Return the table of a chunk.

        Raises:
            ProtocolError: if there is no such chunk, or it holds keys.
        """
        chunk = chunks.at(number)
        pieces = (Piece(number, 0, 1),)
        return cls(chunk, embedding_of(chunk), pieces, chunks.server, chunks.servers)

    @property
    def dtype(self) -> str:
        """The type of its elements."""
        return self.rows.recipe.dtype

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.rows.recipe.dim

    def ids(self, payload: Sequence[memoryview]) -> torch.Tensor:
        """Return the ids of a request.

        They are copied: what was checked must not be changed by its sender afterwards.

        Raises:
            ProtocolError: if the rows of some are not on this server.
        """
        if not payload:
            return torch.empty(0, dtype=torch.int64)
        ids = from_frame(payload[0], "int64").numpy().copy()
        foreign = servers_of(ids, self.servers) != self.server
        if foreign.any():
            raise ProtocolError(
                f"{np.count_nonzero(foreign)} of {len(ids)} ids belong on other servers than "
                f"{self.server}, the first is {ids[foreign][0]}"
            )
        return torch.from_numpy(ids)

    def gradient(self, message: PushIds, payload: Sequence[memoryview]) -> TableGradient:
        """Return the gradient that was pushed, checked.

        Raises:
            Mismatch: for another element type or length of rows than the table's.
            ProtocolError: for ids that are not in order, or of another server.
        """
        dtype, number = BY_ID[message.dtype].name, self.chunk.number
        if dtype not in (self.dtype, summed_in(self.dtype)) or message.dim != self.width:
            raise Mismatch(
                f"chunk {number} is a table of {self.dtype}[{self.width}], and the push has rows of "
                f"{dtype}[{message.dim}]"
            )
        ids = self.ids(payload)
        if bool((ids[1:] <= ids[:-1]).any()):
            raise ProtocolError(
                f"chunk {number}: the {len(ids)} ids of a push are not in ascending order, each once"
            )
        rows = from_frame(payload[1] if payload else memoryview(b""), dtype)
        return TableGradient(ids, rows.view(len(ids), self.width), 1)

    def asked(self, message: PullIds, payload: Sequence[memoryview]) -> torch.Tensor:
        """Return the ids of a pull, checked as :meth:`ids` does.

        Raises:
            ProtocolError: also if their rows do not fit in one frame.
        """
        size = message.count * self.rows.row_bytes
        if size > ANSWER_BYTES:
            raise ProtocolError(
                f"chunk {self.chunk.number}: {message.count} rows are {size} bytes, and the limit of "
                f"an answer is {ANSWER_BYTES}; ask for fewer rows at once"
            )
        return self.ids(payload)

    def read(self, chunks: Chunks, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows ``ids``, flat, in memory that others read."""
        values = chunks.memory.empty(len(ids) * self.width, self.dtype)
        self.rows.pull(ids.numpy(), values.view(-1, self.width))
        return values

    def cut(self, gradient: RowGradient) -> Iterator[tuple[Piece, RowGradient]]:
        """Yield the table's one piece, and all of ``gradient``."""
        return zip(self.pieces, (gradient,), strict=True)


class Table(Rule):
    """The sum moves rows of an embedding table."""

    keeps_all = True

    def check(self, message: Push) -> None:
        """Refuse a push of whole keys."""
        raise ProtocolError(f"chunk {self.chunk.number} is an embedding table: push rows by PUSH-IDS")

    def write(self, span: Span, due: PendingUpdate, norms: torch.Tensor | None) -> None:
        """Update the rows of a table; the element becomes their number."""
        rows, total = embedding_of(self.chunk), due.sum.gathered()
        before = len(rows)
        span.step += 1
        rows.push(total.ids.numpy(), total.rows, version=span.version + 1, step=span.step)
        self.chunk.writable()[span.start] = len(rows)
        self.store.grow((len(rows) - before) * rows.row_bytes)


# --- exports ----------------------------------------------------------------------------------------


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
    fields = tuple([Field(name, dtype_of(column).id, column.numel()) for name, column in columns.items()])
    answer = Exported(seq, block.next, count, fields)
    if not count:
        return answer, ()
    heads = (torch.from_numpy(block.ids), torch.from_numpy(block.stamps))
    return answer, tuple([to_frame(tensor) for tensor in (*heads, *columns.values())])
