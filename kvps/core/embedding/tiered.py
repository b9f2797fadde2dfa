"""Rows of a table larger than memory: those in use lie in memory, the others in a file.

A slot is at a *place*, a row of the arenas, or in a *cell*, a record of the file with all columns of one
row. A row is brought to a place when it is made or updated, and also when it is read. If the limit leaves no
memory for another arena, rows that were used less go to cells: a clock goes over the places, and takes those
whose count of uses has come to 0. So the memory of a table is bounded, and its values are the same bits
wherever they lie.

A row leaves its cell when it is brought. Rows that go are written side by side, into segments of which most
cells are free, so that a few calls write them. While a snapshot holds the file, cells that rows leave are not
given out. A snapshot begins with a copy of the rows in memory in new cells. It then reads the file from begin
to end, a few MiB at a time.

If the disk takes nothing more, rows stay in memory, and the next push is refused: an update that has begun is
finished.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

from kvps.core.embedding.arena import ArenaGroup, Arenas, Columns, Slots
from kvps.core.embedding.pages import grown
from kvps.core.embedding.spec import WEIGHT
from kvps.core.embedding.stored import Kept, Octets, RowFile, StoredRows, column_of
from kvps.core.optim.base import Terms, Updater
from kvps.core.optim.rounding import Rounding
from kvps.core.optim.sparse_update import BLOCK_COUNT
from kvps.errors import StorageError
from kvps.tensors import by_row

ROW_BYTES = 64
"""Memory of the index, the stamp and the place of a row, and as much while they grow or a snapshot is
taken."""
SEGMENT_BYTES = 256 << 10
PIECE_BYTES = 4 << 20
"""Bytes that are read for a snapshot at once."""
USES_MAX, PINNED = 7, 255
"""Largest count of uses, and that of places that must not be taken."""
NOWHERE = np.int32(-(2**31))
"""Marks a slot that has neither a place nor a cell."""


class Tier:
    """The memory that the tables of a server share for rows in use, and where they put the others.

    Args:
        name: of the directory, for texts.
        open_file: returns a file for records of so many bytes.
    """

    def __init__(self, name: str, open_file: Callable[[int], RowFile]) -> None:
        self.name = name
        self.open_file = open_file
        self.room: Callable[[], float] = lambda: 0.0
        """Returns the bytes that rows in memory may take."""
        self.tables: weakref.WeakSet[TieredArenas] = weakref.WeakSet()

    @property
    def hot_bytes(self) -> int:
        """Bytes of all places."""
        return sum([table.size_bytes for table in self.tables])

    @property
    def index_bytes(self) -> int:
        """Bytes of what tables keep in memory of all rows."""
        return ROW_BYTES * sum([table.slots for table in self.tables])

    def has_room(self, size: int) -> bool:
        """Return whether rows in memory may take ``size`` bytes more."""
        return self.hot_bytes + size <= self.room()

    def settle(self, size: int = 0) -> None:
        """Take memory from the largest tables until ``size`` bytes are left, and some for one without room.

        Raises:
            StorageError: if rows cannot be put on the disk; all rows are as they were.
        """
        wanted = [table.size_bytes for table in self.tables if table.lacks_room]
        try:
            while self.tables:
                largest = max(self.tables, key=lambda table: table.size_bytes)
                is_unfair = bool(wanted) and largest.size_bytes > 2 * min(wanted)
                if (self.has_room(size) and not is_unfair) or not largest.shrink():
                    break
                wanted.clear()
        except OSError as error:
            raise self.failure(error) from error

    def failure(self, error: OSError) -> StorageError:
        """Return the error of requests that need the disk."""
        return StorageError(
            f"rows of embedding tables cannot be moved between memory and {self.name}: "
            f"{error.strerror or error}. The request was refused, and no row has changed. Make room on that "
            "disk, or make it writable (kvps-server --table-dir), and try again"
        )


class TieredArenas(Arenas):
    """The rows of one table, of which some are in memory.

    Its arenas have places, where those of other tables have slots.
    """

    growth_bits = 4

    def __init__(self, columns: dict[str, tuple[torch.dtype, int]], tier: Tier) -> None:
        super().__init__(columns)
        self._tier = tier
        wide_first = sorted(columns.items(), key=lambda column: -column[1][0].itemsize)
        begins = accumulate([dtype.itemsize * width for _, (dtype, width) in wide_first], initial=0)
        self._begins = {name: begin for (name, _), begin in zip(wide_first, begins, strict=False)}
        """Where each column begins in a record."""
        self._file = tier.open_file(self.record_bytes)
        self._own = ArenaGroup((weakref.proxy(self),))
        self.slots = 0
        """Slots that there have been."""
        self._at = np.empty(0, np.int32)
        """By slot its place; ~cell, or NOWHERE."""
        self._owner = np.empty(0, np.int32)
        """By place its slot; -1 for none."""
        self._uses = np.empty(0, np.uint8)
        """By place how often it was used lately."""
        self._hand = 0
        self._spare = np.empty(0, np.int64)
        """Places without a row; the last is given out first."""
        self._cells = _Cells(max(1, SEGMENT_BYTES // self.record_bytes))
        self._holds = 0
        self._left: list[Slots] = []
        """Cells that rows have left while snapshots hold the file."""
        self.lacks_room = False
        """Rows had to go because other tables have the memory."""
        tier.tables.add(self)

    # --- as other arenas --------------------------------------------------------------------------

    def covers(self, slots: int) -> bool:
        return self.slots >= slots

    def reserve(self, rows: int) -> None:
        if rows > self.slots:
            if rows > len(self._at):
                self._at = grown(self._at, self.slots, rows)
            self._at[self.slots : rows] = NOWHERE
            self.slots = rows

    def group(self, parts: Sequence[Arenas]) -> ArenaGroup:
        return TieredGroup([part for part in parts if isinstance(part, TieredArenas)])

    def read(self, slots: Slots, names: Sequence[str] | None = None) -> Columns:
        at = self.at(slots)
        is_hot = at >= 0
        records = np.empty((len(at), self.record_bytes), np.uint8)
        records[is_hot] = self._gathered(at[is_hot])
        records[~is_hot] = self.stored(at[~is_hot])
        wanted = names or self.columns
        return {name: column_of(records, self._begins[name], *self.columns[name]) for name in wanted}

    def forget(self, slots: Slots) -> None:
        at = self.at(slots)
        self._vacated(at[at >= 0])
        self._leave(at)
        self._at[slots] = NOWHERE

    def slots_of(self, places: Slots) -> Slots:
        return self._owner[places].astype(np.int64)

    def keep(self, used: int) -> tuple[Slots, list[Kept], Callable[[], None]]:
        at = self._at[:used].astype(np.int64)
        (hot,) = (at >= 0).nonzero()
        image = self._cells.take(len(hot))
        at_once = max(1, PIECE_BYTES // self.record_bytes)
        try:
            for begin in range(0, len(hot), at_once):
                some = slice(begin, begin + at_once)
                self._file.write(image[some], self._gathered(at[hot[some]]))
        except OSError as error:
            self._cells.give_back(image)
            raise self._tier.failure(error) from error
        at[hot] = ~image
        (slots,) = (at != NOWHERE).nonzero()
        cells = ~at[slots]
        order = cells.argsort()
        slots, cells = slots.take(order), cells.take(order)
        kept: list[Kept] = []
        for begin in range(0, len(cells), at_once):
            some_cells = cells[begin : begin + at_once]
            columns: dict[str, torch.Tensor | StoredRows] = {
                name: StoredRows(self._file, some_cells, self.record_bytes, self._begins[name], *column)
                for name, column in self.columns.items()
            }
            kept.append(Kept(begin, columns))
        self._holds += 1

        def release() -> None:
            self._holds -= 1
            self._left.append(image)
            if not self._holds:
                for cells in self._left:
                    self._cells.give_back(cells)
                self._left.clear()

        return slots, kept, release

    def settle(self) -> None:
        self._tier.settle()

    def check(self) -> None:
        """Assert the invariants: each row is at one place or in one cell, and no other row is."""
        super().check()
        at = self._at[: self.slots]
        (hot,) = (at >= 0).nonzero()
        assert np.array_equal(self._owner[at[hot]], hot)
        assert np.count_nonzero(self._owner >= 0) == len(hot)
        assert len(hot) + len(self._spare) == self.room == len(self._owner) == len(self._uses)
        cells = np.concatenate([~at[(at < 0) & (at != NOWHERE)], self._cells.free, *self._left])
        assert len(np.unique(cells)) == len(cells)
        assert self._holds or len(cells) == self._cells.made

    # --- places -----------------------------------------------------------------------------------

    def at(self, slots: Slots) -> Slots:
        """Return the place of each slot, or ~cell, or NOWHERE."""
        return self._at.take(slots).astype(np.int64)

    def bring(self, slots: Slots) -> Slots:
        """Bring rows to memory, each named once; return their places. New rows have undefined contents.

        Raises:
            StorageError: if some cannot be read.
        """
        at = self.at(slots)
        (cold,) = (at < 0).nonzero()
        hot = at[at >= 0]
        self.use(hot)
        if len(cold):
            records = self.stored(at[cold])
            uses = self._uses[hot]
            self._uses[hot] = PINNED
            places = self._vacate(len(cold), is_needed=True)
            self._uses[hot] = uses
            self._put(slots[cold], at[cold], records, places)
            at[cold] = places
        return at

    def admit(self, slots: Slots, at: Slots, records: Octets) -> None:
        """Keep rows that were read in memory, as far as others can go."""
        count = min(len(slots), self.room // 2 + len(self._spare) + 1)
        places = self._vacate(count, is_needed=False)
        self._put(slots[: len(places)], at[: len(places)], records[: len(places)], places)

    def use(self, places: Slots) -> None:
        """Count a use of the rows at ``places``."""
        self._uses[places] = np.minimum(self._uses[places], USES_MAX - 1) + np.uint8(1)

    def stored(self, at: Slots) -> Octets:
        """Return the records of rows that are not in memory: of new rows, or of others.

        Raises:
            StorageError: if some cannot be read.
        """
        records = np.empty((len(at), self.record_bytes), np.uint8)
        try:
            if len(at) and at[0] != NOWHERE:
                self._file.read(~at, records)
        except OSError as error:
            raise self._tier.failure(error) from error
        return records

    def items(self, records: Octets, name: str) -> npt.NDArray[np.void]:
        """Return a column of records, an item each; it shows their memory."""
        dtype, width = self.columns[name]
        begin, size = self._begins[name], width * dtype.itemsize
        return records[:, begin : begin + size].view(f"V{size}")[:, 0]

    def shrink(self) -> bool:
        """Move the rows of the last arena to cells, and give its memory back; False for the only arena.

        Raises:
            OSError: if they cannot be written.
        """
        if len(self._arenas) < 2:
            return False
        begin = self._arenas[-1].start
        self._evict(begin + (self._owner[begin:] >= 0).nonzero()[0])
        self._arenas.pop()
        self.room = begin
        self.moves += 1
        self._spare = self._spare[self._spare < begin]
        self._hand = 0
        self._owner, self._uses = self._owner[:begin].copy(), self._uses[:begin].copy()
        return True

    def _put(self, slots: Slots, at: Slots, records: Octets, places: Slots) -> None:
        """Put records at ``places``; they leave their cells."""
        for name, (rows, where) in self._own.places(places, (len(places),)).items() if len(places) else ():
            by_row(rows)[where.numpy()] = self.items(records, name)
        self._leave(at)
        self._at[slots], self._owner[places], self._uses[places] = places, slots, 0

    def _gathered(self, places: Slots) -> Octets:
        """Return the records of the rows at ``places``."""
        records = np.empty((len(places), self.record_bytes), np.uint8)
        if len(places):
            for name, (rows, where) in self._own.places(places, (len(places),)).items():
                self.items(records, name)[:] = by_row(rows)[where.numpy()]
        return records

    def _vacate(self, count: int, *, is_needed: bool) -> Slots:
        """Take places for ``count`` rows; fewer if rows have to stay where they are and it is not needed."""
        self.lacks_room = False
        while (missing := count - len(self._spare)) > 0:
            if self._tier.has_room(self._next_rows * self.record_bytes):
                self._grow()
                continue
            self.lacks_room = True
            victims = self._coldest(missing)
            try:
                self._evict(victims)
            except OSError:
                victims = victims[:0]
            if not len(victims):
                if not is_needed:
                    break
                self._grow()
        rest = max(0, len(self._spare) - count)
        taken, self._spare = self._spare[rest:], self._spare[:rest]
        return taken

    def _grow(self) -> None:
        before = self.room
        super().reserve(before + 1)
        fresh = np.arange(before, self.room)
        self._owner = np.concatenate([self._owner, np.full(len(fresh), -1, np.int32)])
        self._uses = np.concatenate([self._uses, np.zeros(len(fresh), np.uint8)])
        self._spare = np.concatenate([self._spare, fresh])

    def _coldest(self, count: int) -> Slots:
        """Return up to ``count`` places whose rows were used least."""
        uses, found, left = self._uses, [np.empty(0, np.int64)], (USES_MAX + 1) * self.room
        while count and left > 0:
            begin = self._hand
            stop = min(begin + max(4 * count, 1024), self.room)
            (idle,) = ((uses[begin:stop] == 0) & (self._owner[begin:stop] >= 0)).nonzero()
            idle = begin + idle[:count]
            count -= len(idle)
            if not count:
                stop = int(idle[-1]) + 1
            some = uses[begin:stop]
            some -= (some > 0) & (some != PINNED)
            uses[idle] = 1  # not again
            found.append(idle)
            left -= stop - begin
            self._hand = stop % self.room
        return np.unique(np.concatenate(found))

    def _evict(self, places: Slots) -> None:
        """Move rows to cells.

        Raises:
            OSError: if they cannot be written; they stay where they are.
        """
        if not len(places):
            return
        cells, slots = self._cells.take(len(places)), self._owner[places]
        try:
            self._file.write(cells, self._gathered(places))
        except OSError:
            self._cells.give_back(cells)
            raise
        self._at[slots] = ~cells
        self._vacated(places)

    def _vacated(self, places: Slots) -> None:
        self._owner[places] = -1
        self._spare = np.concatenate([self._spare, places])

    def _leave(self, at: Slots) -> None:
        """Give back the cells of rows."""
        cells = ~at[(at < 0) & (at != NOWHERE)]
        if self._holds:
            self._left.append(cells)
        else:
            self._cells.give_back(cells)


class TieredGroup(ArenaGroup):
    """The rows of some tables with the same columns, brought to memory block by block."""

    def __init__(self, parts: Sequence[TieredArenas]) -> None:
        super().__init__(parts)
        self._tiered = parts

    def weights(self, slots: Slots, sizes: Sequence[int], out: torch.Tensor) -> None:
        edges = list(pairwise(accumulate(sizes, initial=0)))
        at = np.full(len(slots), NOWHERE, np.int64)
        for part, (begin, end) in zip(self._tiered, edges, strict=True):
            (there,) = (slots[begin:end] >= 0).nonzero()
            at[begin + there] = part.at(slots[begin:end].take(there))
            part.use(at[begin:end][at[begin:end] >= 0])
        if (at >= 0).any():
            super().weights(at, sizes, out)
        for part, (begin, end) in zip(self._tiered, edges, strict=True):
            cold = begin + ((at[begin:end] < 0) & (slots[begin:end] >= 0)).nonzero()[0]
            if len(cold):
                some, first, inverse = np.unique(slots.take(cold), return_index=True, return_inverse=True)
                cells = at.take(cold.take(first))
                records = part.stored(cells)
                by_row(out)[cold] = part.items(records, WEIGHT)[inverse]
                part.admit(some, cells, records)

    def write(self, slots: Slots, sizes: Sequence[int], columns: Columns) -> None:
        for some, block, places in self._blocks(slots, sizes, columns[WEIGHT].shape[1]):
            super().write(places, block, {name: column[some] for name, column in columns.items()})

    def update(
        self,
        slots: Slots,
        sizes: Sequence[int],
        gradients: torch.Tensor,
        updater: Updater,
        terms: Terms,
        rounding: Rounding | None = None,
        half_life: int = 0,
    ) -> None:
        for some, block, places in self._blocks(slots, sizes, gradients.shape[1]):
            chances = None if rounding is None else rounding[some]
            super().update(places, block, gradients[some], updater, terms, chances, half_life)

    def _blocks(
        self, slots: Slots, sizes: Sequence[int], width: int
    ) -> Iterator[tuple[slice, list[int], Slots]]:
        """Yield as many rows as an update gathers at once, how many each table has of them, and where they
        are in memory."""
        edges = list(pairwise(accumulate(sizes, initial=0)))
        at_once = max(1, BLOCK_COUNT // width)
        for begin in range(0, len(slots), at_once):
            end = begin + at_once
            cuts = [(min(max(low, begin), end), min(max(high, begin), end)) for low, high in edges]
            places = [
                part.bring(slots[low:high]) if low < high else slots[:0]
                for part, (low, high) in zip(self._tiered, cuts, strict=True)
            ]
            yield slice(begin, end), [high - low for low, high in cuts], np.concatenate(places)


class _Cells:
    """The cells of a file, in segments; rows are put where most of a segment is free, side by side.

    A segment is filled again when half of it is free. So the file is at most twice as long as its rows need.
    """

    def __init__(self, each: int) -> None:
        self._is_free = np.empty((0, each), np.bool_)
        """By segment, which of its cells are free."""
        self._counts = np.empty(0, np.int64)
        """By segment how many these are."""

    @property
    def made(self) -> int:
        """Number of cells."""
        return self._is_free.size

    @property
    def free(self) -> Slots:
        """The free cells."""
        return self._is_free.reshape(-1).nonzero()[0]

    def take(self, count: int) -> Slots:
        """Take ``count`` cells, ascending."""
        each = self._is_free.shape[1]
        (loose,) = (2 * self._counts >= each).nonzero()
        loose = loose[self._counts[loose].argsort()[::-1]]
        totals = self._counts[loose].cumsum()
        lacking = count - int(totals[-1] if len(totals) else 0)
        if lacking > 0:
            more = -(-lacking // each)
            fresh = np.arange(len(self._counts), len(self._counts) + more)
            self._is_free = np.concatenate([self._is_free, np.ones((more, each), np.bool_)])
            self._counts = np.concatenate([self._counts, np.full(more, each)])
            loose = np.concatenate([loose, fresh])
        else:
            loose = loose[: int(totals.searchsorted(count)) + 1]
        rows, columns = self._is_free[loose].nonzero()
        cells: Slots = np.sort((loose[rows] * each + columns)[:count])
        self._mark(cells, is_free=False)
        return cells

    def give_back(self, cells: Slots) -> None:
        """Take in cells that have no row any more."""
        self._mark(cells, is_free=True)

    def _mark(self, cells: Slots, *, is_free: bool) -> None:
        self._is_free.reshape(-1)[cells] = is_free
        changed = np.bincount(cells // self._is_free.shape[1], minlength=len(self._counts))
        self._counts += changed if is_free else -changed
