"""The index of rows: 64-bit ids to slots, thousands at once.

A hash table with open addressing. Its cells hold slots (four bytes), and the id of a slot is kept
once, in a column beside it. Lookups and insertions work on whole arrays: in each pass all ids that
are not settled look at their next cell. The step from cell to cell grows by one each time: so ids that begin
at neighbouring cells part, and few passes settle all. When more than :data:`FULL` of the cells are taken,
there are twice as many; only cells move then, no row does.

Slots are given out from 0 on, and those of ids that were dropped first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvps.core.embedding.id_hash import INDEX_SALT, Ids, hashes
from kvps.core.embedding.pages import grown, zeros

FULL = 0.6
"""Maximum load factor: above it, the longest probe sequences grow fast."""
CELLS_MIN = 1024
AT_ONCE = 1 << 16
"""Ids that are entered at once into new cells: it bounds what the arrays between take."""
SLOTS_MAX = 2**31 - 1
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
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        """Bytes of its arrays."""
        return self._cells.nbytes + self._ids.nbytes + sum([slots.nbytes for slots in self._free])

    def ids_at(self, slots: Slots) -> Ids:
        """Return the ids of slots that are taken."""
        return self._ids[slots]

    def find(self, ids: Ids) -> Slots:
        """Return the slot of each id; -1 where it has none. Ids may be repeated."""
        cells, owners, mask = self._cells, self._ids, len(self._cells) - 1
        at = (hashes(ids, INDEX_SALT) & np.uint64(mask)).view(np.int64)
        slots = cells.take(at)
        found = slots.astype(np.int64)
        # A free cell is taken for one of the last slot: if that has the id, what is found is still -1.
        (left,) = (owners.take(slots) != ids).nonzero()  # np.flatnonzero takes as long again for few
        step = 0
        while len(left):
            # The cells that these looked at last are free, or of others.
            left = left.take((found.take(left) >= 0).nonzero()[0])
            step += 1
            nearby = at.take(left)
            nearby += step
            nearby &= mask
            at[left] = nearby
            slots = cells.take(nearby)
            found[left] = slots
            left = left.take((owners.take(slots) != ids.take(left)).nonzero()[0])
        return found

    def add(self, ids: Ids) -> Slots:
        """Give slots to ids that have none, each named once; return them."""
        slots = self._new_slots(len(ids))
        self._ids[slots] = ids
        self._count += len(ids)
        if self._count > FULL * len(self._cells):
            self._rebuild(None)  # there were never as many: no slot is free
        else:
            self._enter(ids, slots)
        return slots

    def drop(self, slots: Slots) -> None:
        """Free these slots, each named once, for other ids.

        All cells are made anew: drop many at once.
        """
        if not len(slots):
            return
        is_free = np.zeros(self.used, np.bool_)
        is_free[slots] = True
        for freed in self._free:
            is_free[freed] = True
        self._free.append(np.sort(slots)[::-1].copy())
        self._count -= len(slots)
        self._rebuild(is_free)

    def _new_slots(self, count: int) -> Slots:
        """Return slots without ids."""
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
            self._ids = grown(self._ids, self.used, self.used + count)
            taken.append(np.arange(self.used, self.used + count))
            self.used += count
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def _rebuild(self, is_free: npt.NDArray[np.bool_] | None) -> None:
        """Enter all ids into new cells, never fewer than before.

        Args:
            is_free: by slot, whether it has no id; None if all have one.
        """
        size = len(self._cells)
        while self._count > FULL * size:
            size *= 2
        self._cells = _free_cells(size)
        for begin in range(0, self.used, AT_ONCE):
            slots = np.arange(begin, min(begin + AT_ONCE, self.used))
            if is_free is not None:
                slots = slots[~is_free[slots]]
            self._enter(self._ids[slots], slots)

    def _enter(self, ids: Ids, slots: Slots) -> None:
        """Write slots into cells."""
        cells, mask, step = self._cells, len(self._cells) - 1, 0
        at = (hashes(ids, INDEX_SALT) & np.uint64(mask)).view(np.int64)
        narrow = slots.astype(np.int32)
        while len(at):
            (free,) = (cells.take(at) < 0).nonzero()
            cells[at.take(free)] = narrow.take(free)  # of several at one cell, one gets it
            (left,) = (cells.take(at) != narrow).nonzero()
            step += 1
            at, narrow = at.take(left) + step & mask, narrow.take(left)

    def check(self) -> None:
        """Assert the invariants: every id that has a slot is found there, and no other is."""
        free = np.concatenate([*self._free, np.empty(0, np.int64)])
        assert len(np.unique(free)) == len(free) == self.used - self._count
        taken = np.setdiff1d(np.arange(self.used), free)
        assert np.array_equal(np.sort(self._cells[self._cells >= 0]), taken)
        assert np.array_equal(self.find(self._ids[taken]), taken)
        assert self._count <= FULL * len(self._cells)


def _free_cells(count: int) -> npt.NDArray[np.int32]:
    cells = zeros(count, np.dtype(np.int32))
    cells.fill(_FREE)
    return cells
