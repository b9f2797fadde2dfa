"""Reads of rows of a key: when they can be answered, and their payload.

It waits until all pieces of the key that are here meet its conditions, whichever of them its rows lie
in: so the rows of one answer are of one version, unless the key was pushed otherwise than by rows. The
rows are copied at that moment, as a message of their own; nothing is held.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvps.core.membership_client import Quorum
from kvps.core.server.chunks.slab import Chunks
from kvps.core.server.reads import lack
from kvps.core.server.sessions import PendingRead, Session
from kvps.core.server.store import ServerStore
from kvps.core.server.update.key_rows import KeyRows
from kvps.dtypes import BY_NAME
from kvps.protocol.values import (
    Ask,
    Changed,
    Dropped,
    PullChanged,
    PulledRows,
    PullRows,
    rows_in_message,
)


@dataclass(slots=True, eq=False, kw_only=True)
class PendingRowRead(PendingRead):
    """A request for some rows of a key.

    It has one ask for each piece of the key, and ``chunk`` is where the piece lies at which it waits.
    """

    table: KeyRows
    ids: torch.Tensor | None
    """Rows, counted from the first on this server; None for those that changed."""
    since: int = 0
    """The version since which changed rows are asked for."""

    @classmethod
    def of(
        cls,
        session: Session,
        seq: int,
        message: PullRows | PullChanged,
        table: KeyRows,
        ids: torch.Tensor | None = None,
    ) -> PendingRowRead:
        """Return what ``message`` asks for; ``ids`` are those of PULL-ROWS."""
        pieces = table.shard.pieces
        asks = tuple(
            [Ask(piece.start, piece.size, message.after, message.least) for piece in pieces]
        )
        since = message.since if isinstance(message, PullChanged) else 0
        first = pieces[0].chunk
        return cls(
            session, seq, message.store, first, True, asks, table=table, ids=ids, since=since
        )


def holds(store: ServerStore, chunks: Chunks, reading: PendingRowRead, quorum: Quorum) -> bool:
    """Return whether rows can be read; if not, ``reading`` says in which chunk, and where, it must wait."""
    while reading.index < len(reading.asks):
        ask, piece = reading.asks[reading.index], reading.table.shard.pieces[reading.index]
        reading.chunk, reading.at = piece.chunk, piece.start
        span = next(chunks.by_number[piece.chunk].spans_in(piece.start, piece.start + 1))
        if lack(store, span, ask, reading, quorum):
            return False
        reading.index += 1
    return True


def read(
    store: ServerStore, chunks: Chunks, reading: PendingRowRead
) -> tuple[PulledRows | Changed, tuple[torch.Tensor, ...]]:
    """Return the answer and, if there are any, the rows that go with it, flat.

    Before the rows come their numbers in the key, where the asker has not named them.
    """
    rank, table = reading.session.rank, reading.table
    spans = []
    dropped: list[Dropped] = []
    for piece, ask in zip(table.shard.pieces, reading.asks, strict=True):
        spans.append(next(chunks.by_number[piece.chunk].spans_in(piece.start, piece.start + 1)))
        if store.drops is not None:
            whose = None if store.ordered else rank
            dropped += store.drops.among(piece.chunk, whose, (ask,))
    dtype = BY_NAME[table.shard.spec.dtype].id
    versions = [span.version for span in spans]
    stand = (
        *(min(versions), max(versions), min([span.owed(rank, store.ordered) for span in spans])),
        tuple(dropped[:1]),  # updates of a key are dropped on all of its pieces, or on none
    )
    if reading.ids is not None:
        _note(store, chunks, reading, reading.ids)
        answer = PulledRows(reading.seq, dtype, table.width, len(reading.ids), *stand)
        rows = table.read(chunks, reading.ids)
        return answer, (rows,) if len(rows) else ()
    ids = table.changed(chunks, reading.since)
    if ids is not None and len(ids) <= rows_in_message(dtype, table.width):
        _note(store, chunks, reading, ids)
        changed = Changed(reading.seq, True, dtype, table.width, len(ids), *stand)
        named = (ids + table.first, table.read(chunks, ids))
        return changed, named if len(ids) else ()
    return Changed(reading.seq, False, dtype, table.width, 0, *stand), ()


def _note(store: ServerStore, chunks: Chunks, reading: PendingRowRead, ids: torch.Tensor) -> None:
    """Report the rows that are read to a rule that tracks pulls."""
    updater, table = store.updater, reading.table
    if updater is None or not updater.tracks_pulls:
        return
    if BY_NAME[table.shard.spec.dtype].kind == "int":
        return
    width, rank = table.width, reading.session.rank
    for piece, first, some in table.places(ids):
        chunk = chunks.by_number[piece.chunk]
        state = store.state_of(chunk)
        for row in (ids[some] - first).tolist():
            start = piece.start + row * width
            updater.pulled(chunk.buffer.tensor, state, start, start + width, rank)
