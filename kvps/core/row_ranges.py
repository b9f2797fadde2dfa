"""Row ranges: the rows of a key that one server holds, and their numbers there.

A server holds one run of neighbouring rows or a few (:mod:`kvps.core.placement`). In the key a row has a
number; on the server it is counted from the first row there. With one run the two differ by a constant.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor


class RowRanges:
    """Rows from ``first`` to before ``stop``, for one pair or several, ascending.

    Example:
        >>> import torch
        >>> rows = RowRanges([(2, 4), (4, 5), (8, 9)])
        >>> str(rows), rows.count, rows.local(torch.tensor([3, 8])).tolist()
        ('2 to 4 and 8 to 8', 4, [1, 3])
    """

    __slots__ = ("_begins", "_firsts", "_shifts", "_stops", "count", "runs")

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        runs: list[tuple[int, int]] = []
        for first, stop in ranges:
            if runs and runs[-1][1] == first:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((first, stop))
        self.runs = runs
        """(first, stop) of each run; none touches the next."""
        self.count = sum([stop - first for first, stop in runs])
        """The number of rows."""
        if len(runs) > 1:
            self._firsts = torch.tensor([first for first, _ in runs])
            self._stops = torch.tensor([stop for _, stop in runs])
            self._begins = torch.tensor([0, *accumulate([stop - first for first, stop in runs[:-1]])])
            self._shifts = self._firsts - self._begins

    def __str__(self) -> str:
        return " and ".join([f"{first} to {stop - 1}" for first, stop in self.runs])

    def has(self, ids: Tensor) -> bool:
        """Return whether the rows ``ids``, some numbers in ascending order, are all among these."""
        if len(self.runs) == 1:
            ((first, stop),) = self.runs
            return first <= int(ids[0]) <= int(ids[-1]) < stop
        at = torch.searchsorted(self._firsts, ids, right=True) - 1
        return bool((at >= 0).all()) and bool((ids < self._stops[at]).all())

    def local(self, ids: Tensor) -> Tensor:
        """Return ``ids``, which :meth:`has`, counted from the first row here. They may be overwritten."""
        if len(self.runs) == 1:
            return ids.sub_(self.runs[0][0])
        return ids.sub_(self._shifts[torch.searchsorted(self._firsts, ids, right=True) - 1])

    def numbers(self, ids: Tensor) -> Tensor:
        """Return the numbers in the key of ``ids``, which are counted from the first row here."""
        if len(self.runs) == 1:
            return ids + self.runs[0][0]
        return ids + self._shifts[torch.searchsorted(self._begins, ids, right=True) - 1]
