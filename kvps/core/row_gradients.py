"""Row gradients: sorted, coalesced, cut by server, and summed.

A sparse gradient of a table [n, width] is the sorted numbers of the rows that it has, each once, and
these rows. All other rows are 0. It can stand wherever a :class:`~kvps.core.gradients.DenseGradient` can: it
has as many elements as its piece of the table, and adds itself to them where a dense sum is needed.
Sparse gradients alone add up to a sparse one, at the cost of the rows that they name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from kvps.tensors import accumulator

Edges = tuple[int, ...]
"""Row numbers at which rows are cut, ascending."""


class RowGradient:
    """Some rows of ``count`` rows of ``width`` elements; the others are 0. They are only read."""

    __slots__ = ("_count", "_place", "_sums", "ids", "rows")
    kind = 1
    """Its place in a sum: behind dense gradients."""
    is_lent, may_be_sum = True, False
    """It takes little memory, and sums are written elsewhere."""

    def __init__(
        self, ids: Tensor, rows: Tensor, count: int, place: tuple[RowGradient, Edges, int] | None = None
    ) -> None:
        self.ids = ids
        """Row numbers, int64 [k], ascending, each in [0, count)."""
        self.rows = rows
        """Elements of these rows, [k, width]."""
        self._count = count
        self._place = place
        """(the gradient it was cut from, the edges, its index among the parts); None if it was not cut."""
        self._sums: dict[tuple[object, ...], tuple[list[RowGradient], list[RowGradient]]] = {}
        """Cached sums of this gradient with others: (divisor, edges, ids of the others) -> (parts,
        others)."""

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
        """Return the elements of its rows, flat."""
        return self.rows.reshape(-1)

    def part(self, start: int, stop: int) -> RowGradient:
        """Return the elements from ``start`` to ``stop``: whole rows, numbered from ``start``'s."""
        width = self.width
        assert start % width == stop % width == 0, (start, stop, width)
        first, last = start // width, stop // width
        low, high = self._between(first, last)
        return RowGradient(self.ids[low:high] - first, self.rows[low:high], last - first)

    def cut(self, edges: Edges) -> list[RowGradient]:
        """Return the rows between each two of ``edges``, the first of which is 0.

        Sums of such parts are taken of the whole, once, so that many parts cost little more than one.
        """
        if len(edges) == 2:
            return [self]
        cuts = torch.searchsorted(self.ids, torch.tensor(edges)).tolist()
        return [
            RowGradient(
                self.ids[cuts[at] : cuts[at + 1]] - edges[at],
                self.rows[cuts[at] : cuts[at + 1]],
                edges[at + 1] - edges[at],
                (self, edges, at),
            )
            for at in range(len(edges) - 1)
        ]

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
        tail = stop - last * width
        self._add_within(out[len(out) - tail :], last, 0, tail)

    def _add_within(self, out: Tensor, row: int, start: int, stop: int) -> None:
        """Add elements ``start`` to ``stop`` of one row, if there is such a row, to the beginning
        of ``out``."""
        low, high = self._between(row, row + 1) if start < stop else (0, 0)
        if low < high:
            out[: stop - start].add_(self.rows[low, start:stop])

    def _between(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of ``ids`` that are from ``first`` up to, not including, ``last``."""
        if first <= 0 and last >= self._count:
            return 0, len(self.ids)
        low, high = torch.searchsorted(self.ids, torch.tensor([first, last])).tolist()
        return low, high


def added(parts: Sequence[RowGradient], divisor: float = 1) -> RowGradient:
    """Return the sum of ``parts``, in this order, divided by ``divisor``; in memory of its own.

    Half types are summed in float32.
    """
    places = [part._place for part in parts if part._place is not None]
    if len(places) < len(parts) or len({place[1:] for place in places}) > 1:
        return _added(parts, divisor)
    (first, edges, at), *_ = places
    others = [whole for whole, _, _ in places[1:]]
    # The others live on beside the sum, so their ids are not used again.
    number = (divisor, edges, *map(id, others))
    if number not in first._sums:
        total = _added([first, *others], divisor)
        first._sums[number] = total.cut(edges), others
    return first._sums[number][0][at]


def _added(parts: Sequence[RowGradient], divisor: float) -> RowGradient:
    first = parts[0]
    if len(parts) == 1:
        ids, rows = first.ids, accumulator(first.rows)
        if rows is first.rows:
            rows = rows.clone()
    elif first.dtype.is_floating_point:
        given = torch.cat([part.ids for part in parts])
        order = _order(given, "stable")
        ids, counts = torch.unique_consecutive(given.index_select(0, order), return_counts=True)
        rows = accumulator(torch.cat([part.rows for part in parts]))
        if len(ids):  # to the bit what adding part by part to 0 gives, in a third of the time
            rows = embedding_bag(order, rows, counts.cumsum(0) - counts, mode="sum")
    else:
        ids, places = numbered(torch.cat([part.ids for part in parts]), are_runs=True)
        rows = first.rows.new_zeros(len(ids), first.width)
        for part, at in zip(parts, torch.split(places, [len(part.ids) for part in parts]), strict=True):
            add_rows(rows, at, part.rows)
    if divisor != 1:
        rows.div_(divisor)
    return RowGradient(ids, rows, first._count)


def numbered(ids: Tensor, *, are_runs: bool = False) -> tuple[Tensor, Tensor]:
    """Return the distinct ``ids``, ascending, and the index of each of ``ids`` among them.

    It is what torch.unique does, in a third of its time; with ``are_runs``, if they are a few sorted
    ones behind each other, in a sixth.
    """
    order = _order(ids, "stable" if are_runs else "quicksort")
    unique, places = torch.unique_consecutive(ids.index_select(0, order), return_inverse=True)
    return unique, torch.empty_like(order).index_copy_(0, order, places)


def _order(ids: Tensor, kind: Literal["stable", "quicksort"] = "quicksort") -> Tensor:
    """Return the permutation that sorts ``ids``; by numpy, which is four times as fast."""
    return torch.from_numpy(np.argsort(ids.numpy(), kind=kind))


def add_rows(out: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Add ``rows`` to the rows ``ids`` of ``out``, which is of the type that sums are taken in."""
    out.index_add_(0, ids, rows.to(out.dtype))


def coalesce(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (distinct ids in order, the index of each one's row, the rows).

    Rows of one number are summed, half types in float32, and rounded once. Where every number is there once,
    ``rows`` are returned as they are: the caller's copy puts them in order.

    Args:
        ids: int64 [k], on the CPU, in any order, repeats allowed.
        rows: [k, width], on any device.

    Example:
        >>> import torch
        >>> ids, places, rows = coalesce(torch.tensor([2, 0, 2]), torch.tensor([[1.0], [2.0], [3.0]]))
        >>> ids.tolist(), rows[places].tolist()
        ([0, 2], [[2.0], [4.0]])
    """
    order = _order(ids)
    inorder = ids.index_select(0, order)
    unique, places = torch.unique_consecutive(inorder, return_inverse=True)
    if len(unique) == len(ids):
        return inorder, order, rows
    summed = accumulator(rows[:0]).new_zeros(len(unique), rows.shape[1])
    at = torch.empty_like(order).index_copy_(0, order, places)
    summed.index_add_(0, at.to(rows.device), accumulator(rows))
    return unique, torch.arange(len(unique)), summed.to(rows.dtype)
