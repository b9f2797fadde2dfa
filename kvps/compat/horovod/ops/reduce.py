"""Reductions: allreduce of one tensor, or of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvps.compat.horovod.compression import Compression, Compressor, checked
from kvps.compat.horovod.engine.arithmetic import scale
from kvps.compat.horovod.negotiation.request import ALLREDUCE, REDUCESCATTER
from kvps.compat.horovod.ops.handles import begin, demand_tensors, refuse, synchronize
from kvps.compat.horovod.process_sets import ProcessSet, global_process_set
from kvps.compat.horovod.reductions import Adasum, Average, ReduceOp, Sum, chosen

Tensors = Sequence[torch.Tensor]


def begin_reduction(
    kind: str,
    tensors: Tensors,
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    is_list: bool,
    is_inplace: bool = False,
) -> int:
    """Begin an allreduce or a reducescatter, after checks; return its handle."""
    demand_tensors(kind, name, tensors, process_set)
    if kind == REDUCESCATTER and op not in (Sum, Average):
        text = f"reducescatter: op={op.name} is not supported; use hvd.Sum or hvd.Average"
        raise refuse(kind, name, process_set, text)
    if op == Adasum and not all(tensor.is_floating_point() for tensor in tensors):
        text = "Adasum needs floating-point tensors"
        raise refuse(kind, name, process_set, text)
    travelling = [tensor.detach() if is_inplace else tensor.detach().clone() for tensor in tensors]
    for tensor in travelling:
        scale(tensor, float(prescale_factor))
    return begin(
        kind,
        name,
        travelling,
        process_set,
        is_list=is_list,
        results=tensors if is_inplace else None,
        op=op.value,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
    )


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin :func:`allreduce`; return its handle."""
    return begin_reduction(
        ALLREDUCE,
        [tensor],
        name,
        chosen(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
        is_list=False,
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin :func:`allreduce_`; return its handle."""
    return begin_reduction(
        ALLREDUCE,
        [tensor],
        name,
        chosen(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
        is_inplace=True,
        is_list=False,
    )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the reduction of a tensor over the ranks; gradients flow through it.

    Args:
        tensor: of the same type and shape on every rank.
        average: deprecated; use ``op``.
        name: matches the calls of the ranks; by default, the number of the call.
        compression: applied before the tensor travels.
        op: the reduction; Average by default.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.

    Raises:
        ValueError: for an argument that cannot be, or a name whose operation is not over.
        HorovodInternalError: on every rank, if the ranks do not fit together.

    Example:
        >>> hvd.allreduce(torch.ones(2), name="loss")  # doctest: +SKIP
        tensor([1., 1.])
    """
    compressed, context = checked(compression).compress(tensor)
    result: torch.Tensor = _Allreduce.apply(  # type: ignore[no-untyped-call]  # torch has no types there
        chosen(op, average), name, prescale_factor, postscale_factor, process_set, False, compressed
    )[0]
    return compression.decompress(result, context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Replace a tensor by its reduction over the ranks, and return it; see :func:`allreduce`."""
    synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))
    return tensor


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin :func:`grouped_allreduce`; return its handle."""
    return begin_reduction(
        ALLREDUCE,
        list(tensors),
        name,
        chosen(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
        is_list=True,
    )


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin :func:`grouped_allreduce_`; return its handle."""
    return begin_reduction(
        ALLREDUCE,
        list(tensors),
        name,
        chosen(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
        is_inplace=True,
        is_list=True,
    )


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the reductions of several tensors, which run as one operation; see :func:`allreduce`."""
    pairs = [checked(compression).compress(tensor) for tensor in tensors]
    results = _Allreduce.apply(  # type: ignore[no-untyped-call]  # torch has no types there
        chosen(op, average),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
        True,
        *[tensor for tensor, _ in pairs],
    )
    return [
        compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)
    ]


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensors:
    """Replace several tensors by their reductions, and return them; see :func:`allreduce`."""
    factors = prescale_factor, postscale_factor
    synchronize(grouped_allreduce_async_(tensors, average, name, op, *factors, process_set))
    return tensors


class _Allreduce(torch.autograd.Function):
    """An allreduce through which gradients flow: they are reduced alike."""

    @staticmethod
    def forward(
        ctx: Any,
        op: ReduceOp,
        name: str | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        is_list: bool,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.arguments = op, prescale, postscale, process_set, is_list
        found = synchronize(
            begin_reduction(ALLREDUCE, tensors, name, op, prescale, postscale, process_set, is_list=True)
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, prescale, postscale, process_set, is_list = ctx.arguments
        found = _Allreduce.apply(  # type: ignore[no-untyped-call]  # torch has no types there
            op, None, prescale, postscale, process_set, is_list, *grads
        )
        return (*[None] * 6, *found)
