"""Reductions: allreduce of one tensor, or of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvps.compat.horovod.compression import Compression, Compressor, checked
from kvps.compat.horovod.engine.arithmetic import scale
from kvps.compat.horovod.negotiation.request import ALLGATHER, ALLREDUCE, REDUCESCATTER
from kvps.compat.horovod.ops.handles import begin, demand_tensors, refuse, synchronize
from kvps.compat.horovod.process_sets import ProcessSet, global_process_set
from kvps.compat.horovod.reductions import Adasum, Average, ReduceOp, Sum, chosen

Tensors = Sequence[torch.Tensor]


class Reduction(NamedTuple):
    """How the tensors of the ranks are reduced."""

    kind: str
    """``allreduce`` or ``reducescatter``."""
    op: ReduceOp
    prescale: float
    postscale: float
    process_set: ProcessSet


def begin_reduction(
    how: Reduction, tensors: Tensors, name: str | None, *, is_list: bool, is_inplace: bool = False
) -> int:
    """Begin an allreduce or a reducescatter, after checks; return its handle."""
    kind, op, process_set = how.kind, how.op, how.process_set
    demand_tensors(kind, name, tensors, process_set)
    if kind == REDUCESCATTER and op not in (Sum, Average):
        text = f"reducescatter: op={op.name} is not supported; use hvd.Sum or hvd.Average"
        raise refuse(kind, name, process_set, text)
    if op == Adasum and not all(tensor.is_floating_point() for tensor in tensors):
        text = "Adasum needs floating-point tensors"
        raise refuse(kind, name, process_set, text)
    travelling = [tensor.detach() if is_inplace else tensor.detach().clone() for tensor in tensors]
    for tensor in travelling:
        scale(tensor, float(how.prescale))
    factors = {"prescale": float(how.prescale), "postscale": float(how.postscale)}
    results = tensors if is_inplace else None
    return begin(
        kind, name, travelling, process_set, is_list=is_list, results=results, op=op.value, **factors
    )


def reduced(
    how: Reduction, tensors: Tensors, name: str | None, compression: type[Compressor]
) -> list[torch.Tensor]:
    """Return the reductions of tensors, through which gradients flow."""
    pairs = [checked(compression).compress(tensor) for tensor in tensors]
    results = _Reduced.apply(how, name, *[tensor for tensor, _ in pairs])  # type: ignore[no-untyped-call]  # torch has no types there
    return [
        compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)
    ]


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
    how = Reduction(ALLREDUCE, chosen(op, average), prescale_factor, postscale_factor, process_set)
    return begin_reduction(how, [tensor], name, is_list=False)


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
    how = Reduction(ALLREDUCE, chosen(op, average), prescale_factor, postscale_factor, process_set)
    return begin_reduction(how, [tensor], name, is_list=False, is_inplace=True)


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
    how = Reduction(ALLREDUCE, chosen(op, average), prescale_factor, postscale_factor, process_set)
    return reduced(how, [tensor], name, compression)[0]


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
    how = Reduction(ALLREDUCE, chosen(op, average), prescale_factor, postscale_factor, process_set)
    return begin_reduction(how, list(tensors), name, is_list=True)


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
    how = Reduction(ALLREDUCE, chosen(op, average), prescale_factor, postscale_factor, process_set)
    return begin_reduction(how, list(tensors), name, is_list=True, is_inplace=True)


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
    how = Reduction(ALLREDUCE, chosen(op, average), prescale_factor, postscale_factor, process_set)
    return reduced(how, tensors, name, compression)


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


class _Reduced(torch.autograd.Function):
    """A reduction through which gradients flow.

    The gradients of an allreduce are reduced alike, and the gradients of a reducescatter are gathered.
    As in Horovod, the gradient of a reducescatter's sum has the factor of the number of ranks: gradients are
    averaged over ranks.
    """

    @staticmethod
    def forward(ctx: Any, how: Reduction, name: str | None, *tensors: torch.Tensor) -> Any:
        ctx.how = how
        return tuple(synchronize(begin_reduction(how, tensors, name, is_list=True)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        how: Reduction = ctx.how
        if how.kind == ALLREDUCE:
            return None, None, *_Reduced.apply(how, None, *grads)  # type: ignore[no-untyped-call]  # torch has no types there
        factor = how.prescale * how.postscale * ((how.process_set.size() or 1) if how.op == Sum else 1)
        scaled = [grad * factor for grad in grads]
        return None, None, *synchronize(begin(ALLGATHER, None, scaled, how.process_set, is_list=True))
