"""Files of a tier: records without a name on the disk, which is free again when the process ends in any way.

Room is allocated in advance, so that a full disk is told before anything is written. Rows that lie apart are
read through a mapping: a call for each took ten times as long. If the disk fails, that ends the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections import deque
from itertools import pairwise, repeat

import numpy as np

from kvps.core.embedding.arena import Slots
from kvps.core.embedding.stored import Octets
from kvps.core.embedding.tiered import Tier
from kvps.errors import ConfigError
from kvps.phrases import bytes_in_words

SLAB_BYTES_MIN, SLAB_BYTES_MAX = 1 << 20, 64 << 20
"""Room is allocated by an eighth of the file, within these bounds."""
SPAN_BYTES = 256 << 10
"""Bytes that are written by one call."""
LACKING = "a file of rows has fewer records than it should"
SLOW_S = 10e-6
"""Seconds for a row, above which a read has waited for the disk. The next read names all rows beforehand."""


class DiskRows:
    """Records of one length in a file of their own.

    Args:
        directory: where the file is.
        record_bytes: bytes of a record.

    Raises:
        OSError: if it cannot be made.
    """

    def __init__(self, directory: str, record_bytes: int) -> None:
        self._record_bytes = record_bytes
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            self._fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._size = 0
        self._mapped = np.empty(0, f"V{record_bytes}")
        """The records, of which those that are looked at are read from the disk, page by page."""
        self._is_slow = True
        """The last read waited for the disk."""

    def read(self, cells: Slots, records: Octets) -> None:
        if 2 * np.count_nonzero(np.diff(cells) == 1) > len(cells):
            offsets, parts = self._runs(cells, records)
            if sum(map(os.preadv, repeat(self._fd), zip(parts, strict=True), offsets)) < records.nbytes:
                raise OSError(None, LACKING)
            return
        if len(cells) and cells.max() >= len(self._mapped):
            raise OSError(None, LACKING)
        size = self._record_bytes
        if self._is_slow:  # the disk looks for all of them at once
            offsets = (cells * size).tolist()
            advice = repeat(os.POSIX_FADV_WILLNEED)
            deque(map(os.posix_fadvise, repeat(self._fd), offsets, repeat(size), advice), 0)
        begin = time.perf_counter()
        records.view(self._mapped.dtype)[:, 0] = self._mapped[cells]
        self._is_slow = time.perf_counter() - begin > SLOW_S * len(cells)

    def write(self, cells: Slots, records: Octets) -> None:
        if not len(cells):
            return
        size = self._record_bytes
        end = (int(cells.max()) + 1) * size
        if end > self._size:
            longer = max(end, self._size + min(max(SLAB_BYTES_MIN, self._size // 8), SLAB_BYTES_MAX))
            self._allocate(longer - self._size)
            block = mmap.mmap(self._fd, longer, prot=mmap.PROT_READ)
            block.madvise(mmap.MADV_RANDOM)
            self._mapped, self._size = np.frombuffer(block, self._mapped.dtype, longer // size), longer
        begin, count = 0, len(cells)
        while begin < count:  # as few calls as possible: what lies between neighbours is written again
            first = int(cells[begin])
            stop = int(cells.searchsorted(first + max(1, SPAN_BYTES // size)))
            span = int(cells[stop - 1]) + 1 - first
            octets = records[begin:stop]
            if span > stop - begin:
                octets = np.zeros((span, size), np.uint8)
                os.preadv(self._fd, [octets.reshape(-1).data], first * size)
                octets[cells[begin:stop] - first] = records[begin:stop]
            if os.pwrite(self._fd, octets.reshape(-1).data, first * size) < octets.nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # The system begins to write it now, so that a control group never waits for many changed pages.
            os.posix_fadvise(self._fd, first * size, octets.nbytes, os.POSIX_FADV_DONTNEED)
            begin = stop

    def _allocate(self, need: int) -> None:
        try:
            os.posix_fallocate(self._fd, self._size, need)
        except OSError as error:
            sizes = f"need {bytes_in_words(need)}, free {bytes_in_words(shutil.disk_usage(self._fd).free)}"
            raise OSError(error.errno, f"{error.strerror} ({sizes})") from error

    def _runs(self, cells: Slots, records: Octets) -> tuple[list[int], list[memoryview]]:
        """Return where records of neighbouring cells begin in the file, and their memory."""
        size, octets = self._record_bytes, records.reshape(-1).data
        begins = np.flatnonzero(np.diff(cells, prepend=-2) != 1)
        edges = [*(begins * size).tolist(), len(cells) * size]
        parts = [octets[begin:end] for begin, end in pairwise(edges)]
        return (cells[begins] * size).tolist(), parts


def tier_in(directory: str) -> Tier:
    """Return a tier whose files are in ``directory``.

    Raises:
        ConfigError: if none can be made there.
    """
    try:
        DiskRows(directory, 1)
    except OSError as error:
        raise ConfigError(
            f"--table-dir {directory} (KVPS_TABLE_DIR): no file can be made there: {error.strerror}. Give a "
            "directory on a local disk that the server may write to"
        ) from error
    return Tier(directory, lambda record_bytes: DiskRows(directory, record_bytes))
