"""The rules that move values: without an optimizer the sum of a round becomes the values; an optimizer moves
them by it. Sums are taken block by block, each of which stays in a core's cache while the optimizer's rule is
applied to it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import torch
from torch import Tensor

from kvps.core.optim.base import State, Terms, Updater
from kvps.core.row_gradients import RowGradient
from kvps.core.server.chunks.rounds import PendingUpdate, Span
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.rules import rows
from kvps.core.server.rules.rule import JudgedPush, Rule, Workshop
from kvps.core.server.store import ServerStore
from kvps.dtypes import BY_NAME
from kvps.protocol.values import StepPart
from kvps.tensors import TORCH


class Assign(Rule):
    """The sum becomes the values; of a sum of rows, all other rows become 0."""

    def write(self, span: Span, due: PendingUpdate, norms: Tensor | None) -> None:
        """Write the sum, block by block."""
        total, first, last = due.sum, span.start, span.stop
        if isinstance(total.parts[0], RowGradient):
            rows.assign(self.chunk, span, total.gathered())
            return
        target = self.chunk.overwritable(first, last)
        is_half = BY_NAME[self.chunk.dtype].kind == "half"
        for start in range(first, last, self.shop.block_count):
            stop = min(start + self.shop.block_count, last)
            block = target[start:stop]
            if is_half:
                block.copy_(total.block(self.shop.block(torch.float32), start - first, stop - first))
            else:
                total.into(block, start - first, stop - first)


class Optimize(Rule):
    """The sum is passed to the optimizer, which moves the values."""

    def __init__(self, store: ServerStore, chunk: Chunk, shop: Workshop, updater: Updater) -> None:
        super().__init__(store, chunk, shop)
        self.updater = updater

    def check_counted(self, judged: JudgedPush, step: StepPart | None) -> None:
        """Check that the optimizer can update values of this type."""
        if self.chunk.state is None:
            self.updater.demand(TORCH[self.chunk.dtype])

    def prepare(self) -> None:
        """Make the optimizer's state."""
        self.store.state_of(self.chunk)
        super().prepare()

    def write(self, span: Span, due: PendingUpdate, norms: Tensor | None) -> None:
        """Update by blocks, or the rows that the sum has alone."""
        span.step += 1
        if isinstance(due.sum.parts[0], RowGradient):
            rows.update(self.store, self.chunk, span, due.sum.gathered(), due)
            return
        chunk, count, lap = self.chunk, self.shop.block_count, self.shop.meter.lap
        weight, state = chunk.writable(), chunk.own_state()
        if state is None:
            state = self.store.state_of(chunk)
        scratch = self.shop.block(chunk.summed_in)
        for first, last, rates in segments(self.updater, chunk, span):
            terms = Terms(span.step, *rates, norms, due.ranks[0] if due.ranks else None, due.age)
            for start in range(first, last, count):
                stop = min(start + count, last)
                gradient = due.sum.block(scratch, start - span.start, stop - span.start)
                if lap is not None:
                    lap()
                self.step(weight, slice(start, stop), gradient, state, terms)
                if lap is not None:
                    lap()

    def step(self, weight: Tensor, at: slice, gradient: Tensor, state: State, terms: Terms) -> None:
        """Update one block of the chunk's values, ``weight``."""
        ours = state and {name: tensor[at] for name, tensor in state.items()}
        self.updater.apply(weight[at], gradient, ours, terms)


def segments(updater: Updater, chunk: Chunk, span: Span) -> Iterable[tuple[int, int, tuple[float, float]]]:
    """Return (start, stop, (lr, weight decay)) of the parts of ``span`` that have them equal."""
    hyper = updater.hyper
    if not hyper.lr_mult and not hyper.wd_mult:
        return [(span.start, span.stop, updater.rates)]
    found = []
    pieces = chunk.pieces(span.start, span.stop)
    for rates, group in groupby(pieces, lambda piece: hyper.for_key(piece[0])):
        alike = list(group)
        found.append((alike[0][1], alike[-1][2], rates))
    return found
