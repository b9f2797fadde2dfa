"""The rules of values that are pulled compressed: values move by encoded steps alone.

An update goes to values and residual together. What a codec can express of it becomes the values that are
pulled, and the rest stays in the residual (:mod:`kvps.core.server.chunks.history`). A round that no rank
wants compressed, of values without a residual, is written as without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvps.core.optim.base import State, Terms
from kvps.core.server.chunks.history import CompressedHistory, code_of
from kvps.core.server.chunks.rounds import PendingUpdate, Span
from kvps.core.server.rules.rule import Assign, Optimize, Rule


class PublishedAssign(Assign):
    """The sum and the residual become the values, as far as the codec can express them."""

    def write(self, span: Span, due: PendingUpdate, norms: Tensor | None) -> None:
        """Add the sum to the residual, and publish."""
        history = _history(self, span, due)
        if history is None:
            super().write(span, due, norms)
            return
        residual, block = history.own_residual()[span.start : span.stop], self.shop.block(torch.float32)
        for begin in range(0, len(residual), self.shop.block_count):
            part = residual[begin : begin + self.shop.block_count]
            part.add_(due.sum.block(block, begin, begin + len(part)))
        _publish(self, history, span, due, adds=False)


class PublishedOptimize(Optimize):
    """The optimizer moves values and residual together."""

    _residual: Tensor | None = None
    """The residuals that the present update goes to; None where it is not published."""

    def write(self, span: Span, due: PendingUpdate, norms: Tensor | None) -> None:
        """Update, and publish."""
        history = _history(self, span, due)
        if history is not None and due.sum.is_sparse:
            history.settle(self.chunk.writable(), span.start, span.stop)  # a step is of all of a piece
            super().write(span, due, norms)
            self.chunk.forget_changes(span.start)
            return
        self._residual = None if history is None else history.own_residual()
        super().write(span, due, norms)
        if history is not None:
            _publish(self, history, span, due, adds=True)

    def step(self, weight: Tensor, at: slice, gradient: Tensor, state: State, terms: Terms) -> None:
        """Update the sum of values and residual; the values stay for now."""
        if self._residual is None:
            super().step(weight, at, gradient, state, terms)
            return
        residual, values = self._residual[at], weight[at]
        exact = values + residual
        self.updater.apply(exact, gradient, {name: tensor[at] for name, tensor in state.items()}, terms)
        torch.sub(exact, values, out=residual)


def _history(rule: Rule, span: Span, due: PendingUpdate) -> CompressedHistory | None:
    """Return where an update is published; None if it is neither wanted so, nor values have residuals."""
    back = rule.chunk.back
    assert back is not None
    return back if due.back is not None or back.owes(span.start, span.stop) else None


def _publish(rule: Rule, history: CompressedHistory, span: Span, due: PendingUpdate, *, adds: bool) -> None:
    """Move the values of ``span`` by the part of their residuals that the code can hold."""
    values, version, hyper = rule.chunk.writable(), span.version + 1, rule.store.hyper
    for key, start, stop in rule.chunk.pieces(span.start, span.stop):
        lr = hyper.for_key(key)[0] if adds and hyper is not None else None
        history.publish(values, start, stop, version, code_of(due.back, version, lr), adds=adds)
