"""The index of rows: 64-bit ids to slots, thousands at once.

A hash table with open addressing. Its cells hold slots (four bytes), and the id of a slot is kept
once, in a column beside it. Lookups and insertions work on whole arrays: in each pass all ids that
are not settled look at their next cell. The step from cell to cell grows by one each time: so ids that begin
at neighbouring cells part, and few passes settle all. When more than :data:`FULL` of the cells are taken,
there are twice as many; only cells move then, no row does.

Slots are given out from 0 on, and those of ids that were dropped first.

A request names many tables, each with an index of its own. :class:`Indexes` searches all of them in the same
passes: it sees the arrays of all as one (:func:`~kvps.core.embedding.pages.window`), and knows for each id
where the cells of its table begin, and how many these are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvps.core.embedding.id_hash import INDEX_SALT, Ids, hashes
from kvps.core.embedding.pages import grown, window, zeros

FULL = 0.6
"""Maximum load factor: above it, the longest probe sequences grow fast."""
CELLS_MIN = 1024
AT_ONCE = 1 << 16
"""Ids that are entered at once into new cells: it bounds what the arrays between take."""
SLOTS_MAX = 2**31 - 1
WIDE, WIDEST = 1024, 8
"""Cells that the ids of one pass look at together, if they are few; and cells of each at most."""
_FREE = np.int32(-1)

Slots = npt.NDArray[np.int64]


class IdIndex:
    """A growing set of ids, each with a slot of its own."""

    def __init__(self) -> None:
        self._cells = _free_cells(CELLS_MIN)
        self._ids = np.zeros(1, np.int64)
        """By slot."""
        self._free: list[npt.NDArray[np.int64]] = []
        """Slots below ``used`` that have no id, in arrays; the last is given out first."""
        self.used = 0
        """Slots given out so far, freed ones included."""
        self.count = 0
        """How many ids it has."""
        self.moves = 0
        """How often its cells or ids have moved to another array."""
        self.drops = 0
        """How often ids were dropped."""

    def __len__(self) -> int:
        return self.count

    @property
    def size_bytes(self) -> int:
        """Bytes of its arrays."""
        return self._cells.nbytes + self._ids.nbytes + sum([slots.nbytes for slots in self._free])

    def ids_at(self, slots: Slots) -> Ids:
        """Return the ids of slots that are taken."""
        return self._ids[slots]

    def find(self, ids: Ids) -> Slots:
        """Return the slot of each id; -1 where it has none. Ids may be repeated."""
        return Indexes((self,)).find(ids, (len(ids),))

    def add(self, ids: Ids) -> Slots:
        """Give slots to ids that have none, each named once; return them."""
        return Indexes((self,)).add(ids, (len(ids),))

    def drop(self, slots: Slots) -> None:
        """Free these slots, each named once, for other ids.

        All cells are made anew: drop many at once.
        """
        if not len(slots):
            return
        self._free.append(np.sort(slots)[::-1].copy())
        self.count -= len(slots)
        self.drops += 1
        self._rebuild(len(self._cells))

    def new_slots(self, count: int) -> Slots:
        """Return slots for so many ids, which are still to be written and entered into cells."""
        self._widen(count)
        self.count += count
        taken = []
        while count and self._free:
            last = self._free.pop()
            if len(last) > count:
                self._free.append(last[:-count])
                last = last[-count:]
            taken.append(last)
            count -= len(last)
        if count:
            if self.used + count > SLOTS_MAX:
                raise OverflowError(f"an index has at most {SLOTS_MAX} slots")
            if self.used + count > len(self._ids):
                self._ids = grown(self._ids, self.used, self.used + count)
                self.moves += 1
            taken.append(np.arange(self.used, self.used + count))
            self.used += count
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def put(self, slots: Slots, ids: Ids) -> None:
        """Give these slots, which have no id, to ids that have none, each named once."""
        self._widen(len(slots))
        used = max(self.used, int(slots.max(initial=-1)) + 1)
        free = np.concatenate([*self._free, np.arange(self.used, used)])
        free = free[~np.isin(free, slots)]
        self._ids = grown(self._ids, self.used, used)
        self.moves += 1
        self._free, self.used, self.count = [free] if len(free) else [], used, self.count + len(slots)
        self._ids[slots] = ids
        _enter(self._cells, ids, slots, np.array([0, len(self._cells) - 1]))

    def _widen(self, more: int) -> None:
        """Make cells for so many ids more."""
        size = len(self._cells)
        while self.count + more > FULL * size:
            size *= 2
        if size > len(self._cells):
            self._rebuild(size)

    def _rebuild(self, size: int) -> None:
        """Enter all ids into ``size`` new cells."""
        self._cells = _free_cells(size)
        self.moves += 1
        is_free = np.zeros(self.used, np.bool_)
        for freed in self._free:
            is_free[freed] = True
        for begin in range(0, self.used, AT_ONCE):
            slots = np.arange(begin, min(begin + AT_ONCE, self.used))
            if self._free:
                slots = slots[~is_free[slots]]
            _enter(self._cells, self._ids[slots], slots, np.array([0, size - 1]))

    def check(self) -> None:
        """Assert the invariants: every id that has a slot is found there, and no other is."""
        free = np.concatenate([*self._free, np.empty(0, np.int64)])
        assert len(np.unique(free)) == len(free) == self.used - self.count
        taken = np.setdiff1d(np.arange(self.used), free)
        assert np.array_equal(np.sort(self._cells[self._cells >= 0]), taken)
        assert np.array_equal(self.find(self._ids[taken]), taken)
        assert self.count <= FULL * len(self._cells)


class Indexes:
    """Some indexes that are searched and extended in the same passes over the ids of all.

    Args:
        parts: the indexes.
    """

    def __init__(self, parts: Sequence[IdIndex]) -> None:
        self._parts = parts
        self._moves = -1
        """How often the arrays of all had moved when the fields below were made."""
        self._cells, self._ids = parts[0]._cells, parts[0]._ids
        """The windows of all cells, and of the ids of all slots."""
        self._where = np.zeros((3, 0), np.int64)
        """For each index where its cells begin, the number of its cells less one, and where its ids begin."""

    def _look(self) -> None:
        """See the arrays of all as they are now."""
        moves = sum([part.moves for part in self._parts])
        if moves == self._moves:
            return
        self._moves = moves
        self._cells, begins = window([part._cells for part in self._parts])
        self._ids, firsts = window([part._ids for part in self._parts])
        self._where = np.array([begins, [len(part._cells) - 1 for part in self._parts], firsts])

    def _spread(self, sizes: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return :attr:`_where` for each of so many ids of each index; the same for all of one index."""
        where = self._where
        found: npt.NDArray[np.int64] = where[:, 0] if len(self._parts) == 1 else where.repeat(sizes, axis=1)
        return found

    def find(self, ids: Ids, sizes: Sequence[int]) -> Slots:
        """Return the slot of each id in its index; -1 where it has none. Ids may be repeated.

        Args:
            ids: those of each index, one index after the other.
            sizes: the number of ids of each.
        """
        self._look()
        cells, owners = self._cells, self._ids
        begin, mask, first = where = self._spread(sizes)
        at = hashes(ids, INDEX_SALT).view(np.int64) & mask
        found: Slots = cells.take(at + begin).astype(np.int64)
        # A free cell is taken for one of slot 0: if that has the id, what is found is still -1.
        is_other = owners.take(np.maximum(found, 0) + first) != ids
        is_other &= found >= 0
        (left,) = is_other.nonzero()  # np.flatnonzero is slower
        step = 1
        while count := len(left):
            # The cells that these looked at last are of other ids. Few ids look at several more each.
            begin, mask, first = where if where.ndim == 1 else where.take(left, 1)
            steps = np.arange(step, step := step + min(WIDEST, WIDE // count + 1))
            nearby = at.take(left) + (steps * (steps + 1) // 2)[:, None]
            nearby &= mask
            nearby += begin
            slots = cells.take(nearby).astype(np.int64)
            is_last = owners.take(np.maximum(slots, 0) + first) == ids.take(left)
            is_last |= slots < 0
            found[left] = slots[0] if len(steps) == 1 else slots[is_last.argmax(0), np.arange(count)]
            left = left.take((~is_last.any(0)).nonzero()[0])
        return found

    def add(self, ids: Ids, sizes: Sequence[int]) -> Slots:
        """Give slots to ids that have none, each named once; return them. See :meth:`find`."""
        given = [part.new_slots(size) for part, size in zip(self._parts, sizes, strict=True) if size]
        slots = np.concatenate([np.empty(0, np.int64), *given])
        self._look()
        where = self._spread(sizes)
        self._ids[slots + where[2]] = ids
        _enter(self._cells, ids, slots, where[:2])
        return slots


def _enter(cells: npt.NDArray[np.int32], ids: Ids, slots: Slots, where: npt.NDArray[np.int64]) -> None:
    """Write slots into cells: ``where`` has where those of an index begin, and their number less one."""
    begin, mask = where
    at, narrow, step = hashes(ids, INDEX_SALT).view(np.int64) & mask, slots.astype(np.int32), 0
    while len(at):
        places = at + begin
        (free,) = (cells.take(places) < 0).nonzero()
        cells[places.take(free)] = narrow.take(free)  # of several at one cell, one gets it
        (left,) = (cells.take(places) != narrow).nonzero()
        step += 1
        begin, mask = where = where if where.ndim == 1 else where.take(left, 1)
        at, narrow = at.take(left) + step & mask, narrow.take(left)


def _free_cells(count: int) -> npt.NDArray[np.int32]:
    cells = zeros(count, np.dtype(np.int32))
    cells.fill(_FREE)
    return cells
