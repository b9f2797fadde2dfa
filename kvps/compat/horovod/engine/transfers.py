"""Transfers: the pushes and pulls of an operation that the ranks have agreed on.

A sum over all ranks of the job is one round of synchronous keys. Everything else is a swap of
posts between the ranks that take part, or letters of one rank to the others
(:mod:`kvps.torch.distributed.mailbox`).

Operations that travel together are never the same for long, and keys are kept by the servers. So
sums and broadcasts are cut into pieces of one size, and only the rest of a row has a key of
its class: the servers need no more memory than for the largest row, and some MiB for the classes.

Every method returns the track of the operation and its steps, and makes its choices from the
decisions alone, which are the same on every rank.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch

from kvps.dtypes import Spec
from kvps.tensors import NAMES
from kvps.torch.distributed import mailbox
from kvps.torch.distributed.host_tensor import Staged, padded
from kvps.torch.distributed.mailbox import Board, class_of
from kvps.torch.distributed.ordered_executor import Steps

LANES = 4
"""The sums of one element type that may be under way at once, each with keys of its own."""
SUM_PIECE = 512 << 10
"""Elements of a piece of a sum."""
BROADCAST_PIECE = 4 << 20
"""Bytes of a piece of a broadcast."""

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
        self._sums: Counter[str] = Counter()

    def is_summable(self, dtype: torch.dtype) -> bool:
        """Whether the servers can add up elements of this type."""
        return dtype in NAMES

    def total(self, row: torch.Tensor) -> Plan:
        """Replace ``row`` by its sum over all ranks of the job."""
        kind = NAMES[row.dtype]
        lane = self._sums[kind] % LANES
        self._sums[kind] += 1
        track = f"{self._name}/sum/{kind}/{lane}"
        whole, rest = divmod(len(row), SUM_PIECE)
        keys = [(f"{track}/piece/{index}", Spec(kind, (SUM_PIECE,))) for index in range(whole)]
        if rest:
            size = class_of(rest)
            keys.append((f"{track}/{size}", Spec(kind, (size,))))

        def steps() -> Steps:
            yield self._board.make_sums(keys, self._timeout_s)
            pieces = torch.split(row, SUM_PIECE)
            filled = [
                padded(padded_piece, spec.count) for padded_piece, (_, spec) in zip(pieces, keys, strict=True)
            ]
            yield [self._board.add([key for key, _ in keys], filled, filled, self._timeout_s)]
            if filled[-1] is not pieces[-1]:
                pieces[-1].copy_(filled[-1][: len(pieces[-1])])

        return track, steps()

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

    def swap(self, ranks: Sequence[int], given: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> Plan:
        """Give the rank at place p ``given[p]``, and take ``rows[p]`` from it."""
        track, me = f"{self._name}/pair/{_tag(ranks)}", self._board.rank
        mine, theirs = [], []
        for rank, sent, row in zip(ranks, given, rows, strict=True):
            if rank == me:
                row.copy_(sent)
                continue
            mine.append((f"{track}/{me}>{rank}/{class_of(sent.nbytes)}", sent))
            theirs.append((f"{track}/{rank}>{me}/{class_of(row.nbytes)}", rank, row))
        return track, mailbox.swap(self._board, self._timeout_s, mine, theirs)

    def spread(self, ranks: Sequence[int], row: torch.Tensor, root: int) -> Plan:
        """Replace ``row``, of bytes, by the row of rank ``root``."""
        track = f"{self._name}/from/{_tag(ranks)}/{root}"
        is_root = root == self._board.rank

        def steps() -> Steps:
            for piece in torch.split(row, BROADCAST_PIECE):
                name = f"{track}/{class_of(piece.nbytes)}"
                if is_root:
                    told, readers = [(name, piece)], len(ranks) - 1
                    yield from mailbox.tell(self._board, self._timeout_s, told, readers)
                else:
                    heard = [(name, root, Staged(piece))]
                    yield from mailbox.hear(self._board, self._timeout_s, heard)

        return track, steps()


def _tag(ranks: Sequence[int]) -> str:
    """Return a short name of these ranks."""
    text = ",".join(map(str, ranks))
    return text if len(text) <= 32 else hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
