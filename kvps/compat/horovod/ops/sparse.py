"""Sparse allreduce: the indices and values of all ranks, gathered."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvps.compat.horovod.negotiation.request import ALLGATHER
from kvps.compat.horovod.ops.handles import begin, poll, refuse, synchronize
from kvps.compat.horovod.process_sets import ProcessSet, global_process_set
from kvps.compat.horovod.reductions import Average, ReduceOp, Sum


class SparseHandle:
    """The handle of a sparse allreduce: call it, or give it to ``synchronize()``, for the result."""

    def __init__(self, handle: int, tensor: torch.Tensor, divisor: int) -> None:
        self._handle, self._tensor, self._divisor = handle, tensor, divisor
        self._result: torch.Tensor | None = None

    def is_over(self) -> bool:
        """Return whether the operation is over."""
        return self._result is not None or poll(self._handle)

    def __call__(self) -> torch.Tensor:
        """Wait for the result: a sparse tensor, in which rows may occur several times.

        Raises:
            HorovodInternalError: if the operation failed.
        """
        if self._result is None:
            indices, values = synchronize(self._handle)
            mean = values if self._divisor == 1 else values / self._divisor
            self._result = torch.sparse_coo_tensor(
                indices.t(), mean, self._tensor.shape, check_invariants=False
            )
        return self._result


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin the sum or mean of a sparse tensor; return a handle, which may also be called for the result.

    Args:
        tensor: a sparse COO tensor, whose indices may differ between ranks.
        name: matches the calls of the ranks.
        op: Average or Sum.
        process_set: the ranks that take part.

    Raises:
        ValueError: for a dense tensor, or another reduction.
    """
    given: object = tensor
    if not (isinstance(given, torch.Tensor) and given.layout is torch.sparse_coo):
        text = "sparse_allreduce_async needs a sparse COO tensor; use allreduce_async() for a dense one"
        raise refuse(ALLGATHER, name, process_set, text)
    if op not in (Sum, Average):
        text = f"sparse_allreduce_async: op={op!r} is not supported; use hvd.Sum or hvd.Average"
        raise refuse(ALLGATHER, name, process_set, text)
    indices, values = tensor._indices().t().contiguous(), tensor._values()
    handle = begin(ALLGATHER, name, [indices, values], process_set, is_list=True)
    count = process_set.size() or 1
    return SparseHandle(handle, tensor, count if op == Average else 1)
