"""Application of a round, or of one push, to the values of a span.

Without an optimizer its sum becomes the values. With one, sums are taken block by block, each of which stays
in a core's cache while the rule is applied to it. If pulls are compressed
(:mod:`kvps.core.server.chunks.history`), values move by the decoded delta, and the residual is kept.

Some sums are computed first: those that are measured as a whole tensor, and those of stores that drop values
that are not finite (:mod:`kvps.core.server.figures.nonfinite_log`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import torch

from kvps.core.counts import Counts
from kvps.core.gradients import DenseGradient, GradientSum
from kvps.core.nonfinite import Flaw, count_nonfinite
from kvps.core.optim.base import Terms, Updater
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.optim.sparse_update import may_be_lazy
from kvps.core.row_gradients import RowGradient
from kvps.core.server.chunks.history import CompressedHistory, code_of
from kvps.core.server.chunks.rounds import PendingUpdate, Span
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.rules import rows as key_rows
from kvps.core.server.rules import table as embedding_rows
from kvps.core.server.sessions import PendingRead
from kvps.core.server.store import ServerStore
from kvps.dtypes import BY_NAME
from kvps.tensors import TORCH

Wake = Callable[[list[PendingRead]], None]
"""Called with the reads that waited for values that have just moved, before they move again."""


class Updates:
    """Moves values, ``block_count`` elements at once."""

    def __init__(self, block_count: int, wake: Wake, counts: Counts | None = None) -> None:
        self._counts = counts or Counts()
        self._block_count = block_count
        self._wake = wake
        self._blocks: dict[torch.dtype, torch.Tensor] = {}
        """Memory for one block of sums."""
        self._spans: dict[torch.dtype, torch.Tensor] = {}
        """Memory for the sum of a span that is looked at before it is applied."""

    def update(
        self,
        store: ServerStore,
        chunk: Chunk,
        span: Span,
        due: PendingUpdate,
        norms: torch.Tensor | None = None,
    ) -> None:
        """Move the values of ``span`` by one round or one push, and wake the reads that waited there.

        Args:
            store: whose values they are.
            chunk: where they are.
            span: which they are.
            due: the sum.
            norms: those of the whole tensor, for a rule that needs them.
        """
        if chunk.embedding is not None:
            store.grow(embedding_rows.update(chunk, span, due) * chunk.embedding.row_bytes)
        elif store.updater is None:
            self._assign(chunk, span, due)
        else:
            span.step += 1
            self._apply(store, store.updater, chunk, span, due, norms)
        span.version += 1
        self._wake(chunk.woken(span.start, span.stop))

    def skip(self, chunk: Chunk, span: Span, due: PendingUpdate) -> None:
        """Drop an update: a round is closed without it, a push is just taken in."""
        if due.rank is None:
            span.version += 1
        self._wake(chunk.woken(span.start, span.stop))

    # --- application ------------------------------------------------------------------------

    def _assign(self, chunk: Chunk, span: Span, due: PendingUpdate) -> None:
        total = due.sum
        history = chunk.back_of(span, is_wanted=due.back is not None)
        if history is not None:
            residual = history.own_residual()[span.start : span.stop]
            block = self._block(torch.float32)
            for begin in range(0, len(residual), len(block)):
                part = block[: min(len(block), len(residual) - begin)]
                total.into(part, begin, begin + len(part))
                residual[begin : begin + len(part)].add_(part)
            self._publish(chunk, history, span, due, None)
            return
        if total.is_sparse:
            key_rows.assign(chunk, span, total.gathered())
            return
        target = chunk.overwritable(span.start, span.stop)[span.start : span.stop]
        for begin in range(0, len(target), self._block_count):
            block = target[begin : begin + self._block_count]
            if BY_NAME[chunk.dtype].kind == "half":
                wide = self._block(torch.float32)[: len(block)]
                total.into(wide, begin, begin + len(block))
                block.copy_(wide)
            else:
                total.into(block, begin, begin + len(block))

    def _block(self, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for one block of sums."""
        if dtype not in self._blocks:
            self._blocks[dtype] = torch.empty(self._block_count, dtype=dtype)
        return self._blocks[dtype]

    def _apply(
        self,
        store: ServerStore,
        updater: Updater,
        chunk: Chunk,
        span: Span,
        due: PendingUpdate,
        norms: torch.Tensor | None,
    ) -> None:
        history = chunk.back_of(span, is_wanted=due.back is not None)
        if due.sum.is_sparse and may_be_lazy(updater):
            if history is not None:  # a step is of all of a piece
                history.settle(chunk.writable(), span.start, span.stop)
            key_rows.update(store, chunk, span, due.sum.gathered(), due)
            if history is not None:
                chunk.forget_changes(span.start)
            return
        _densify(due)
        weight, state, lap = chunk.writable(), store.state_of(chunk), self._counts.lap
        block = self._block(chunk.summed_in)
        residual = None if history is None else history.own_residual()
        for first, last, rates in segments(store, chunk, span):
            terms = Terms(span.step, *rates, norms, due.rank, due.age)
            for start in range(first, last, self._block_count):
                stop = min(start + self._block_count, last)
                if due.is_own:
                    whole = due.sum.parts[0].joined()
                    gradient = whole[start - span.start : stop - span.start]
                else:
                    gradient = block[: stop - start]
                    due.sum.into(gradient, start - span.start, stop - span.start)
                target = weight[start:stop]
                if residual is not None:
                    target = target + residual[start:stop]
                if lap is not None:
                    lap()
                updater.apply(
                    target,
                    gradient,
                    {name: tensor[start:stop] for name, tensor in state.items()},
                    terms,
                )
                if lap is not None:
                    lap()
                if residual is not None:
                    torch.sub(target, weight[start:stop], out=residual[start:stop])
        if history is not None:
            self._publish(chunk, history, span, due, store.hyper)

    def _publish(
        self,
        chunk: Chunk,
        history: CompressedHistory,
        span: Span,
        due: PendingUpdate,
        hyper: HyperParams | None,
    ) -> None:
        """Move the values of ``span`` by what can be written of their residuals."""
        values, version = chunk.writable(), span.version + 1
        for key, start, stop in chunk.pieces(span.start, span.stop):
            lr = None if hyper is None else hyper.for_key(key)[0]
            code = code_of(due.back, version, lr)
            history.publish(values, start, stop, version, code, adds=hyper is not None)

    def squares(
        self, store: ServerStore, updater: Updater, chunk: Chunk, span: Span, due: PendingUpdate
    ) -> torch.Tensor:
        """Return the sums of squares of a piece that the store's rule needs."""
        _densify(due)
        ((_, _, rates),) = segments(store, chunk, span)
        state = store.state_of(chunk)
        weight = chunk.buffer.tensor[span.start : span.stop]
        if chunk.back is not None and chunk.back.owes(span.start, span.stop):
            weight = weight + chunk.back.residual[span.start : span.stop]
        return updater.partial_norms(
            weight,
            due.sum.parts[0].joined(),
            {name: tensor[span.start : span.stop] for name, tensor in state.items()},
            Terms(span.step + 1, *rates),
        )

    def squares_by_key(self, chunk: Chunk, span: Span, due: PendingUpdate) -> list[float]:
        """Return sums of squares of a gradient: of each key by itself, from its first element in
        the chunk on."""
        block, found = self._block(chunk.summed_in), []
        for _, first, last in chunk.pieces(span.start, span.stop):
            for start in range(first, last, self._block_count):
                part = block[: min(self._block_count, last - start)]
                due.sum.into(part, start - span.start, start - span.start + len(part))
                norm = float(torch.linalg.vector_norm(part, dtype=torch.float64))
                found.append(norm * norm)  # infinity where ** 2 would raise
        return found

    # --- sums that are looked at before they are applied --------------------------------------

    def sift(self, store: ServerStore, chunk: Chunk, span: Span, due: PendingUpdate) -> None:
        """Update keys that lie here as a whole, but for those whose gradient is not finite."""
        assert store.drops is not None
        if self._flaw(store, chunk, due) is None:
            self.update(store, chunk, span, due)
            return
        span.due.append(due)  # so that it is cut where the span is
        for part in chunk.cut_by_piece(span.start, span.stop):
            update = part.due.popleft()
            flaw = self._flaw(store, chunk, update)
            if flaw is None:
                self.update(store, chunk, part, update)
                continue
            ((key, _, _),) = chunk.pieces(part.start, part.stop)
            store.drops.add(key, store.shards[key].pieces, update.rank, update.number, flaw)
            self.skip(chunk, part, update)

    def _flaw(self, store: ServerStore, chunk: Chunk, due: PendingUpdate) -> Flaw | None:
        """Return the flaw of a gradient; None if it is finite, and then ``due`` has the sum."""
        if due.sum.is_sparse:
            flaw, rows = _gathered(store, chunk, due)
            if flaw is None:
                due.sum, due.is_own = GradientSum((rows,)), True
            return flaw
        dtype = chunk.summed_in
        parts = due.sum.parts
        if len(parts) == 1 and parts[0].dtype == dtype:
            return self._added(store, chunk, due, parts[0].joined(), is_sum=True)
        if dtype not in self._spans or len(self._spans[dtype]) < len(due.sum):
            self._spans[dtype] = torch.empty(len(due.sum), dtype=dtype)
        whole = self._spans[dtype][: len(due.sum)]
        flaw = self._added(store, chunk, due, whole)
        if flaw is None:
            due.sum, due.is_own = GradientSum((DenseGradient([whole]),)), True
        return flaw

    def add_up(self, store: ServerStore, chunk: Chunk, due: PendingUpdate, *, by_rows: bool) -> None:
        """Sum a gradient in memory of its own, and note its flaw, if the store checks.

        One of which only rows are there stays so, if it may be applied ``by_rows``.
        """
        if due.sum.is_sparse and by_rows:
            due.flaw, rows = _gathered(store, chunk, due)
            due.sum, due.is_own = GradientSum((rows,)), True
            return
        whole = torch.empty(len(due.sum), dtype=chunk.summed_in)  # it may be lent, and is used twice
        if store.may_drop(chunk.dtype):
            due.flaw = self._added(store, chunk, due, whole)
        else:
            due.sum.into(whole, 0, len(whole))
        due.sum, due.is_own = GradientSum((DenseGradient([whole]),)), True

    def _added(
        self,
        store: ServerStore,
        chunk: Chunk,
        due: PendingUpdate,
        whole: torch.Tensor,
        *,
        is_sum: bool = False,
    ) -> Flaw | None:
        """Sum a gradient into ``whole``, unless that is the sum already; return its flaw."""
        kept_as = _kept_as(store, chunk)
        count = 0
        for begin in range(0, len(whole), self._block_count):
            block = whole[begin : begin + self._block_count]
            if not is_sum:
                due.sum.into(block, begin, begin + len(block))
            count += count_nonfinite(block.to(kept_as))
        return _flaw_of(due, count)


