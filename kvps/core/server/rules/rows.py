"""Rows of a key on one server: their location, validation, and update.

A key can be asked for by rows if it has two or more dimensions and all its pieces here are whole rows
(:func:`~kvps.core.placement.lies_by_rows`). A request names rows by their numbers in the whole key,
ascending and each once, whatever pieces they lie in. All of it is checked before anything is done:
a number that is not here, or out of order, is its sender's fault, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kvps.core.optim import sparse_update
from kvps.core.optim.base import Terms
from kvps.core.placement import lies_by_rows
from kvps.core.row_gradients import RowGradient, numbered
from kvps.core.row_ranges import RowRanges
from kvps.core.server.chunks.rounds import PendingUpdate, Span
from kvps.core.server.chunks.slab import Chunk, Chunks
from kvps.core.server.store import ServerStore, Shard
from kvps.dtypes import BY_ID, summed_in
from kvps.errors import KeyNotFound, Mismatch, ProtocolError
from kvps.protocol.stores import Piece
from kvps.protocol.values import PushRows
from kvps.tensors import TORCH, from_frame


@dataclass(frozen=True, slots=True)
class KeyRows:
    """A key of one store as a server's rows."""

    shard: Shard
    width: int
    """Elements of a row."""
    ranges: RowRanges
    """The rows on this server."""

    @classmethod
    def of(cls, store: ServerStore, key: str) -> KeyRows:
        """Return a key's rows.

        Raises:
            KeyNotFound: if it has no value.
            ProtocolError: if it does not lie here by rows.
        """
        shard = store.shards.get(key)
        if shard is None or not shard.ready:
            raise KeyNotFound(f"key {key!r} of store {store.name!r} has no value yet")
        offsets = [(at, piece.size) for at, piece in zip(shard.offsets, shard.pieces, strict=True)]
        if not offsets or not lies_by_rows(shard.spec, offsets):
            raise ProtocolError(
                f"key {key!r} of store {store.name!r} is {shard.spec} and is not stored by rows here; "
                "push and pull it as a whole"
            )
        width = shard.spec.width
        return cls(shard, width, RowRanges([(at // width, (at + size) // width) for at, size in offsets]))

    def ids(self, payload: Sequence[memoryview]) -> torch.Tensor:
        """Return the row numbers of a request, counted from the first row here.

        They are copied: their sender must not change them after the check.

        Raises:
            ProtocolError: unless they ascend and are all here.
        """
        if not payload:
            return torch.empty(0, dtype=torch.int64)
        ids = from_frame(payload[0], "int64").clone()
        if not self.ranges.has(ids):
            raise ProtocolError(
                f"key {self.shard.key!r}: rows {int(ids[0])} to {int(ids[-1])} are not all of the rows "
                f"{self.ranges} of this server"
            )
        if not bool((ids[1:] > ids[:-1]).all()):
            raise ProtocolError(f"key {self.shard.key!r}: row numbers must ascend, without duplicates")
        return self.ranges.local(ids)

    def gradient(self, message: PushRows, payload: Sequence[memoryview]) -> RowGradient:
        """Return the pushed rows, numbered from the first that this server holds.

        Raises:
            ProtocolError, Mismatch: if it is no gradient of this key.
        """
        spec = self.shard.spec
        if BY_ID[message.dtype].name not in (spec.dtype, summed_in(spec.dtype)):
            raise Mismatch(
                f"key {self.shard.key!r} is {spec}, and the push has rows of {BY_ID[message.dtype].name}"
            )
        if message.width != self.width:
            raise Mismatch(
                f"key {self.shard.key!r} is {spec}, of {self.width} elements in a row, and the push "
                f"has rows of {message.width}"
            )
        ids = self.ids(payload)
        dtype = BY_ID[message.dtype].name
        frames = [from_frame(frame, dtype) for frame in payload[1:]] or [torch.empty(0, dtype=TORCH[dtype])]
        rows = frames[0] if len(frames) == 1 else torch.cat(frames)
        return RowGradient(ids, rows.view(-1, self.width), self.ranges.count)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of the key that lie here."""
        return self.shard.pieces

    def spans(self, chunks: Chunks) -> list[Span]:
        """Return the span of each piece."""
        return [chunks.span_at(piece) for piece in self.pieces]

    @property
    def edges(self) -> tuple[int, ...]:
        """Starts of the pieces, and the end of the last, in rows from the first here."""
        return (0, *accumulate([piece.size // self.width for piece in self.shard.pieces]))

    def cut(self, gradient: RowGradient) -> Iterator[tuple[Piece, RowGradient]]:
        """Yield each piece, and the part of ``gradient`` that belongs to it."""
        return zip(self.shard.pieces, gradient.cut(self.edges), strict=True)

    def places(self, ids: torch.Tensor) -> Iterator[tuple[Piece, int, slice]]:
        """Yield (piece, its first row, the slice of ``ids`` in it) of each piece with some of the rows."""
        edges = self.edges
        cuts = torch.searchsorted(ids, torch.tensor(edges)).tolist()
        for piece, first, low, high in zip(self.shard.pieces, edges, cuts, cuts[1:], strict=False):
            if low < high:
                yield piece, first, slice(low, high)

    def changed(self, chunks: Chunks, since: int) -> torch.Tensor | None:
        """Return the rows that changed since a version, counted from the first here; None if unknown."""
        changed = []
        for piece, first in zip(self.shard.pieces, self.edges, strict=False):
            ids = chunks.by_number[piece.chunk].changed(piece.start, since)
            if ids is None:
                return None
            changed.append(ids + first)
        return torch.cat(changed)

    def read(self, chunks: Chunks, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows ``ids``, counted from the first here, flat, in memory that others read."""
        values = chunks.memory.empty(len(ids) * self.width, self.shard.spec.dtype)
        out = values.view(-1, self.width)
        for piece, first, some in self.places(ids):
            weights = chunks.by_number[piece.chunk].buffer.tensor
            rows = weights[piece.start : piece.start + piece.size].view(-1, self.width)
            torch.index_select(rows, 0, ids[some] - first, out=out[some])
        return values


def assign(chunk: Chunk, span: Span, total: RowGradient) -> None:
    """Make a sum of rows the value of ``span``, which is one piece: all other rows become 0.

    Which are not 0 is remembered, so that the next time they alone have to be cleared.
    """
    before = chunk.filled_rows.get(span.start)
    weights = chunk.writable(keeps_rows=True)[span.start : span.stop].view(-1, total.width)
    sparse_update.assign_rows(weights, total.ids, total.rows, before)
    chunk.filled_rows[span.start] = total.ids
    if before is not None:
        chunk.add_change(span, len(weights), numbered(torch.cat((before, total.ids)), are_runs=True)[0])


def update(store: ServerStore, chunk: Chunk, span: Span, total: RowGradient, due: PendingUpdate) -> None:
    """Update the rows of ``span``, which is one piece, that ``total``, the sum of ``due``, has. It
    is used up."""
    assert store.updater is not None
    assert store.hyper is not None
    ((key, _, _),) = chunk.pieces(span.start, span.stop)
    state = store.state_of(chunk)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[span.start : span.stop].view(-1, total.width)

    sparse_update.update_rows(
        rows(chunk.writable()),
        {name: rows(tensor) for name, tensor in state.items()},
        total.ids,
        total.rows,
        store.updater,
        Terms(span.step, *store.hyper.for_key(key), rank=due.rank, age=due.age),
    )
    chunk.add_change(span, len(total) // total.width, total.ids)
