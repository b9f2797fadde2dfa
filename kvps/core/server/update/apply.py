"""Application of a round, or of one push, to the values of a span.

Without an optimizer its sum becomes the values. With one, sums are taken block by block, each of which stays in
a core's cache while the rule is applied to it. Where what comes of it is to be written by a codec for those who
pull (:mod:`kvps.core.server.chunks.delta_log`), values move by what can be written, and the rest is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from kvps.core.gradients import DenseGradient, GradientSum
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.optim.sparse_update import may_be_lazy
from kvps.core.optim.torch_rules import Updater
from kvps.core.server.chunks.delta_log import CompressedHistory, code_of
from kvps.core.server.chunks.rounds import PendingUpdate, Span
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.store import ServerStore
from kvps.core.server.update import embedding_rows, key_rows
from kvps.dtypes import BY_NAME


class Updates:
    """Moves values, so many elements at once."""

    def __init__(self, block_count: int) -> None:
        self._block_count = block_count
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        """Memory for one block of sums."""

    def make(
        self,
        space: ServerStore,
        chunk: Chunk,
        span: Span,
        due: PendingUpdate,
        norms: torch.Tensor | None = None,
    ) -> None:
        """Move the values of ``span``; ``norms`` are those of its tensor, for a rule that needs them."""
        if chunk.embedding is not None:
            space.grow(embedding_rows.update(chunk, span, due) * chunk.embedding.row_bytes)
        elif space.updater is None:
            self._assign(chunk, span, due)
        else:
            span.step += 1
            self._apply(space, space.updater, chunk, span, due, norms)

    def _assign(self, chunk: Chunk, span: Span, due: PendingUpdate) -> None:
        total = due.sum
        back = chunk.back_of(span, is_wanted=due.back is not None)
        if back is not None:
            rest = back.own_rest()[span.start : span.stop]
            block = self._scratch_for(torch.float32)
            for begin in range(0, len(rest), len(block)):
                part = block[: min(len(block), len(rest) - begin)]
                total.into(part, begin, begin + len(part))
                rest[begin : begin + len(part)].add_(part)
            self._publish(chunk, back, span, due, None)
            return
        if total.is_sparse:
            key_rows.assign(chunk, span, total.gathered())
            return
        target = chunk.overwritable(span.start, span.stop)[span.start : span.stop]
        for begin in range(0, len(target), self._block_count):
            block = target[begin : begin + self._block_count]
            if BY_NAME[chunk.dtype].kind == "half":
                wide = self._scratch_for(torch.float32)[: len(block)]
                total.into(wide, begin, begin + len(block))
                block.copy_(wide)
            else:
                total.into(block, begin, begin + len(block))

    def _scratch_for(self, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for one block of sums."""
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(self._block_count, dtype=dtype)
        return self._scratch[dtype]

    def _apply(
        self,
        space: ServerStore,
        updater: Updater,
        chunk: Chunk,
        span: Span,
        due: PendingUpdate,
        norms: torch.Tensor | None,
    ) -> None:
        back = chunk.back_of(span, is_wanted=due.back is not None)
        if due.sum.is_sparse and may_be_lazy(updater):
            if back is not None:  # a step is of all of a piece
                back.settle(chunk.writable(), span.start, span.stop)
            key_rows.update(space, chunk, span, due.sum.gathered(), due.rank)
            if back is not None:
                chunk.forget_changes(span.start)
            return
        _spread(due)
        weight, state = chunk.writable(), space.state_of(chunk)
        scratch = self._scratch_for(chunk.summed_in)
        rest = None if back is None else back.own_rest()
        for first, last, lr, weight_decay in self.segments(space, chunk, span):
            for start in range(first, last, self._block_count):
                stop = min(start + self._block_count, last)
                if due.is_own:
                    whole = due.sum.parts[0].joined()
                    gradient = whole[start - span.start : stop - span.start]
                else:
                    gradient = scratch[: stop - start]
                    due.sum.into(gradient, start - span.start, stop - span.start)
                target = weight[start:stop]
                if rest is not None:
                    target = target + rest[start:stop]
                updater.apply(
                    target,
                    gradient,
                    {name: tensor[start:stop] for name, tensor in state.items()},
                    step=span.step,
                    lr=lr,
                    weight_decay=weight_decay,
                    norms=norms,
                    rank=due.rank,
                )
                if rest is not None:
                    torch.sub(target, weight[start:stop], out=rest[start:stop])
        if back is not None:
            self._publish(chunk, back, span, due, space.hyper)

    def _publish(
        self,
        chunk: Chunk,
        back: CompressedHistory,
        span: Span,
        due: PendingUpdate,
        hyper: HyperParams | None,
    ) -> None:
        """Move the values of ``span`` by what can be written of their rests."""
        values, version = chunk.writable(), span.version + 1
        for key, start, stop in chunk.pieces(span.start, span.stop):
            lr = None if hyper is None else hyper.for_key(key)[0]
            code = code_of(due.back, version, lr)
            back.publish(values, start, stop, version, code, adds=hyper is not None)

    def segments(
        self, space: ServerStore, chunk: Chunk, span: Span
    ) -> Iterator[tuple[int, int, float, float]]:
        """Yield (start, stop, lr, weight decay) of the parts of ``span`` that have them equal."""
        hyper = space.hyper
        assert hyper is not None
        if not hyper.lr_mult and not hyper.wd_mult:
            yield span.start, span.stop, *hyper.for_key("")
            return
        pieces = chunk.pieces(span.start, span.stop)
        for (lr, weight_decay), group in groupby(pieces, lambda one: hyper.for_key(one[0])):
            alike = list(group)
            yield alike[0][1], alike[-1][2], lr, weight_decay

    def squares(
        self, space: ServerStore, updater: Updater, chunk: Chunk, span: Span, due: PendingUpdate
    ) -> torch.Tensor:
        """Return the sums of squares of a piece that the store's rule needs."""
        _spread(due)
        ((_, _, lr, weight_decay),) = self.segments(space, chunk, span)
        state = space.state_of(chunk)
        weight = chunk.buffer.tensor[span.start : span.stop]
        if chunk.back is not None and chunk.back.owes(span.start, span.stop):
            weight = weight + chunk.back.rest[span.start : span.stop]
        return updater.partial_norms(
            weight,
            due.sum.parts[0].joined(),
            {name: tensor[span.start : span.stop] for name, tensor in state.items()},
            step=span.step + 1,
            lr=lr,
            weight_decay=weight_decay,
        )


def _spread(due: PendingUpdate) -> None:
    """Make of a sum that is all rows one of all elements, for a rule that wants these."""
    if due.sum.is_sparse:
        due.sum, due.is_own = GradientSum((DenseGradient([due.sum.whole()]),)), True