def segments(store: ServerStore, chunk: Chunk, span: Span) -> Iterator[tuple[int, int, tuple[float, float]]]:
    """Yield (start, stop, (lr, weight decay)) of the parts of ``span`` that have them equal."""
    assert store.updater is not None
    hyper = store.updater.hyper
    if not hyper.lr_mult and not hyper.wd_mult:
        yield span.start, span.stop, store.updater.rates
        return
    pieces = chunk.pieces(span.start, span.stop)
    for rates, group in groupby(pieces, lambda piece: hyper.for_key(piece[0])):
        alike = list(group)
        yield alike[0][1], alike[-1][2], rates


def _densify(due: PendingUpdate) -> None:
    """Make a sum of rows dense, for a rule that needs all elements."""
    if due.sum.is_sparse:
        due.sum, due.is_own = GradientSum((DenseGradient([due.sum.whole()]),)), True


def _gathered(store: ServerStore, chunk: Chunk, due: PendingUpdate) -> tuple[Flaw | None, RowGradient]:
    """Sum row gradients; return the flaw and the sum."""
    rows = due.sum.gathered()
    return _flaw_of(due, count_nonfinite(rows.joined().to(_kept_as(store, chunk)))), rows


def _kept_as(store: ServerStore, chunk: Chunk) -> torch.dtype:
    """Return the type in which a sum has to be finite."""
    # Without an optimizer the sum is what the key becomes, and there it may overflow.
    is_half = BY_NAME[chunk.dtype].kind == "half"
    return TORCH[chunk.dtype] if is_half and store.updater is None else chunk.summed_in


def _flaw_of(due: PendingUpdate, count: int) -> Flaw | None:
    """Return the flaw of a gradient of which so many values are not finite."""
    if not count:
        return None
    culprits: set[int] = set()
    for ranks, part in zip(due.whose, due.sum.parts, strict=True):
        if count_nonfinite(part.joined()):
            culprits.update(ranks)
    return Flaw(count, tuple(sorted(culprits)))
