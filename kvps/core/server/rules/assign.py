"""The rule without an optimizer: the sum of a round becomes the values."""

from __future__ import annotations

import torch

from kvps.core.server.chunks.rounds import PendingUpdate, Span
from kvps.core.server.rules import rows
from kvps.core.server.rules.rule import Rule
from kvps.dtypes import BY_NAME


class Assign(Rule):
    """The sum becomes the values; of a sum of rows, all other rows become 0."""

    def write(self, span: Span, due: PendingUpdate, norms: torch.Tensor | None) -> None:
        """Write the sum, block by block."""
        if due.sum.is_sparse:
            rows.assign(self.chunk, span, due.sum.gathered())
            return
        count, total = self.shop.block_count, due.sum
        target = self.chunk.overwritable(span.start, span.stop)[span.start : span.stop]
        is_half = BY_NAME[self.chunk.dtype].kind == "half"
        for begin in range(0, len(target), count):
            block = target[begin : begin + count]
            if is_half:
                block.copy_(total.block(self.shop.block(torch.float32), begin, begin + len(block)))
            else:
                total.into(block, begin, begin + len(block))
