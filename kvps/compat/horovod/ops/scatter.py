"""Reducescatter: each rank gets its rows of a reduction."""

from __future__ import annotations

from typing import Any

import torch

from kvps.compat.horovod.compression import Compression, Compressor, checked
from kvps.compat.horovod.negotiation.request import ALLGATHER, REDUCESCATTER
from kvps.compat.horovod.ops.handles import begin, synchronize
from kvps.compat.horovod.ops.reduce import Tensors, begin_reduction
from kvps.compat.horovod.process_sets import ProcessSet, global_process_set
from kvps.compat.horovod.reductions import Average, ReduceOp, Sum, chosen


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin :func:`reducescatter`; return its handle."""
    return begin_reduction(
        REDUCESCATTER,
        [tensor],
        name,
        chosen(op, None),
        prescale_factor,
        postscale_factor,
        process_set,
        is_list=False,
    )


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin :func:`grouped_reducescatter`; return its handle."""
    return begin_reduction(
        REDUCESCATTER,
        list(tensors),
        name,
        chosen(op, None),
        prescale_factor,
        postscale_factor,
        process_set,
        is_list=True,
    )


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
    compressed, context = checked(compression).compress(tensor)
    result: torch.Tensor = _Reducescatter.apply(  # type: ignore[no-untyped-call]  # torch has no types there
        chosen(op, None), name, prescale_factor, postscale_factor, process_set, compressed
    )[0]
    return compression.decompress(result, context)


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
    pairs = [checked(compression).compress(tensor) for tensor in tensors]
    results = _Reducescatter.apply(  # type: ignore[no-untyped-call]  # torch has no types there
        chosen(op, None),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
        *[tensor for tensor, _ in pairs],
    )
    return [
        compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)
    ]


class _Reducescatter(torch.autograd.Function):
    """A reducescatter through which gradients flow: they are gathered.

    As in Horovod, the gradient of a sum has the factor of the number of ranks: gradients are
    averaged over ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        op: ReduceOp,
        name: str | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.arguments = op, prescale, postscale, process_set
        found = synchronize(
            begin_reduction(REDUCESCATTER, tensors, name, op, prescale, postscale, process_set, is_list=True)
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.arguments
        factor = prescale * postscale * (process_set.size() if op == Sum else 1)
        scaled = [grad * factor for grad in grads]
        found = synchronize(begin(ALLGATHER, None, scaled, process_set, is_list=True))
        return (*[None] * 5, *found)
