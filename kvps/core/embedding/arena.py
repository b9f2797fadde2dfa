"""Memory for the rows of a table that grows without ever moving a row.

Rows lie in *arenas*: blocks of memory, each as large as all before it together, but of no less than
1 MiB and no more than 64 MiB. A table that grows gets another arena; what it has stays where it is,
so that its memory never doubles. What was never written to takes no memory: the system gives pages
out as they are touched.

To gather rows arena by arena would take two passes over them, and a call for each arena. So each column has
a *window*: one tensor over all its arenas, from the lowest address to the highest, and what lies between.
Every arena begins at a multiple of the length of a row; so each row is one of the window's rows, and one call
reads or writes rows of all arenas. Only places that :meth:`Arenas.places` makes of slots are ever touched.

A snapshot may hold arenas. A write to a held arena goes to a copy, which is made then: 64 MiB at a time, and
not the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvps.core.embedding.pages import spread, zeros
from kvps.core.embedding.spec import USES, WEIGHT
from kvps.core.embedding.stored import Kept
from kvps.core.optim.base import Terms, Updater
from kvps.core.optim.rounding import Rounding
from kvps.core.optim.sparse_update import Placed, update_placed
from kvps.tensors import at_address, by_row

ARENA_BYTES_MIN, ARENA_BYTES_MAX = 1 << 20, 64 << 20

Slots = npt.NDArray[np.int64]
Columns = dict[str, torch.Tensor]
"""By name, one row for each slot: ``weight``, and the optimizer's states."""
PlacedColumns = dict[str, Placed]


@dataclass(slots=True, eq=False)
class Arena:
    """Rows of neighbouring slots."""

    start: int
    """The slot of its first row."""
    rows: int
    columns: Columns
    """Each [rows, elements of a row]."""
    holds: int = 0
    """Number of snapshots that need it unchanged."""


Window = tuple[torch.Tensor, Slots]
"""One column of all arenas, [from the lowest row to the highest, dim]; and by unit, what is added to its
slots, for their places there."""


