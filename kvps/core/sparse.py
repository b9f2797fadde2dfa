"""Gradients of which only some rows are there: how they are put in order, cut, and added up.

A sparse gradient of a table [n, width] is the sorted numbers of the rows that it has, each once, and
these rows. All other rows are 0. It can stand wherever a :class:`~kvps.core.strip.Strip` can: it
has as many elements as its piece of the table, and adds itself to them where a dense sum is needed.
Sparse gradients alone add up to a sparse one, at the cost of the rows that they name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvps.tensors import accumulator


class Sparse:
    """Some rows of ``count`` rows of ``width`` elements; the others are 0. They are only read."""

    __slots__ = ("_count", "ids", "rows")

    def __init__(self, ids: Tensor, rows: Tensor, count: int) -> None:
        self.ids = ids
        """Which rows, int64 [k], ascending, each in [0, count)."""
        self.rows = rows
        """Their elements, [k, width]."""
        self._count = count

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.rows.dtype

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.rows.shape[1]

    def __len__(self) -> int:
        return self._count * self.width

    def joined(self) -> Tensor:
        """Return all elements that are there, in one piece."""
        return self.rows.reshape(-1)

    def part(self, start: int, stop: int) -> Sparse:
        """Return the elements from ``start`` to ``stop``: whole rows, numbered from ``start``'s."""
        width = self.width
        assert start % width == stop % width == 0, (start, stop, width)
        first, last = start // width, stop // width
        low, high = self._between(first, last)
        return Sparse(self.ids[low:high] - first, self.rows[low:high], last - first)

    def add_to(self, out: Tensor, start: int, stop: int) -> None:
        """Add the elements from ``start`` to ``stop``, anywhere within rows, to ``out``."""
        width = self.width
        first, last = -(-start // width), stop // width
        if first > last:  # within one row
            self._add_within(out, last, start - last * width, stop - last * width)
            return
        self._add_within(out, first - 1, width - (first * width - start), width)
        low, high = self._between(first, last)
        if low < high:
            inner = out[first * width - start : last * width - start].view(-1, width)
            add_rows(inner, self.ids[low:high] - first, self.rows[low:high])
        rest = stop - last * width
        self._add_within(out[len(out) - rest :], last, 0, rest)

    def _add_within(self, out: Tensor, row: int, start: int, stop: int) -> None:
        """Add the elements ``start`` to ``stop`` of one row, if it is there, to the first of ``out``."""
        low, high = self._between(row, row + 1) if start < stop else (0, 0)
        if low < high:
            out[: stop - start].add_(self.rows[low, start:stop])

    def _between(self, first: int, last: int) -> tuple[int, int]:
        """Return where the rows from ``first`` to ``last`` are."""
        if first <= 0 and last >= self._count:
            return 0, len(self.ids)
        low, high = torch.searchsorted(self.ids, torch.tensor([first, last])).tolist()
        return low, high


def added(parts: Sequence[Sparse], divisor: int = 1) -> Sparse:
    """Return the sum of ``parts``, in this order, divided by ``divisor``; in memory of its own.

    Half types are summed in float32.
    """
    first = parts[0]
    if len(parts) == 1:
        ids, rows = first.ids, accumulator(first.rows)
        if rows is first.rows:
            rows = rows.clone()
    else:
        ids, places = torch.unique(torch.cat([one.ids for one in parts]), return_inverse=True)
        rows = accumulator(first.rows[:0]).new_zeros(len(ids), first.width)
        for one, at in zip(parts, places.split([len(one.ids) for one in parts]), strict=True):
            add_rows(rows, at, one.rows)
    if divisor != 1:
        rows.div_(divisor)
    return Sparse(ids, rows, len(first) // first.width)


def add_rows(out: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Add ``rows`` to the rows ``ids`` of ``out``, which is of the type that sums are taken in."""
    out.index_add_(0, ids, rows.to(out.dtype))


def coalesce(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows sorted by their number, those of one number summed; in memory of its own.

    Args:
        ids: int64 [k], in any order, repeats allowed.
        rows: [k, width]. Half types are summed in float32, and rounded once.

    Example:
        >>> import torch
        >>> coalesce(torch.tensor([2, 0, 2]), torch.tensor([[1.0], [2.0], [3.0]]))
        (tensor([0, 2]), tensor([[2.],
                [4.]]))
    """
    unique, places = torch.unique(ids, return_inverse=True)
    if len(unique) == len(ids):
        ids, order = torch.sort(ids)
        return ids, rows.index_select(0, order)
    summed = accumulator(rows[:0]).new_zeros(len(unique), rows.shape[1])
    summed.index_add_(0, places, accumulator(rows))
    return unique, summed.to(rows.dtype)
