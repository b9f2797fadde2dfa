"""The ids whose rows were evicted lately, so that a copy of a table can shrink, too.

They are known from the first update on that this process has made: a server that was restored, or took the
place of another, does not know what went before.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvps.core.embedding.id_hash import Ids

LEAST = 1 << 16
"""Ids that are kept at least; of a larger table as many as it has rows."""


class Evicted:
    """Evicted ids by version, oldest first."""

    def __init__(self) -> None:
        self._known_from: int | None = None
        self._entries: deque[tuple[int, Ids]] = deque()
        self._count = 0

    def begin(self, version: int) -> None:
        """Note that an update makes ``version``, before rows are evicted by it."""
        if self._known_from is None:
            self._known_from = version - 1

    def known_from(self, version: int) -> int:
        """Return the version after which all ids are known, at ``version``."""
        return version if self._known_from is None else self._known_from

    def add(self, ids: Ids, version: int, most: int) -> None:
        """Note what an update to ``version`` has evicted; keep some ``most`` ids."""
        self._entries.append((version, ids))
        self._count += len(ids)
        while self._count > max(LEAST, most):
            self._known_from, gone = self._entries.popleft()
            self._count -= len(gone)

    def after(self, version: int) -> Ids:
        """Return the ids that were evicted after ``version``, perhaps repeated."""
        return np.concatenate([np.empty(0, np.int64), *[ids for at, ids in self._entries if at > version]])
