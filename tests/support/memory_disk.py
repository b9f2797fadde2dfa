"""A disk in memory for rows of tables, which fails when a test says so."""

import errno

import numpy as np

from kvps.core.embedding.stored import Cells, Octets
from kvps.core.embedding.tiered import Tier


class MemoryDisk:
    """Records by cell; ``error`` is raised by writes, ``read_error`` by reads."""

    def __init__(self) -> None:
        self.error: int | None = None
        self.read_error: int | None = None
        self.written = 0

    def open(self, record_bytes: int) -> "MemoryFile":
        return MemoryFile(self, record_bytes)

    def tier(self, room: float = 0.0) -> Tier:
        """Return a tier on this disk, whose rows in memory have ``room`` bytes."""
        tier = Tier("/disk", self.open)
        tier.room = lambda: room
        return tier


class MemoryFile:
    def __init__(self, disk: MemoryDisk, record_bytes: int) -> None:
        self._disk = disk
        self._records = np.full((0, record_bytes), 255, np.uint8)

    def read(self, cells: Cells, records: Octets) -> None:
        if self._disk.read_error:
            raise OSError(self._disk.read_error, "Input/output error")
        assert len(np.unique(cells)) == len(cells)
        records[:] = self._records[cells]

    def write(self, cells: Cells, records: Octets) -> None:
        if self._disk.error:
            raise OSError(self._disk.error, {errno.ENOSPC: "No space left on device"}[self._disk.error])
        assert len(np.unique(cells)) == len(cells)
        more = max(0, int(cells.max(initial=-1)) + 1 - len(self._records))
        self._records = np.concatenate(
            [self._records, np.full((more, self._records.shape[1]), 255, np.uint8)]
        )
        self._records[cells] = records
        self._disk.written += len(cells)
