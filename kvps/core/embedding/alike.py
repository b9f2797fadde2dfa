"""Alike tables of one request: looked up, read and updated in the same passes over the ids of all.

A table has an index, rows, admission and eviction of its own. But a request names many tables, of a few
hundred ids each, and a pass over so few costs what it takes to begin it. So the tables of a request that
differ in their seeds and names alone are handled as one: their indexes and columns are seen through windows
(:class:`~kvps.core.embedding.id_index.Indexes`, :class:`~kvps.core.embedding.arena.ArenaGroup`), and the
optimizer updates the rows of all in one call. A table that is named alone is handled in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from operator import attrgetter

import numpy as np
import torch

from kvps.core.embedding.arena import ArenaGroup, Columns, Slots
from kvps.core.embedding.id_hash import Ids
from kvps.core.embedding.id_index import Indexes
from kvps.core.embedding.id_split import runs
from kvps.core.embedding.pages import spread
from kvps.core.embedding.spec import WEIGHT
from kvps.core.embedding.table import EmbeddingRows, fresh_rows
from kvps.core.optim.sparse_update import update_placed
from kvps.core.optim.torch_rules import Terms
from kvps.tensors import accumulator

PULLS_MAX = 8
"""Maximum pulls whose slots are kept until they are pushed to, 16 bytes for an id."""


class AlikeTables:
    """Tables that differ in their seeds and names alone.

    Args:
        tables: each once.
    """

    def __init__(self, tables: Sequence[EmbeddingRows]) -> None:
        self.tables = tuple(tables)
        self._indexes = Indexes([table.index for table in tables])
        self._arenas = ArenaGroup([table.arenas for table in tables])
        self._seeds = np.array([table.recipe.seed for table in tables], np.uint64)
        self._recipe = tables[0].recipe
        self._pulled: dict[tuple[bytes, tuple[int, ...]], tuple[int, Slots]] = {}
        """Ids of pulls, and how many each table has, oldest first -> how often tables had dropped ids, and
        the slots."""

    def pull(self, ids: Ids, sizes: tuple[int, ...], out: torch.Tensor) -> None:
        """Write the rows of ``ids`` into ``out``, [len(ids), dim]; first values where there is no row.

        Args:
            ids: those of each table, one table after the other; they may be repeated.
            sizes: the number of ids of each table.
            out: contiguous.
        """
        slots = self._indexes.find(ids, sizes)
        if len(self._pulled) == PULLS_MAX:
            del self._pulled[next(iter(self._pulled))]
        self._pulled[ids.tobytes(), sizes] = self._drops, slots
        (absent,) = (slots < 0).nonzero()
        if len(absent) < len(ids):
            self._arenas.weights(slots, sizes, out)
        if len(absent):
            fresh = fresh_rows(self._recipe, ids.take(absent), spread(self._seeds, _sizes_of(absent, sizes)))
            out.index_copy_(0, torch.from_numpy(absent), fresh)

    def push(
        self, ids: Ids, sizes: tuple[int, ...], gradients: torch.Tensor, versions: Sequence[int], step: int
    ) -> None:
        """Update the rows of ``ids`` by one push or round of each table, at the learning rate of the first.

        Args:
            ids: as :meth:`pull` takes them; each named once.
            sizes: the number of ids of each table.
            gradients: [len(ids), dim], contiguous, of the type in which they are summed; they are only read.
            versions: what the version of each table is by this; 1 or more.
            step: how many updates each table has had, this one included.
        """
        slots, taken = self._admit(ids, sizes, self._found(ids, sizes))
        if taken is not None:
            gradients, sizes = gradients.index_select(0, torch.from_numpy(taken)), _sizes_of(taken, sizes)
        if len(slots):
            first = self.tables[0]
            placed = self._arenas.places_to_write(slots, sizes)
            terms = Terms(step, *first.updater.rates)
            update_placed(placed.pop(WEIGHT), placed, gradients, first.updater, terms, is_read=True)
            for table, version, (begin, end) in zip(self.tables, versions, _ranges(sizes), strict=True):
                if begin < end:
                    table.stamp(slots[begin:end], version, version)
        if self._recipe.max_age or self._recipe.max_rows:
            for table, version in zip(self.tables, versions, strict=True):
                table.evict(version)

    @property
    def _drops(self) -> int:
        """How often tables have dropped ids, whose slots others get."""
        return sum([table.index.drops for table in self.tables])

    def _found(self, ids: Ids, sizes: tuple[int, ...]) -> Slots:
        """Return the slots of the ids of a push: those that a pull has found, if it had the same ids."""
        drops, slots = self._pulled.pop((ids.tobytes(), sizes), (-1, ids))
        if drops != self._drops:
            return self._indexes.find(ids, sizes)
        (absent,) = (slots < 0).nonzero()
        if len(absent):  # another push may have made their rows since
            slots[absent] = self._indexes.find(ids.take(absent), _sizes_of(absent, sizes))
        return slots

    def _admit(self, ids: Ids, sizes: tuple[int, ...], slots: Slots) -> tuple[Slots, Slots | None]:
        """Give rows to ids that may have one; return the slots of all that have, and which ids
        these are, None for all."""
        (fresh,) = (slots < 0).nonzero()
        if not len(fresh):
            return slots, None
        if self._recipe.admit > 1:
            cuts = _ranges(_sizes_of(fresh, sizes))
            parts = [(table, fresh[begin:end]) for table, (begin, end) in zip(self.tables, cuts, strict=True)]
            fresh = np.concatenate([some[table.counts(ids.take(some))] for table, some in parts])
        if len(fresh):
            slots[fresh] = self._add(ids.take(fresh), _sizes_of(fresh, sizes))
        (there,) = (slots >= 0).nonzero()
        return (slots, None) if len(there) == len(ids) else (slots.take(there), there)

    def _add(self, ids: Ids, sizes: tuple[int, ...]) -> Slots:
        slots = self._indexes.add(ids, sizes)
        for table, size in zip(self.tables, sizes, strict=True):
            if size:
                table.make_room()
        columns: Columns = self.tables[0].new_columns(ids, spread(self._seeds, sizes))
        self._arenas.write(slots, sizes, columns)
        return slots


def alike_runs(tables: Sequence[EmbeddingRows]) -> tuple[AlikeTables, ...]:
    """Return the runs of neighbours among ``tables`` that are alike."""
    return tuple([AlikeTables(list(run)) for _, run in groupby(tables, attrgetter("kind"))])


def summed(ids: Ids, sizes: tuple[int, ...], rows: torch.Tensor) -> tuple[Ids, tuple[int, ...], torch.Tensor]:
    """Return the distinct ids of each table, ascending, how many these are, and the sum of the rows of each.

    Rows are added in the order in which they are given, so that sums do not depend on the other tables.

    Args:
        ids: those of each table, one table after the other; they may be repeated.
        sizes: the number of ids of each table.
        rows: [len(ids), dim].

    Example:
        >>> rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
        >>> ids, sizes, rows = summed(np.array([2, 5, 2, 5]), (3, 1), rows)
        >>> ids.tolist(), sizes, rows.tolist()
        ([2, 5, 5], (2, 1), [[5.0], [2.0], [8.0]])
    """
    if not len(ids):
        return ids, sizes, accumulator(rows)
    order, inorder, starts = runs(ids, [0, *accumulate(sizes)])
    total = torch.nn.functional.embedding_bag(
        torch.from_numpy(order), accumulator(rows), torch.from_numpy(starts), mode="sum"
    )
    return inorder.take(starts), _sizes_of(starts, sizes), total


def _ranges(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return where the ids of each table begin and end."""
    return pairwise(accumulate(sizes, initial=0))


def _sizes_of(places: Slots, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many of the ids at ``places``, which ascend, each table has."""
    if len(sizes) == 1:
        return (len(places),)
    edges = places.searchsorted([*accumulate(sizes, initial=0)])
    return tuple(np.diff(edges).tolist())
