"""Rows that lie in a file: records with all columns of a row, of which readers want a column at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

Cells = npt.NDArray[np.int64]
Octets = npt.NDArray[np.uint8]
"""Records, [n, bytes of a record]."""


class RowFile(Protocol):
    """Records of one length on a disk, by the numbers of their cells. Any thread may read, and one writes."""

    def read(self, cells: Cells, records: Octets) -> None:
        """Read the records in ``cells``, each named once.

        Raises:
            OSError: if that fails.
        """

    def write(self, cells: Cells, records: Octets) -> None:
        """Write records to ``cells``, which ascend; the file is as long as that needs.

        Raises:
            OSError: if that fails; there may be anything in these cells then.
        """


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A column of some records, which are read when they are needed."""

    file: RowFile
    cells: Cells
    record_bytes: int
    begin: int
    """Where the column begins in a record."""
    dtype: torch.dtype
    width: int
    is_flat: bool = False

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, rows: slice) -> StoredRows:
        return replace(self, cells=self.cells[rows])

    def numel(self) -> int:
        """Return the number of elements."""
        return len(self.cells) * self.width

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self.dtype.itemsize

    def reshape(self, size: int) -> StoredRows:
        """Return the same elements, flat."""
        assert size == -1
        return replace(self, is_flat=True)

    def load(self) -> torch.Tensor:
        """Return the rows, [n, width]; [n * width] if it is flat.

        Raises:
            OSError: if they cannot be read.
        """
        records = np.empty((len(self.cells), self.record_bytes), np.uint8)
        self.file.read(self.cells, records)
        rows = column_of(records, self.begin, self.dtype, self.width)
        return rows.view(-1) if self.is_flat else rows


class Kept(NamedTuple):
    """Rows of a table as a snapshot holds them."""

    start: int
    """How many rows are before them."""
    columns: dict[str, torch.Tensor | StoredRows]


def loaded(rows: torch.Tensor | StoredRows) -> torch.Tensor:
    """Return rows in memory."""
    return rows.load() if isinstance(rows, StoredRows) else rows


def column_of(records: Octets, begin: int, dtype: torch.dtype, width: int) -> torch.Tensor:
    """Return a column of records, which begins at byte ``begin`` of each."""
    octets = np.ascontiguousarray(records[:, begin : begin + width * dtype.itemsize])
    return torch.from_numpy(octets.reshape(-1)).view(dtype).view(len(records), width)
