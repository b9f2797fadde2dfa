"""Gradients that leave when a step is made: weights come back for them, or their sums.

Gradients that leave during backward are :mod:`kvps.torch.sync.gradient_sync`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from kvps.store.base import Store
from kvps.store.kvstore import KVStore
from kvps.store.rows import has_rows
from kvps.torch.sync.gradient_memory import GradientMemory
from kvps.torch.sync.sparse_gradients import SparseGradients, adds_plainly, dense_of, sum_of

LEVELS = 8
"""The number of priorities of parameters, in their order."""
Waits = dict[str, Callable[[], torch.Tensor]]


class StepExchange:
    """The gradients of a model, pushed by one call for all parameters.

    Args:
        kv: the store; None if there is nothing to exchange.
        params: name -> parameter; the store knows these keys.
        brings_weights: whether the store has the optimizer.
        lends: whether servers may read gradients in place.
    """

    def __init__(
        self, kv: Store | None, params: Mapping[str, torch.Tensor], *, brings_weights: bool, lends: bool
    ) -> None:
        self._kv = kv
        self._params = params
        self._brings_weights = brings_weights
        self._tables = SparseGradients.of(kv, brings_weights=brings_weights)
        self._memory = GradientMemory(kv if lends else None, params)
        self._memory.watch()

    def update(self, names: Sequence[str], factor: float) -> None:
        """Push gradients times ``factor``, and take the weights that the store has updated."""
        gradients = [self._gradient(name) for name in names]
        if factor != 1.0:
            with torch.no_grad():
                gradients = [gradient * factor for gradient in gradients]
        with self._memory.lent(names):
            self._pushpull(names, gradients, [self._params[name].detach() for name in names])

    def sum_up(self, names: Sequence[str]) -> None:
        """Replace gradients with their sums over all workers; sparse gradients travel as rows, if
        possible."""
        gradients = {name: self._gradient(name) for name in names}
        waits = self._begin_tables(names, list(gradients.values()), [0] * len(names))
        dense = {
            name: dense_of(gradient) if gradient.is_sparse else gradient
            for name, gradient in gradients.items()
            if name not in waits
        }
        if dense:
            with self._memory.lent(names):
                self._pushpull(list(dense), list(dense.values()), list(dense.values()))
        sums = {name: wait() for name, wait in waits.items()}
        for name, gradient in gradients.items():
            param = self._params[name]
            if name in sums:
                param.grad = sums[name]
            elif gradient.is_sparse:
                param.grad = sum_of(dense[name], param, is_marked=adds_plainly(self._kv))

    def _gradient(self, name: str) -> torch.Tensor:
        """Return the gradient of a parameter, 0 where there is none."""
        place, param = self._memory.sent(name), self._params[name]
        if place is not None:
            return place
        if param.grad is None:
            return torch.zeros_like(param, requires_grad=False)
        return param.grad.detach()

    def _pushpull(
        self, names: Sequence[str], values: Sequence[torch.Tensor], out: Sequence[torch.Tensor]
    ) -> None:
        assert self._kv is not None
        if not isinstance(self._kv, KVStore):
            for index, name in enumerate(names):  # a plug-in need not take lists
                value = values[index].to_dense() if values[index].is_sparse else values[index]
                self._kv.pushpull(name, value, out=out[index], priority=-index)
            return
        # The first layers are needed first, in the next forward pass. Within one level chunks
        # go to all servers in turns.
        levels = [-(LEVELS * index // len(names)) for index in range(len(names))]
        waits = self._begin_tables(names, values, levels) if self._brings_weights else {}
        rest = [index for index, name in enumerate(names) if name not in waits]
        if rest:
            self._kv.pushpull(
                [names[index] for index in rest],
                [_dense_unless_rows(values[index]) for index in rest],
                out=[out[index] for index in rest],
                priority=[levels[index] for index in rest],
            )
        for wait in waits.values():
            wait()

    def _begin_tables(
        self, names: Sequence[str], values: Sequence[torch.Tensor], levels: Sequence[int]
    ) -> Waits:
        """Push sparse gradients as rows, if possible; return a wait for each."""
        if self._tables is None:
            return {}
        return {
            name: self._tables.begin(name, value, level, self._params[name])
            for name, value, level in zip(names, values, levels, strict=True)
            if has_rows(value)
        }


def _dense_unless_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the form that a store takes."""
    return gradient.to_dense() if gradient.is_sparse and not has_rows(gradient) else gradient
