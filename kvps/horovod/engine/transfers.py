"""Transfers: the pushes and pulls of an operation that the ranks have agreed on.

A sum over all ranks of the job is one round of a synchronous key. Everything else is a swap of posts between the
ranks that take part, or a letter of one rank to the others (:mod:`kvps.torch.distributed.mailbox`).

Every method returns the track of the operation and its steps, and makes its choices from the decisions alone, which
are the same on every rank.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch

from kvps.dtypes import Spec
from kvps.tensors import NAMES
from kvps.torch.distributed import mailbox
from kvps.torch.distributed.board import Board
from kvps.torch.distributed.host_tensor import Staged, padded
from kvps.torch.distributed.ordered_executor import Steps
from kvps.torch.distributed.size_classes import Sizes, class_of

LANES = 4
"""The keys for sums of one size: as many may be under way at once."""

Plan = tuple[str, Steps]
"""A track, and the steps to be made there."""


class Transfers:
    """The transfers of this process.

    Args:
        board: of this process.
        name: begins the names of all keys.
        timeout_s: how long each step may take.
    """

    def __init__(self, board: Board, name: str, timeout_s: float) -> None:
        self._board, self._name, self._timeout_s = board, name, timeout_s
        self._sizes = Sizes()
        self._sums: Counter[tuple[str, int]] = Counter()

    def is_summable(self, dtype: torch.dtype) -> bool:
        """Whether the servers can add up elements of this type."""
        return dtype in NAMES

    def total(self, row: torch.Tensor) -> Plan:
        """Replace ``row`` by its sum over all ranks of the job."""
        kind = NAMES[row.dtype]
        size = self._sizes.of(kind, len(row))
        lane = self._sums[kind, size] % LANES
        self._sums[kind, size] += 1
        key = f"{self._name}/sum/{kind}/{size}/{lane}"

        def steps() -> Steps:
            yield self._board.make_sums([(key, Spec(kind, (size,)))], self._timeout_s)
            filled = padded(row, size)
            yield [self._board.add([key], [filled], [filled], self._timeout_s)]
            if filled is not row:
                row.copy_(filled[: len(row)])

        return key, steps()

    def gather(self, ranks: Sequence[int], row: torch.Tensor, rows: Sequence[torch.Tensor]) -> Plan:
        """Fill ``rows`` with the rows of the ranks; ``row`` is this rank's. Their lengths may differ."""
        track = f"{self._name}/all/{_tag(ranks)}"
        mine, theirs = [], []
        for rank, room in zip(ranks, rows, strict=True):
            name = f"{track}/{class_of(room.nbytes)}/{rank}"
            if rank == self._board.rank:
                room.copy_(row)
                mine.append((name, row))
            else:
                theirs.append((name, rank, room))
        return track, mailbox.swap(self._board, self._timeout_s, mine, theirs)

    def swap(
        self, ranks: Sequence[int], given: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]
    ) -> Plan:
        """Give the rank at place p ``given[p]``, and take ``rows[p]`` from it."""
        track, me = f"{self._name}/pair/{_tag(ranks)}", self._board.rank
        mine, theirs = [], []
        for rank, one, row in zip(ranks, given, rows, strict=True):
            if rank == me:
                row.copy_(one)
                continue
            mine.append((f"{track}/{me}>{rank}/{class_of(one.nbytes)}", one))
            theirs.append((f"{track}/{rank}>{me}/{class_of(row.nbytes)}", rank, row))
        return track, mailbox.swap(self._board, self._timeout_s, mine, theirs)

    def spread(self, ranks: Sequence[int], row: torch.Tensor, root: int) -> Plan:
        """Replace ``row`` by the row of rank ``root``."""
        track = f"{self._name}/from/{_tag(ranks)}/{root}"
        name = f"{track}/{class_of(row.nbytes)}"
        if root == self._board.rank:
            readers = len(ranks) - 1
            return track, mailbox.tell(self._board, self._timeout_s, [(name, row)], readers)
        heard = [(name, root, Staged(row))]
        return track, mailbox.hear(self._board, self._timeout_s, heard)


def _tag(ranks: Sequence[int]) -> str:
    """Return a short name of these ranks."""
    text = ",".join(map(str, ranks))
    return text if len(text) <= 32 else hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
