"""The gate of stores that drop updates which are not finite: all of a key is applied, or nothing.

A key that lies here as one piece is judged by its own sum. A key that lies in several pieces, here or on
other servers, waits until the flaws of all of them are known (:mod:`kvps.core.server.rules.whole_tensor`).
"""

from __future__ import annotations

from itertools import pairwise

import torch

from kvps.core.gradients import DenseGradient, OwnSum
from kvps.core.nonfinite import Flaw
from kvps.core.server.chunks.rounds import PendingUpdate, Span
from kvps.core.server.rules.rule import Gate, Rule
from kvps.core.server.rules.whole_tensor import GlobalNorms, flaw_of, flaw_of_rows


class Finite(Gate):
    """An update of a key is dropped if its gradient is not finite."""

    def __init__(self, inner: Rule, norms: GlobalNorms) -> None:
        super().__init__(inner)
        self._norms = norms
        self.cut = self._cut
        self._known = 0
        """Keys of the chunk that were looked at so far."""
        self._apart: list[tuple[int, int]] = []
        """(start, stop) of the pieces among them that hold only part of their key, in order."""

    def _cut(self, start: int, stop: int) -> list[Span]:
        """Return spans that tile a range; a piece that waits for others is a span of its own."""
        chunk = self.chunk
        if self._known < len(chunk.keys):
            self._apart += [
                (begin, end)
                for key, begin, end in chunk.pieces(chunk.bounds[self._known], chunk.used)
                if (shard := self.store.shards.get(key)) is not None and self._norms.is_apart(shard)
            ]
            self._known = len(chunk.keys)
        edges = [start]
        for begin, end in self._apart:
            edges += [edge for edge in (begin, end) if edges[-1] < edge < stop]
        edges.append(stop)
        return [span for begin, end in pairwise(edges) for span in chunk.cut(begin, end)]

    def apply(self, span: Span, due: PendingUpdate, norms: torch.Tensor | None = None) -> None:
        """Update the keys whose gradient is finite, and drop the update of the others."""
        key, _, _ = next(self.chunk.pieces(span.start, span.stop))
        if self._norms.is_apart(self.store.shards[key]):
            self._norms.begin(self, span, due)
        elif self._flaw(due) is None:
            self.move(span, due)
        else:
            span.due.append(due)  # so that it is cut where the span is
            for part in self.chunk.cut_by_piece(span.start, span.stop):
                self._apply_piece(part, part.due.popleft())

    def _apply_piece(self, span: Span, due: PendingUpdate) -> None:
        flaw = self._flaw(due)
        if flaw is None:
            self.move(span, due)
            return
        ((key, _, _),) = self.chunk.pieces(span.start, span.stop)
        assert self.store.drops is not None
        self.store.drops.add(key, self.store.shards[key].pieces, due.rank, due.number, flaw)
        self.skip(span, due)

    def _flaw(self, due: PendingUpdate) -> Flaw | None:
        """Return the flaw of a gradient; None if it is finite, and then ``due`` has the sum."""
        if due.sum.is_sparse:
            flaw, rows = flaw_of_rows(self, due)
            if flaw is None:
                due.sum = OwnSum((rows,))
            return flaw
        dtype, parts = self.chunk.summed_in, due.sum.parts
        if len(parts) == 1 and parts[0].dtype == dtype:
            return flaw_of(self, due, parts[0].joined(), is_sum=True)
        whole = self.shop.block(dtype, len(due.sum))[: len(due.sum)]
        flaw = flaw_of(self, due, whole)
        if flaw is None:
            due.sum = OwnSum((DenseGradient([whole]),))
        return flaw
