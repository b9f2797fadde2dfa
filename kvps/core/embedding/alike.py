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
from typing import NamedTuple

import numpy as np
import torch

from kvps.core.embedding.arena import Slots
from kvps.core.embedding.id_hash import ADMIT_SALT, ROUNDING_SALT, Hashes, Ids, hashes
from kvps.core.embedding.id_index import Indexes
from kvps.core.embedding.id_split import runs
from kvps.core.embedding.pages import spread
from kvps.core.embedding.table import EmbeddingRows
from kvps.core.optim.rounding import Rounding
from kvps.core.optim.torch_rules import Terms
from kvps.tensors import by_row

PULLS_MAX = 8
"""Maximum pulls whose slots are kept until they are pushed to, 16 bytes for an id."""
FIRST_BYTES_MAX = 256 << 10
"""Maximum bytes of first values that are kept of a pull."""


class PushedRows(NamedTuple):
    """The gradients that one push has for alike tables."""

    ids: Ids
    """Those of each table, each once and ascending, one table after the other."""
    sizes: tuple[int, ...]
    """The number of ids of each table."""
    rows: torch.Tensor
    """[len(ids), dim], contiguous, of the type in which they are summed; they are only read."""


class _Found(NamedTuple):
    """Where the rows of some ids were when they were looked up."""

    drops: int
    """How often tables had dropped ids, whose slots others get."""
    rows: int
    """How many there were."""
    slots: Slots
    """-1 where there was no row."""
    absent: Slots
    """Indices of the ids without a row."""
    first: torch.Tensor | None
    """The first values of these, [len(absent), dim]; None if they are not kept."""


class AlikeTables:
    """Tables that differ in their seeds and names alone.

    Args:
        tables: each once.
    """

    def __init__(self, tables: Sequence[EmbeddingRows]) -> None:
        self.tables = tuple(tables)
        self._indexes = Indexes([table.index for table in tables])
        self._arenas = tables[0].arenas.group([table.arenas for table in tables])
        self._seeds = np.array([table.recipe.seed for table in tables], np.uint64)
        self._recipe = tables[0].recipe
        self._pulled: dict[tuple[bytes, tuple[int, ...]], _Found] = {}
        """Ids of pulls, and how many each table has, oldest first -> what was found."""

    def pull(self, ids: Ids, sizes: tuple[int, ...], out: torch.Tensor) -> None:
        """Write the rows of ``ids`` into ``out``, [len(ids), dim]; first values where there is no row.

        Args:
            ids: those of each table, one table after the other; they may be repeated.
            sizes: the number of ids of each table.
            out: contiguous.
        """
        drops, count, slots, absent, _ = self._look_up(ids, sizes)
        if len(absent) < len(ids):
            self._arenas.weights(slots, sizes, out)
        first = None
        if len(absent):
            first = self._recipe.first_rows(ids.take(absent), spread(self._seeds, _sizes_of(absent, sizes)))
            by_row(out)[absent] = by_row(first)
            first = first if first.nbytes <= FIRST_BYTES_MAX else None
        if len(self._pulled) == PULLS_MAX:
            del self._pulled[next(iter(self._pulled))]
        self._pulled[ids.tobytes(), sizes] = _Found(drops, count, slots, absent, first)

    def push(
        self,
        pushed: Sequence[PushedRows],
        versions: Sequence[int],
        step: int,
        divisor: float = 1,
        now: float = 0,
    ) -> None:
        """Update rows by one push or round of each table, at the learning rate of the first.

        Args:
            pushed: the gradients that are summed; one at least.
            versions: what the version of each table is by this; 1 or more.
            step: how many updates each table has had, this one included.
            divisor: of the sums.
            now: seconds on a clock of this process.
        """
        found = [self._found(ids, sizes) for ids, sizes, _ in pushed]
        (ids, sizes, gradients), chosen = summed(pushed)
        slots = (
            found[0].slots if chosen is None else np.concatenate([some.slots for some in found]).take(chosen)
        )
        slots, taken = self._admit(ids, sizes, slots, found, chosen, step)
        if taken is not None:
            gradients, sizes = gradients.index_select(0, torch.from_numpy(taken)), _sizes_of(taken, sizes)
        if divisor != 1:
            gradients = gradients.div(divisor)
        if len(slots):
            updater, rounding = self.tables[0].updater, None
            if self._recipe.is_rounded:
                named = ids if taken is None else ids.take(taken)
                rounding = Rounding(self._chances(named, sizes, ROUNDING_SALT + step))
            terms = Terms(step, *updater.rates)
            self._arenas.update(slots, sizes, gradients, updater, terms, rounding, self._recipe.half_life)
            for table, version, (begin, end) in zip(self.tables, versions, _ranges(sizes), strict=True):
                if begin < end:
                    table.stamp(slots[begin:end], version, version)
        if self._recipe.evicts:
            for table, version in zip(self.tables, versions, strict=True):
                table.evict(version, now)

    def _chances(self, ids: Ids, sizes: tuple[int, ...], salt: int) -> Hashes:
        """Return 64 bits of chance for each id in its table."""
        return hashes(hashes(ids, spread(self._seeds, sizes)), salt)

    def _look_up(self, ids: Ids, sizes: tuple[int, ...]) -> _Found:
        slots = self._indexes.find(ids, sizes)
        return _Found(*self._stand, slots, (slots < 0).nonzero()[0], None)

    @property
    def _stand(self) -> tuple[int, int]:
        """How often tables have dropped ids, and how many rows there are."""
        indexes = [table.index for table in self.tables]
        return sum([index.drops for index in indexes]), sum([index.count for index in indexes])

    def _found(self, ids: Ids, sizes: tuple[int, ...]) -> _Found:
        """Return the slots of the ids of a push: those that a pull has found, if it had the same ids."""
        found, (drops, count) = self._pulled.pop((ids.tobytes(), sizes), None), self._stand
        if found is None or found.drops != drops:
            return self._look_up(ids, sizes)
        if found.rows != count and len(absent := found.absent):  # a push may have made their rows since
            found.slots[absent] = self._indexes.find(ids.take(absent), _sizes_of(absent, sizes))
        return found

    def _admit(
        self,
        ids: Ids,
        sizes: tuple[int, ...],
        slots: Slots,
        found: Sequence[_Found],
        chosen: Slots | None,
        step: int,
    ) -> tuple[Slots, Slots | None]:
        """Give rows to ids that may have one; return the slots of all that have, and which ids
        these are, None for all."""
        (fresh,) = (slots < 0).nonzero()
        if not len(fresh):
            return slots, None
        if self._recipe.admit > 1:
            cuts = _ranges(_sizes_of(fresh, sizes))
            parts = [(table, fresh[begin:end]) for table, (begin, end) in zip(self.tables, cuts, strict=True)]
            fresh = np.concatenate([some[table.counts(ids.take(some))] for table, some in parts])
        if self._recipe.chance < 1:
            chances = self._chances(ids.take(fresh), _sizes_of(fresh, sizes), ADMIT_SALT + step)
            fresh = fresh[chances < np.uint64(self._recipe.chance * 2**64)]
        if len(fresh):
            first = _first(found, fresh if chosen is None else chosen.take(fresh))
            slots[fresh] = self._add(ids.take(fresh), _sizes_of(fresh, sizes), first)
        (there,) = (slots >= 0).nonzero()
        return (slots, None) if len(there) == len(ids) else (slots.take(there), there)

    def _add(self, ids: Ids, sizes: tuple[int, ...], first: torch.Tensor | None) -> Slots:
        """Make the rows of ids, whose first values may be known; return their slots."""
        slots = self._indexes.add(ids, sizes)
        for table, size in zip(self.tables, sizes, strict=True):
            if size:
                table.make_room()
        if first is None:
            first = self._recipe.first_rows(ids, spread(self._seeds, sizes))
        self._arenas.write(slots, sizes, self.tables[0].new_columns(first))
        return slots


