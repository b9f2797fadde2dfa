"""The norms of a whole tensor whose pieces lie in several chunks and on several servers.

One update of one tensor is named by (store, key, rank, number): by the round, or where each push
is applied by itself, by the push. Every server measures its pieces and tells the sums of squares
to the other holders; who has all of them updates its pieces. In a round every server measures
against the weights that the round before left, so all reach the same numbers. Where pushes are
applied one by one they are measured as they arrive, so that two servers that see two pushes in
different order never wait for each other.
"""

from __future__ import annotations

import torch

from kvps.errors import Mismatch

NormId = tuple[str, str, int | None, int]
"""(store, key, rank or None, number)."""


class Norm:
    """What is known of one tensor's sums of squares for one update."""

    def __init__(self, number: NormId) -> None:
        self.id = number
        self.holders: frozenset[int] = frozenset()
        """The other servers that hold pieces; known when a piece here was measured."""
        self._pieces_left: int | None = None
        self._local: torch.Tensor | None = None
        self._remote: dict[int, torch.Tensor] = {}

    def measure(self, sums: torch.Tensor, pieces: int, holders: frozenset[int]) -> None:
        """Add the sums of one of the ``pieces`` of this server; ``holders`` have the others."""
        if self._pieces_left is None:
            self._pieces_left, self.holders = pieces, holders
        assert self._pieces_left, "more pieces measured than there are"
        self._pieces_left -= 1
        self._local = sums if self._local is None else self._local + sums
        for server, heard in list(self._remote.items()):
            if len(heard) != len(sums):
                del self._remote[server]

    def hear(self, server: int, sums: tuple[float, ...]) -> None:
        """Take in another server's sums; again and again is fine.

        Raises:
            Mismatch: if they are not as many as this server's.
        """
        if self._local is not None and len(sums) != len(self._local):
            raise Mismatch(
                f"key {self.id[1]!r}: server {server} told {len(sums)} sums of squares, expected "
                f"{len(self._local)}; do both have the same optimizer?"
            )
        self._remote[server] = torch.tensor(sums, dtype=torch.float64)

    @property
    def mine(self) -> tuple[float, ...]:
        """This server's sums, empty while a piece is missing."""
        if self._pieces_left != 0 or self._local is None:
            return ()
        return tuple(self._local.tolist())

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
        first, *rest = (known[server] for server in sorted({me, *self.holders}))
        return sum(rest, start=first)