class Arenas:
    """The rows of one table.

    Another arena is as large as all of them together, or one in 2 ** ``growth_bits`` parts of that.

    Args:
        columns: by name, the element type of each column, and the elements of a row in it; ``weight`` is one
            of them.
    """

    growth_bits = 0

    def __init__(self, columns: dict[str, tuple[torch.dtype, int]]) -> None:
        self.columns = columns
        self.record_bytes = sum([dtype.itemsize * width for dtype, width in columns.values()])
        """Bytes of a row in all columns."""
        self._unit_bits = max(1, ARENA_BYTES_MIN // self.record_bytes).bit_length() - 1
        """Arenas are whole units of 2 to this many rows."""
        self._arenas: list[Arena] = []
        self.room = 0
        """Rows that fit in."""
        self.moves = 0
        """How often there were other arenas."""

    def __iter__(self) -> Iterator[Arena]:
        return iter(self._arenas)

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows altogether."""
        if self.room >= rows:
            return
        while self.room < rows:
            count = self._next_rows
            columns = {name: _aligned(count, *column) for name, column in self.columns.items()}
            self._arenas.append(Arena(self.room, count, columns))
            self.room += count
        self.moves += 1

    @property
    def _next_rows(self) -> int:
        """Rows of the next arena."""
        size = self.room * self.record_bytes >> self.growth_bits
        size = max(ARENA_BYTES_MIN, min(size, ARENA_BYTES_MAX))
        return max(1, size // self.record_bytes >> self._unit_bits) << self._unit_bits

    def covers(self, slots: int) -> bool:
        """Return whether there is room for so many slots."""
        return self.room >= slots

    def group(self, parts: Sequence[Arenas]) -> ArenaGroup:
        """Return the rows of some tables, all like this one, as a group."""
        return ArenaGroup(parts)

    def forget(self, slots: Slots) -> None:
        """Give up the rows at ``slots``."""

    def slots_of(self, places: Slots) -> Slots:
        """Return the slots of rows of arenas; -1 where there is no row."""
        return places

    def settle(self) -> None:
        """Heed the limit of memory, after rows were restored.

        Raises:
            StorageError: if rows should go to a disk, and cannot.
        """

    def read(self, slots: Slots, names: Sequence[str] | None = None) -> Columns:
        """Return copies of the rows at ``slots``, [len(slots), dim], of the named columns; None for all."""
        self.reserve(1)
        placed = ArenaGroup((self,)).places(slots, (len(slots),))
        return {name: placed[name][0].index_select(0, placed[name][1]) for name in names or placed}

    def keep(self, used: int) -> tuple[Slots, list[Kept], Callable[[], None]]:
        """Return slots below ``used``, the rows as they are now, in this order, and a function that releases
        them.

        Raises:
            StorageError: if rows cannot be put on a disk, where they should be.
        """
        kept = [Kept(arena.start, dict(arena.columns)) for arena in self._arenas]
        holders = list(self._arenas)
        for arena in holders:
            arena.holds += 1

        def release() -> None:
            for arena in holders:
                arena.holds -= 1

        return np.arange(used), kept, release

    def part(self, slots: Slots) -> None:
        """Replace the arenas of ``slots`` that snapshots hold by copies."""
        if not any(arena.holds for arena in self._arenas):
            return
        starts = [arena.start for arena in self._arenas]
        for index in np.unique(np.searchsorted(starts, slots, side="right") - 1).tolist():
            arena = self._arenas[index]
            if arena.holds:
                columns = {name: _aligned(arena.rows, *column) for name, column in self.columns.items()}
                for name, column in columns.items():
                    column.copy_(arena.columns[name])
                self._arenas[index] = Arena(arena.start, arena.rows, columns)
        self.moves += 1

    @property
    def counted_row_bytes(self) -> int:
        """Bytes that the memory budget counts for a row: its weights."""
        dtype, width = self.columns[WEIGHT]
        return dtype.itemsize * width

    @property
    def size_bytes(self) -> int:
        """Bytes of all arenas, touched or not."""
        return self.room * self.record_bytes

    def check(self) -> None:
        """Assert the invariants: arenas lie end to end, their columns are as long, and windows show them."""
        stop = 0
        for arena in self._arenas:
            assert arena.start == stop
            assert arena.columns.keys() == self.columns.keys()
            ends = np.array([arena.start, arena.start + arena.rows - 1])
            placed = ArenaGroup((self,)).places(ends, (2,))
            for name, column in arena.columns.items():
                assert (column.dtype, *column.shape) == (
                    self.columns[name][0],
                    arena.rows,
                    self.columns[name][1],
                )
                rows, (first, last) = placed[name]
                assert rows[first].data_ptr() == column.data_ptr()
                assert rows[last].data_ptr() == column[-1].data_ptr()
            assert arena.holds >= 0
            stop += arena.rows
        assert stop == self.room


class ArenaGroup:
    """The rows of some tables with the same columns, which are read and written in the same calls.

    Args:
        parts: the rows of each table.
    """

    def __init__(self, parts: Sequence[Arenas]) -> None:
        self._parts = parts
        self._moves = -1
        """How often the windows of all had been made when those below were."""
        self._windows: dict[str, Window] = {}
        self._begins = np.zeros(0, np.int64)
        """For each table, where its units begin in the windows."""

    def _look(self) -> None:
        """See the rows of all as they are now."""
        moves = sum([part.moves for part in self._parts])
        if moves == self._moves:
            return
        self._moves, bits = moves, self._parts[0]._unit_bits
        arenas = [arena for part in self._parts for arena in part]
        starts, units = np.array([(arena.start, arena.rows >> bits) for arena in arenas]).T
        self._begins = np.array([0, *[part.room >> bits for part in self._parts]]).cumsum()[:-1]
        for name, (dtype, width) in self._parts[0].columns.items():
            row_bytes = width * dtype.itemsize
            firsts = np.array([arena.columns[name].data_ptr() // row_bytes for arena in arenas])
            lowest = int(firsts.min())
            count = max([first + arena.rows for first, arena in zip(firsts.tolist(), arenas, strict=True)])
            rows = at_address(lowest * row_bytes, (count - lowest) * width, dtype).view(-1, width)
            self._windows[name] = rows, np.repeat(firsts - lowest - starts, units)

    def places(self, slots: Slots, sizes: Sequence[int]) -> PlacedColumns:
        """Return where the rows at ``slots`` are; a snapshot may hold them.

        Args:
            slots: those of each table, one table after the other.
            sizes: the number of slots of each.
        """
        self._look()
        units = (slots >> self._parts[0]._unit_bits) + spread(self._begins, sizes)
        return {
            name: (rows, torch.from_numpy(shifts.take(units) + slots))
            for name, (rows, shifts) in self._windows.items()
        }

    def places_to_write(self, slots: Slots, sizes: Sequence[int]) -> PlacedColumns:
        """Return where the rows at ``slots`` are; they may be written to."""
        begin = 0
        for part, size in zip(self._parts, sizes, strict=True):
            part.part(slots[begin : begin + size])
            begin += size
        return self.places(slots, sizes)

    def weights(self, slots: Slots, sizes: Sequence[int], out: torch.Tensor) -> None:
        """Copy the weights at ``slots`` into ``out``, [len(slots), dim]; where a slot is -1, any other row.

        At least one slot is not -1.
        """
        self._look()
        rows, shifts = self._windows[WEIGHT]
        units = (slots >> self._parts[0]._unit_bits) + spread(self._begins, sizes)
        at = shifts.take(units, mode="clip") + slots
        at[slots < 0] = at[slots.argmax()]
        torch.index_select(rows, 0, torch.from_numpy(at), out=out)

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
        """Update the rows at ``slots``, each named once, and count the use of each if they have a half-life;
        gradients are only read."""
        placed = self.places_to_write(slots, sizes)
        if half_life:
            uses, at = placed.pop(USES)
            uses[at] = torch.logaddexp2(uses[at], torch.tensor(terms.step / half_life, dtype=uses.dtype))
        update_placed(placed.pop(WEIGHT), placed, gradients, updater, terms, is_read=True, rounding=rounding)

    def write(self, slots: Slots, sizes: Sequence[int], columns: Columns) -> None:
        """Write rows to ``slots``, each named once."""
        for name, (rows, at) in self.places_to_write(slots, sizes).items():
            by_row(rows)[at.numpy()] = by_row(columns[name])


def _aligned(count: int, dtype: torch.dtype, width: int) -> torch.Tensor:
    """Return a tensor [count, width] whose address is a multiple of the length of a row."""
    row_bytes = width * dtype.itemsize
    block = torch.from_numpy(zeros((count + 1) * row_bytes, np.dtype(np.uint8)))
    start = -block.data_ptr() % row_bytes
    return block[start : start + count * row_bytes].view(dtype).view(count, width)
