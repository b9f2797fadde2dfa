"""Reducescatter: each rank gets its rows of a reduction."""

from __future__ import annotations

import torch

from kvps.compat.horovod.compression import Compression, Compressor
from kvps.compat.horovod.negotiation.request import REDUCESCATTER
from kvps.compat.horovod.ops.reduce import Reduction, Tensors, begin_reduction, reduced
from kvps.compat.horovod.process_sets import ProcessSet, global_process_set
from kvps.compat.horovod.reductions import Average, ReduceOp, chosen


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin :func:`reducescatter`; return its handle."""
    how = Reduction(REDUCESCATTER, chosen(op, None), prescale_factor, postscale_factor, process_set)
    return begin_reduction(how, [tensor], name, is_list=False)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin :func:`grouped_reducescatter`; return its handle."""
    how = Reduction(REDUCESCATTER, chosen(op, None), prescale_factor, postscale_factor, process_set)
    return begin_reduction(how, list(tensors), name, is_list=True)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction of a tensor; gradients flow through it.

    The rows are dealt out in the order of ranks; if they cannot be dealt out evenly, the first
    ranks get one more.

    Args:
        tensor: of the same type and shape on every rank, with 1 dimension or more.
        name: matches the calls of the ranks; by default, the number of the call.
        compression: applied before the tensor travels.
        op: Average or Sum.
        process_set: the ranks that take part.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.

    Raises:
        ValueError: for an argument that cannot be.
        HorovodInternalError: on every rank, if the ranks do not fit together, or for a scalar.
    """
    how = Reduction(REDUCESCATTER, chosen(op, None), prescale_factor, postscale_factor, process_set)
    return reduced(how, [tensor], name, compression)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's rows of several reductions, which run as one operation; see
    :func:`reducescatter`."""
    how = Reduction(REDUCESCATTER, chosen(op, None), prescale_factor, postscale_factor, process_set)
    return reduced(how, tensors, name, compression)