def _first(found: Sequence[_Found], places: Slots) -> torch.Tensor | None:
    """Return the first values of the ids at ``places`` among those of all pushes, if pulls have kept them."""
    origins = np.full(sum([len(some.slots) for some in found]), -1)
    begin, values = 0, list[torch.Tensor]()
    for _, _, slots, absent, first in found:
        if first is not None:
            origins[absent + begin] = np.arange(len(first)) + sum(map(len, values))
            values.append(first)
        begin += len(slots)
    origins = origins.take(places)
    return None if (origins < 0).any() else torch.cat(values).index_select(0, torch.from_numpy(origins))


def alike_runs(tables: Sequence[EmbeddingRows]) -> tuple[AlikeTables, ...]:
    """Return the runs of neighbours among ``tables`` that are alike."""
    return tuple([AlikeTables(list(run)) for _, run in groupby(tables, attrgetter("kind"))])


def summed(pushed: Sequence[PushedRows]) -> tuple[PushedRows, Slots | None]:
    """Return the distinct ids of each table, ascending, with the sum of the rows of each; and where each is
    first among the ids of all pushes, None for one push.

    Rows are added in the order in which they are given, so that sums do not depend on the other tables.

    Example:
        >>> two = PushedRows(np.array([2, 5, 2]), (2, 1), torch.tensor([[1.0], [2.0], [4.0]]))
        >>> one = PushedRows(np.array([5]), (1, 0), torch.tensor([[8.0]]))
        >>> (ids, sizes, rows), first = summed([two, one])
        >>> ids.tolist(), sizes, rows.tolist(), first.tolist()
        ([2, 5, 2], (2, 1), [[1.0], [10.0], [4.0]], [0, 1, 2])
    """
    if len(pushed) == 1:
        return pushed[0], None
    counts = np.array([some.sizes for some in pushed])
    tables = np.arange(counts.shape[1])
    moved = tables[None].repeat(len(pushed), 0).ravel().repeat(counts.ravel()).argsort(kind="stable")
    sizes = tuple(counts.sum(0).tolist())
    ids, rows = np.concatenate([some.ids for some in pushed]), torch.cat([some.rows for some in pushed])
    if not len(ids):
        return PushedRows(ids, sizes, rows), moved
    order, inorder, starts = runs(ids.take(moved), [0, *accumulate(sizes)])
    order = moved.take(order)
    total = torch.nn.functional.embedding_bag(
        torch.from_numpy(order), rows, torch.from_numpy(starts), mode="sum"
    )
    return PushedRows(inorder.take(starts), _sizes_of(starts, sizes), total), order.take(starts)


def _ranges(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return where the ids of each table begin and end."""
    return pairwise(accumulate(sizes, initial=0))


def _sizes_of(places: Slots, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many of the ids at ``places``, which ascend, each table has."""
    if len(sizes) == 1:
        return (len(places),)
    edges = places.searchsorted([*accumulate(sizes, initial=0)])
    return tuple(np.diff(edges).tolist())
