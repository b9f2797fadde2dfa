"""Memory for the rows of a table that grows without ever moving a row.

Rows lie in *arenas*: blocks of memory, each as large as all before it together, but of no less than
1 MiB and no more than 64 MiB. A table that grows gets another arena; what it has stays where it is,
so that its memory never doubles. What was never written to takes no memory: the system gives pages
out as they are touched.

A snapshot may hold arenas. A write to a held arena goes to a copy, which is made then: 64 MiB at a time, and
not the whole table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

ARENA_BYTES_MIN, ARENA_BYTES_MAX = 1 << 20, 64 << 20

Slots = npt.NDArray[np.int64]
Columns = dict[str, torch.Tensor]
"""By name, one row for each slot: ``weight``, and the optimizer's states."""

WEIGHT = "weight"


@dataclass(slots=True, eq=False)
class Arena:
    """Rows of neighbouring slots."""

    start: int
    """The slot of its first row."""
    rows: int
    columns: Columns
    """Each [rows, dim]."""
    holds: int = 0
    """Number of snapshots that need it unchanged."""


class Arenas:
    """The rows of one table.

    Args:
        dim: elements of a row.
        dtypes: by name, the element type of each column; ``weight`` is one of them.
    """

    def __init__(self, dim: int, dtypes: dict[str, torch.dtype]) -> None:
        self.dim = dim
        self.dtypes = dtypes
        self._row_bytes = dim * sum([dtype.itemsize for dtype in dtypes.values()])
        self._arenas: list[Arena] = []
        self._starts: list[int] = []
        self.room = 0
        """Rows that fit in."""

    def __iter__(self) -> Iterator[Arena]:
        return iter(self._arenas)

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows altogether."""
        while self.room < rows:
            size = self.room * self._row_bytes
            size = max(ARENA_BYTES_MIN, min(size, ARENA_BYTES_MAX))
            count = max(1, size // self._row_bytes)
            columns = {
                name: torch.empty((count, self.dim), dtype=dtype) for name, dtype in self.dtypes.items()
            }
            self._starts.append(self.room)
            self._arenas.append(Arena(self.room, count, columns))
            self.room += count

    def read(self, slots: Slots) -> Columns:
        """Return copies of the rows at ``slots``: of each column one tensor [len(slots), dim]."""
        if not len(slots):
            return {name: torch.empty((0, self.dim), dtype=dtype) for name, dtype in self.dtypes.items()}
        parts = [
            (places, {name: column[at] for name, column in arena.columns.items()})
            for arena, places, at in self._cut(slots)
        ]
        if len(parts) == 1:
            return parts[0][1]
        found = {
            name: torch.empty((len(slots), self.dim), dtype=dtype) for name, dtype in self.dtypes.items()
        }
        for places, part in parts:
            for name, rows in part.items():
                found[name][places] = rows
        return found

    def weights(self, slots: Slots) -> torch.Tensor:
        """Return copies of the weights at ``slots``, [len(slots), dim]."""
        found = torch.empty((len(slots), self.dim), dtype=self.dtypes[WEIGHT])
        for arena, places, at in self._cut(slots):
            found[places] = arena.columns[WEIGHT][at]
        return found

    def write(self, slots: Slots, columns: Columns) -> None:
        """Write rows to ``slots``, each named once."""
        for arena, places, at in self.cut_to_write(slots):
            for name, column in arena.columns.items():
                column[at] = columns[name][places]

    def cut_to_write(self, slots: Slots) -> Iterator[tuple[Arena, torch.Tensor, torch.Tensor]]:
        """Yield the same as :meth:`_cut`, with arenas that may be written to."""
        for arena, places, at in self._cut(slots):
            yield self._writable(arena), places, at

    def keep(self) -> tuple[list[Arena], Callable[[], None]]:
        """Return the arenas as they are now, and a function that releases them."""
        kept = [Arena(arena.start, arena.rows, dict(arena.columns)) for arena in self._arenas]
        holders = list(self._arenas)
        for arena in holders:
            arena.holds += 1

        def release() -> None:
            for arena in holders:
                arena.holds -= 1

        return kept, release

    def _writable(self, arena: Arena) -> Arena:
        if not arena.holds:
            return arena
        mine = Arena(
            arena.start, arena.rows, {name: column.clone() for name, column in arena.columns.items()}
        )
        self._arenas[bisect_right(self._starts, arena.start) - 1] = mine
        return mine

    def _cut(self, slots: Slots) -> Iterator[tuple[Arena, torch.Tensor, torch.Tensor]]:
        """Yield each arena that holds some of ``slots``, the positions in ``slots``, and the rows in it."""
        if len(self._arenas) == 1 and len(slots):
            yield self._arenas[0], torch.arange(len(slots)), torch.from_numpy(slots)
            return
        which = np.searchsorted(self._starts, slots, side="right") - 1
        order = np.argsort(which, kind="stable")
        edges = np.searchsorted(which[order], np.arange(len(self._arenas) + 1))
        for index in np.flatnonzero(np.diff(edges)):
            places = order[edges[index] : edges[index + 1]]
            arena = self._arenas[index]
            yield arena, torch.from_numpy(places), torch.from_numpy(slots[places] - arena.start)

    @property
    def size_bytes(self) -> int:
        """Bytes of all arenas, touched or not."""
        return self.room * self._row_bytes

    def check(self) -> None:
        """Assert the invariants: arenas lie end to end, and every column is as long."""
        stop = 0
        for arena, start in zip(self._arenas, self._starts, strict=True):
            assert arena.start == start == stop
            assert arena.columns.keys() == self.dtypes.keys()
            for name, column in arena.columns.items():
                assert column.shape == (arena.rows, self.dim)
                assert column.dtype == self.dtypes[name]
            assert arena.holds >= 0
            stop += arena.rows
        assert stop == self.room
