"""Norms of a whole tensor whose pieces lie in several chunks or on several servers.

One update of one tensor is named by (store, key, rank, number): by the round, or where each push
is applied by itself, by the push. Every server measures its pieces and tells the sums to the other
holders; who has all of them updates its pieces. In a round every server measures against the
weights that the round before left, so all reach the same numbers. Where pushes are applied one by
one they are measured as they arrive, so that two servers that see two pushes in different order
never wait for each other.

What is measured depends on the store. Sums of squares are for rules that need norms of whole
tensors. Where updates that are not finite are dropped, the first sum *counts* the values that are
not: every server adds up the same counts, so all drop the update or none does. An optimizer may be
set in between, and other sums be told by one server than by another; the counts they have in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import torch

from kvps.errors import Mismatch

NormId = tuple[str, str, int | None, int]
"""(store, key, rank or None, number)."""
NO_NUMBER = -1.0
"""How a sum of squares travels that is NaN or infinity; no sum of squares is negative."""


class PartialSums(NamedTuple):
    """What one server tells of its part of a tensor."""

    sums: tuple[float, ...]
    """Empty while they are unknown."""
    culprits: tuple[int, ...] = ()
    """The ranks among whose pushes the values are that are not finite."""


class PartialNorms:
    """What is known of one tensor's sums for one update.

    Args:
        number: which update.
        counts: the first of the sums counts what is not finite.
    """

    def __init__(self, number: NormId, counts: bool = False) -> None:
        self.id = number
        self.counts = counts
        self.holders: frozenset[int] = frozenset()
        """The other servers that hold pieces; known when a piece here was measured."""
        self._pieces_left: int | None = None
        self._local: torch.Tensor | None = None
        self._remote: dict[int, torch.Tensor] = {}
        self._culprits: set[int] = set()

    def measure(
        self,
        sums: torch.Tensor,
        pieces: int,
        holders: frozenset[int],
        culprits: Iterable[int] = (),
    ) -> None:
        """Add the sums of one of the ``pieces`` of this server; ``holders`` have the others.

        ``culprits`` are the ranks among whose pushes the values are that are not finite.
        """
        if self._pieces_left is None:
            self._pieces_left, self.holders = pieces, holders
        assert self._pieces_left, "more pieces measured than there are"
        self._pieces_left -= 1
        sums = torch.where(sums.isfinite(), sums, math.nan)  # as the others will read it
        self._local = sums if self._local is None else _plus(self._local, sums)
        self._culprits.update(culprits)
        for server, heard in list(self._remote.items()):
            if not self.counts and len(heard) != len(sums):
                del self._remote[server]

    def hear(self, server: int, sums: tuple[float, ...], culprits: Iterable[int] = ()) -> None:
        """Take in another server's sums; again and again is fine.

        Raises:
            Mismatch: if they are not as many as this server's.
        """
        if not self.counts and self._local is not None and len(sums) != len(self._local):
            raise Mismatch(
                f"key {self.id[1]!r}: server {server} told {len(sums)} sums of squares, expected "
                f"{len(self._local)}; do both have the same optimizer?"
            )
        heard = torch.tensor(sums, dtype=torch.float64)
        self._remote[server] = torch.where(heard < 0, math.nan, heard)
        self._culprits.update(culprits)

    @property
    def mine(self) -> tuple[float, ...]:
        """This server's sums, as they are told; empty while a piece is missing."""
        if self._pieces_left != 0 or self._local is None:
            return ()
        return tuple(self._local.nan_to_num(NO_NUMBER).tolist())

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks among whose pushes the values are that are not finite, as far as is known."""
        return tuple(sorted(self._culprits))

    @property
    def told(self) -> PartialSums:
        """What this server tells."""
        return PartialSums(self.mine, self.culprits)

    @property
    def unheard(self) -> frozenset[int]:
        """The servers whose sums are missing."""
        return self.holders - self._remote.keys()

    @property
    def complete(self) -> bool:
        """Whether the whole tensor is measured."""
        return self._pieces_left == 0 and not self.unheard

    def total(self, me: int) -> torch.Tensor:
        """The sums over the whole tensor, added in the order of the servers' ranks.

        Every server adds the same numbers in the same order, so all get the same bits.
        """
        assert self._local is not None
        known = {me: self._local, **self._remote}
        return reduce(_plus, [known[server] for server in sorted({me, *self.holders})])


def _plus(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Add sums; of those that were measured under two rules, what they have in common."""
    width = min(len(one), len(other))
    return one[:width] + other[:width]
