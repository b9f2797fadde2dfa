"""Gradients of one optimizer on their way: when they leave, in which groups, and back into ``.grad``.

A parameter's gradient leaves when the last backward pass of a step has made it, or, with groups,
when those of its group are all there. What backward has not made by :meth:`Reduction.finish` is
sent then, as zeros if there is none, since another rank may have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from kvps.compat.horovod.compression import Compressor
from kvps.compat.horovod.engine.context import current
from kvps.compat.horovod.ops.handles import synchronize
from kvps.compat.horovod.ops.reduce import allreduce_async_, grouped_allreduce_async_
from kvps.compat.horovod.ops.sparse import sparse_allreduce_async
from kvps.compat.horovod.process_sets import ProcessSet
from kvps.compat.horovod.reductions import Adasum, Average, ReduceOp
from kvps.torch.sync.parameter_hooks import watch

Group = tuple[torch.Tensor, ...]


class Reduction:
    """The gradients of one optimizer on their way.

    Args:
        named: name and parameter of all that the optimizer updates.
        groups: parameters whose gradients travel together; each of the others travels alone.
        compression: of the gradients.
        passes: backward passes of a step.
        op: the reduction.
        predivide: the part of the division by the number of ranks that comes before the sum.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: the ranks that take part.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        groups: Sequence[Sequence[torch.Tensor]],
        compression: type[Compressor],
        passes: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.passes = passes
        self.op = op
        self.process_set = process_set
        self._compression, self._predivide = compression, predivide
        self._sparse_as_dense = sparse_as_dense
        number = next(current().numbers.setdefault("optimizer", count()))
        self._names = {param: f"gradient.{number}.{name}" for name, param in named}
        self._groups = _grouped([param for _, param in named if param.requires_grad], groups)
        self._left = {param: passes for _, param in named}
        """parameter -> backward passes until its gradient leaves"""
        self._handles: dict[Group, tuple[Any, list[Any]]] = {}
        self._touched: set[torch.Tensor] = set()
        """Parameters that backward has reached in this step."""

    @property
    def is_under_way(self) -> bool:
        """Whether backward has reached a parameter since the last step."""
        return bool(self._touched or self._handles)

    @property
    def params(self) -> list[torch.Tensor]:
        """The parameters with gradients."""
        return list(self._groups)

    def watch(self) -> None:
        """Have backward tell of each gradient, as long as this object lives."""
        for param in self._groups:
            watch(self._on_gradient, param, param)

    def reset(self, passes: int) -> None:
        """Begin a step, of so many backward passes."""
        self.passes = passes
        self._left = dict.fromkeys(self._left, passes)
        self._touched.clear()

    def forget(self) -> None:
        """Forget the step that has begun."""
        self._handles.clear()
        self.reset(self.passes)

    def _on_gradient(self, param: torch.Tensor) -> None:
        if self._left[param] <= 0:
            raise AssertionError(
                f"Gradients were computed more than backward_passes_per_step times ({self.passes}) before "
                "step(). Increase backward_passes_per_step to accumulate gradients locally"
            )
        self._touched.add(param)
        self._left[param] -= 1
        group = self._groups[param]
        if all(self._left[member] == 0 for member in group):
            self._send(group)

    def _send(self, group: Group) -> None:
        for param in group:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        name = self._names[group[0]]
        grads = [param.grad for param in group if param.grad is not None]
        if len(group) == 1 and grads[0].is_sparse and not self._sparse_as_dense:
            grad = grads[0].coalesce()
            self._handles[group] = (sparse_allreduce_async(grad, name, self.op, self.process_set), [])
            return
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
        compressed = [self._compression.compress(grad) for grad in dense]
        is_mean = self.op == Average
        handle = grouped_allreduce_async_(
            [tensor for tensor, _ in compressed],
            name=name,
            op=self.op,
            prescale_factor=1.0 / self._predivide if is_mean else 1.0,
            postscale_factor=self._predivide if is_mean else 1.0,
            process_set=self.process_set,
        )
        self._handles[group] = handle, [context for _, context in compressed]

    @torch.no_grad()
    def finish(self) -> None:
        """Send the gradients that have not left, wait for all, and put the results into ``.grad``."""
        for group in dict.fromkeys(self._groups.values()):
            if group not in self._handles:
                self._send(group)
        handles, self._handles = self._handles, {}
        self.reset(self.passes)
        for group, (handle, contexts) in handles.items():
            found = synchronize(handle)
            if callable(handle):
                group[0].grad = found.to(group[0].dtype)
                continue
            for param, reduced, context in zip(group, found, contexts, strict=True):
                _put(param, self._compression.decompress(reduced, context))

    def combine(self, changes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the adaptive sums of the ranks' changes of the parameters."""
        sent = []
        for param, change in zip(self._groups, changes, strict=True):
            compressed, context = self._compression.compress(change)
            handle = allreduce_async_(compressed, name=self._names[param], op=Adasum)
            sent.append((handle, context))
        return [self._compression.decompress(synchronize(handle), context) for handle, context in sent]


def _put(param: torch.Tensor, reduced: torch.Tensor) -> None:
    grad = param.grad
    assert grad is not None
    if grad.is_sparse:
        param.grad = reduced.to_sparse(grad.sparse_dim())
    elif grad.data_ptr() != reduced.data_ptr():
        grad.copy_(reduced)


def _grouped(
    params: Sequence[torch.Tensor], groups: Sequence[Sequence[torch.Tensor]]
) -> dict[torch.Tensor, Group]:
    """Return the group of each parameter."""
    found: dict[torch.Tensor, Group] = {}
    known = set(params)
    for group in groups:
        members = tuple([param for param in group if param in known])
        found.update(dict.fromkeys(members, members))
    for param in params:
        found.setdefault(param, (param,))
    return found
