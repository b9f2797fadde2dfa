"""The change log: the rows of a piece that its last versions changed.

Versions come one by one. One that changed more than some rows, by a dense gradient say, is not added, and
what came before it is of no use any more: from there on nothing is known, and a reader takes all. So nothing
has to be told here but what *was* by rows, and values that are set without a version (:meth:`Chunk.forget_changes
<kvps.core.server.chunks.slab.Chunk.forget_changes>`).
"""

from __future__ import annotations

from collections import deque

import torch

from kvps.core.row_gradients import numbered

VERSION_COUNT = 64
"""Overhead of remembering one version, in rows."""
LEAST_COUNT = 64 * VERSION_COUNT
"""Minimum size of a log, in rows, however small the piece."""


NONE = torch.empty(0, dtype=torch.int64)


class ChangeLog:
    """The rows in which each of the last versions of one piece differs from the one before.

    Example:
        >>> import torch
        >>> changes = ChangeLog(rows=8)
        >>> for version, row in ((4, 2), (5, 1), (6, 2)):
        ...     changes.add(version, torch.tensor([row]))
        >>> changes.since(4, now=6).tolist(), changes.since(2, now=6)
        ([1, 2], None)
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._newest = 0
        self._known: deque[torch.Tensor] = deque()
        self._count = 0

    def add(self, version: int, ids: torch.Tensor) -> None:
        """Remember that ``version`` differs from the one before in the rows ``ids``, and in no others."""
        if version != self._newest + 1:
            self._known.clear()
            self._count = 0
        self._newest = version
        self._known.append(ids if len(ids) else NONE)
        self._count += len(ids)
        most = max(self._rows // 2, LEAST_COUNT)
        while self._count + VERSION_COUNT * len(self._known) > most:
            self._count -= len(self._known.popleft())

    def since(self, version: int, now: int) -> torch.Tensor | None:
        """Return the rows that differ between two versions, ascending.

        None if that is not known, or they are more than half: then all may as well be read.
        """
        if version == now:
            return NONE
        if now != self._newest or not 0 < now - version <= len(self._known):
            return None
        newest = list(self._known)[version - now :]
        ids = newest[0] if len(newest) == 1 else numbered(torch.cat(newest), are_runs=True)[0]
        return ids if len(ids) <= self._rows // 2 else None

    def check(self) -> None:
        """Assert the invariants."""
        assert self._count == sum(map(len, self._known))
        assert self._count + VERSION_COUNT * len(self._known) <= max(self._rows // 2, LEAST_COUNT)
        assert len(self._known) <= self._newest
