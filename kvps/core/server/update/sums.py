"""Gradients added up before they are applied, and whether their sums are finite.

Most sums are taken on the way into an update, block by block. Some are wanted before: those that are measured
as a whole tensor, and those of stores that drop what is not finite (:mod:`kvps.core.server.nonfinite_log`).
"""

from __future__ import annotations

import torch

from kvps.core.gradients import DenseGradient, GradientSum
from kvps.core.nonfinite import Flaw, count_nonfinite
from kvps.core.row_gradients import RowGradient
from kvps.core.server.chunks.rounds import PendingUpdate
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.store import ServerStore
from kvps.dtypes import BY_NAME
from kvps.tensors import TORCH


class Sums:
    """Adds gradients up, so many elements at once."""

    def __init__(self, block_count: int) -> None:
        self._block_count = block_count
        self._memory: dict[torch.dtype, torch.Tensor] = {}
        """For the sums of a span that is looked at before it is applied."""

    def sift(self, space: ServerStore, chunk: Chunk, due: PendingUpdate) -> Flaw | None:
        """Return what is not finite in a gradient. If all is, it is added up by that."""
        if due.sum.is_sparse:
            flaw, rows = self._gathered(space, chunk, due)
            if flaw is None:
                due.sum, due.is_own = GradientSum((rows,)), True
            return flaw
        dtype = chunk.summed_in
        parts = due.sum.parts
        if len(parts) == 1 and parts[0].dtype == dtype:
            return self._added(space, chunk, due, parts[0].joined(), is_sum=True)
        if dtype not in self._memory or len(self._memory[dtype]) < len(due.sum):
            self._memory[dtype] = _new(chunk, len(due.sum))
        whole = self._memory[dtype][: len(due.sum)]
        flaw = self._added(space, chunk, due, whole)
        if flaw is None:
            due.sum, due.is_own = GradientSum((DenseGradient([whole]),)), True
        return flaw

    def add_up(
        self, space: ServerStore, chunk: Chunk, due: PendingUpdate, *, by_rows: bool
    ) -> None:
        """Add a gradient up in memory of its own, and note what is not finite, if the store looks.

        One of which only rows are there stays so, if it may be applied ``by_rows``.
        """
        if due.sum.is_sparse and by_rows:
            due.flaw, rows = self._gathered(space, chunk, due)
            due.sum, due.is_own = GradientSum((rows,)), True
            return
        whole = _new(chunk, len(due.sum))  # it may be lent, and is used twice
        if may_drop(space, chunk.dtype):
            due.flaw = self._added(space, chunk, due, whole)
        else:
            due.sum.into(whole, 0, len(whole))
        due.sum, due.is_own = GradientSum((DenseGradient([whole]),)), True

    def _added(
        self,
        space: ServerStore,
        chunk: Chunk,
        due: PendingUpdate,
        whole: torch.Tensor,
        *,
        is_sum: bool = False,
    ) -> Flaw | None:
        """Add a gradient up in ``whole``, unless it is the sum; return what is not finite in it."""
        kept_as = _kept_as(space, chunk)
        count = 0
        for begin in range(0, len(whole), self._block_count):
            block = whole[begin : begin + self._block_count]
            if not is_sum:
                due.sum.into(block, begin, begin + len(block))
            count += count_nonfinite(block.to(kept_as))
        return _flaw(due, count)

    def _gathered(
        self, space: ServerStore, chunk: Chunk, due: PendingUpdate
    ) -> tuple[Flaw | None, RowGradient]:
        """Add a gradient up of which only rows are there; return what is not finite, and the sum."""
        rows = due.sum.gathered()
        return _flaw(due, count_nonfinite(rows.joined().to(_kept_as(space, chunk)))), rows


def may_drop(space: ServerStore, dtype: str) -> bool:
    """Whether updates of such elements are dropped that are not finite."""
    return space.drops is not None and BY_NAME[dtype].kind != "int"


def _kept_as(space: ServerStore, chunk: Chunk) -> torch.dtype:
    """Return the type in which a sum has to be finite."""
    # Without an optimizer the sum is what the key becomes, and there it may overflow.
    is_half = BY_NAME[chunk.dtype].kind == "half"
    return TORCH[chunk.dtype] if is_half and space.updater is None else chunk.summed_in


def _flaw(due: PendingUpdate, count: int) -> Flaw | None:
    """Return the flaw of a gradient of which so many values are not finite."""
    if not count:
        return None
    culprits: set[int] = set()
    for ranks, part in zip(due.whose, due.sum.parts, strict=True):
        if count_nonfinite(part.joined()):
            culprits.update(ranks)
    return Flaw(count, tuple(sorted(culprits)))


def _new(chunk: Chunk, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=chunk.summed_in)
