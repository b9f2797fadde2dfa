"""The copy of an embedding table: what has changed in it, by slots, and how a standby takes that in.

A row has the same slot in both copies, so that an export goes on where it was. Eviction and admission are not
made again: a slot has a row or none, and the counts of ids without a row are those of the primary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvps import protocol as p
from kvps.core.embedding.arena import Slots
from kvps.core.embedding.id_hash import Ids
from kvps.core.embedding.spec import DEPTH
from kvps.core.embedding.table import EmbeddingRows
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.replicas.state import told
from kvps.core.server.rules.table import recipe_of
from kvps.core.server.store import ServerStore
from kvps.dtypes import BY_ID
from kvps.tensors import dtype_of, from_frame, to_frame

BLOCK_BYTES = 4 << 20
"""Bytes of the rows in one message."""
Payload = tuple[memoryview, ...]
Counts = npt.NDArray[np.uint8]
NONE, NO_COUNTS = np.empty(0, np.int64), np.empty(0, np.uint8)


class TableChanges:
    """The changes of a table since it was copied; all of it, to begin with.

    Args:
        table: it tells from now on, until :meth:`end`.
    """

    def __init__(self, table: EmbeddingRows) -> None:
        self.table = table
        self.rest = range(table.index.used)
        """Slots that were never copied. A row that changes meanwhile is not copied before."""
        self._slots: list[Slots] = []
        self._counted: list[Ids] = []
        self._are_all_counts_new = True
        table.watch = self

    def touched(self, slots: Slots) -> None:
        """Rows at these slots are written, or dropped."""
        if self.rest:
            slots = slots[(slots < self.rest.start) | (slots >= self.rest.stop)]
        self._slots.append(slots)

    def counted(self, ids: Ids, *, are_halved: bool) -> None:
        """A push of ids without a row was counted; all counts ``are_halved`` since."""
        self._counted.append(ids)
        self._are_all_counts_new |= are_halved

    def end(self) -> None:
        """Let the table tell nothing any more."""
        self.table.watch = None

    @property
    def are_left(self) -> bool:
        """Whether there are rows to be copied."""
        return bool(self.rest or self._slots)

    def messages(self, chunk: Chunk, *, is_whole: bool) -> Iterator[tuple[p.CopyRows, Payload]]:
        """Yield what a standby is to be told now: a block, or all that there is.

        Raises:
            StorageError: if rows cannot be read.
        """
        table, (span,) = self.table, chunk.spans
        history = chunk.number, *told(span)
        while True:
            counted, ids, counts = self._counts()
            slots = self._take(max(1, BLOCK_BYTES // table.arenas.record_bytes))
            is_live = table.has_row(slots)
            live = slots[is_live]
            columns = table.arenas.read(live) if len(live) else {}
            fields = tuple([p.Field(name, dtype_of(rows).id, rows.numel()) for name, rows in columns.items()])
            more = is_whole and self.are_left
            sizes = len(live), len(slots) - len(live), counted, len(ids), counts.size, more
            order = np.concatenate([live, slots[~is_live]])
            numbers = map(torch.from_numpy, (order, table.index.ids_at(live), table.stamps_at(live)))
            frames = [*numbers, *columns.values(), torch.from_numpy(ids), torch.from_numpy(counts)]
            payload = tuple([to_frame(frame.reshape(-1)) for frame in frames if frame.numel()])
            yield p.CopyRows(*history, table.lr, *sizes, fields), payload
            if not more:
                return

    def _take(self, count: int) -> Slots:
        """Return the next slots to be copied."""
        if self.rest:
            slots = np.arange(self.rest.start, self.rest[:count].stop)
            self.rest = self.rest[count:]
            return slots
        changed = self._slots
        slots = np.unique(np.concatenate(changed)) if len(changed) > 1 else np.concatenate([NONE, *changed])
        self._slots = [slots[count:]] if len(slots) > count else []
        return slots[:count]

    def _counts(self) -> tuple[int, Ids, Counts]:
        """Return how many pushes were counted, the ids whose counts have changed, and their counts; no ids
        for all counts."""
        admission, changed = self.table.admission, self._counted
        if admission is None:
            return 0, NONE, NO_COUNTS
        are_all, self._are_all_counts_new, self._counted = self._are_all_counts_new, False, []
        if are_all:
            return admission.counted, NONE, admission.counts.copy()
        ids = np.concatenate([NONE, *changed])
        return admission.counted, ids, admission.counts_of(ids)


def make(chunk: Chunk, store: ServerStore, message: p.Embed, servers: int) -> None:
    """Let a chunk of the standby stand for a table without rows."""
    if chunk.embedding is not None:
        store.grow(-len(chunk.embedding) * chunk.embedding.arenas.counted_row_bytes)
    store.replace_rows(chunk, EmbeddingRows(recipe_of(message), servers, store.tier))


def take_in(chunk: Chunk, store: ServerStore, message: p.CopyRows, payload: Sequence[memoryview]) -> None:
    """Let the rows of a table be as the primary says; their history is the caller's.

    Raises:
        Overload, StorageError: if there is no room for them.
    """
    table, frames = chunk.table, iter(payload)

    def taken(count: int) -> Slots:
        """Return so many numbers of the next frame."""
        return from_frame(next(frames), "int64").numpy() if count else NONE

    slots, ids, stamps = taken(message.rows + message.vacant), taken(message.rows), taken(message.rows)
    columns = {
        field.name: from_frame(next(frames), BY_ID[field.dtype].name).view(len(ids), -1)
        for field in message.fields
    }
    if message.lr != table.lr:
        table.set_rate(message.lr)
    store.budget.demand_growth(chunk.keys[0])
    before = len(table)
    table.place(slots, ids, stamps, columns)
    store.grow((len(table) - before) * table.arenas.counted_row_bytes)
    chunk.writable()[0] = len(table)
    counted = taken(message.ids)
    if table.admission is not None and message.counts:
        counts = from_frame(next(frames), "uint8").numpy().reshape(DEPTH, -1)
        table.admission.put(counted, counts, message.counted)
