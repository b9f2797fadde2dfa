"""Memory of columns that grow: in pages of their own, which the system takes back when a column is let go.

An array that malloc cuts from its heap leaves a hole there when a longer one takes its place, and a table
that grows to its size by and by leaves a third of it in holes.

Columns of many tables are read and written in one pass as a :func:`window`: one array from the lowest address
of all to the highest. Only elements of the columns are ever touched.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvps.tensors import at_address

MAPPED_BYTES = 1 << 20
"""Arrays from this size on have pages of their own."""
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
"""Advice to use large pages, so that a gather of many rows finds their addresses at once. Linux."""

T = TypeVar("T", bound=np.generic)


def zeros(count: int, dtype: np.dtype[T]) -> npt.NDArray[T]:
    """Return an array of zeros. What is not written to takes no memory."""
    size = count * dtype.itemsize
    if size < MAPPED_BYTES:
        return np.zeros(count, dtype)
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE is not None:
        block.madvise(_HUGE)
    return np.frombuffer(block, dtype)


def grown(column: npt.NDArray[T], used: int, need: int) -> npt.NDArray[T]:
    """Return ``column``, or a copy of its first ``used`` elements, with room for ``need``.

    It is at least half as large again each time, and has zeros behind them.
    """
    if need <= len(column):
        return column
    larger = zeros(max(need, len(column) * 3 // 2, 1024), column.dtype)
    larger[:used] = column[:used]
    return larger


def window(columns: Sequence[npt.NDArray[T]]) -> tuple[npt.NDArray[T], npt.NDArray[np.int64]]:
    """Return one array over all columns, and where each begins in it.

    The caller keeps the columns, makes another window when one moves, and touches nothing between them.
    """
    if len(columns) == 1:
        return columns[0], np.zeros(1, np.int64)
    dtype = columns[0].dtype
    begins = [column.ctypes.data for column in columns]
    stop = max([begin + column.nbytes for begin, column in zip(begins, columns, strict=True)])
    lowest = min(begins)
    octets = at_address(lowest, stop - lowest, torch.uint8).numpy()
    return octets.view(dtype), (np.array(begins) - lowest) // dtype.itemsize


def spread(each: npt.NDArray[T], sizes: Sequence[int]) -> T | npt.NDArray[T]:
    """Return the element of its table for each of so many ids of each table; a scalar for one table."""
    first: T = each[0]
    return first if len(each) == 1 else each.repeat(sizes)
