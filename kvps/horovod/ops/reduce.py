"""Reductions: allreduce and reducescatter, of one tensor, of a group, and of sparse tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvps.horovod.compression import Compression, Compressor
from kvps.horovod.engine.arithmetic import scale
from kvps.horovod.negotiation.request import ALLGATHER, ALLREDUCE, REDUCESCATTER
from kvps.horovod.ops.handles import begin, demand_tensors, poll, refuse, synchronize
from kvps.horovod.process_sets import ProcessSet, global_process_set
from kvps.horovod.reductions import Adasum, Average, ReduceOp, Sum, chosen

Tensors = Sequence[torch.Tensor]


def _reduce(
    kind: str,
    tensors: Tensors,
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    is_inplace: bool,
    is_list: bool,
) -> int:
    demand_tensors(kind, name, tensors, process_set)
    if kind == REDUCESCATTER and op not in (Sum, Average):
        text = f"reducescatter: op={op.name} is not supported; use hvd.Sum or hvd.Average"
        raise refuse(kind, name, process_set, text)
    if op == Adasum and not all(one.is_floating_point() for one in tensors):
        text = "Adasum needs floating-point tensors"
        raise refuse(kind, name, process_set, text)
    travelling = [one.detach() if is_inplace else one.detach().clone() for one in tensors]
    for one in travelling:
        scale(one, float(prescale_factor))
    return begin(
        *(kind, name, travelling, process_set),
        is_list=is_list,
        results=tensors if is_inplace else None,
        op=op.value,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
    )


# --- allreduce ----------------------------------------------------------------------------------


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
    return _reduce(
        *(ALLREDUCE, [tensor], name, chosen(op, average), prescale_factor, postscale_factor),
        process_set,
        is_inplace=False,
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
    return _reduce(
        *(ALLREDUCE, [tensor], name, chosen(op, average), prescale_factor, postscale_factor),
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
    compressed, context = compression.compress(tensor)
    result: torch.Tensor = _Allreduce.apply(  # type: ignore[no-untyped-call]  # torch has no types there
        *(chosen(op, average), name, prescale_factor, postscale_factor, process_set, False),
        compressed,
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
    synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )
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
    return _reduce(
        *(ALLREDUCE, list(tensors), name, chosen(op, average), prescale_factor, postscale_factor),
        process_set,
        is_inplace=False,
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
    return _reduce(
        *(ALLREDUCE, list(tensors), name, chosen(op, average), prescale_factor, postscale_factor),
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
    pairs = [compression.compress(one) for one in tensors]
    results = _Allreduce.apply(  # type: ignore[no-untyped-call]  # torch has no types there
        *(chosen(op, average), name, prescale_factor, postscale_factor, process_set, True),
        *[one for one, _ in pairs],
    )
    return [
        compression.decompress(one, context)
        for one, (_, context) in zip(results, pairs, strict=True)
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
            _reduce(
                *(ALLREDUCE, tensors, name, op, prescale, postscale, process_set),
                is_inplace=False,
                is_list=True,
            )
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, prescale, postscale, process_set, is_list = ctx.arguments
        found = _Allreduce.apply(  # type: ignore[no-untyped-call]  # torch has no types there
            op, None, prescale, postscale, process_set, is_list, *grads
        )
        return (*[None] * 6, *found)


# --- reducescatter ------------------------------------------------------------------------------


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin :func:`reducescatter`; return its handle."""
    return _reduce(
        *(REDUCESCATTER, [tensor], name, chosen(op, None), prescale_factor, postscale_factor),
        process_set,
        is_inplace=False,
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
    return _reduce(
        *(REDUCESCATTER, list(tensors), name, chosen(op, None), prescale_factor, postscale_factor),
        process_set,
        is_inplace=False,
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

    The rows are dealt out in the order of ranks; if they cannot be dealt out evenly, the first ranks get one more.

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
    compressed, context = compression.compress(tensor)
    result: torch.Tensor = _Reducescatter.apply(  # type: ignore[no-untyped-call]  # torch has no types there
        *(chosen(op, None), name, prescale_factor, postscale_factor, process_set), compressed
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
    """Return this rank's rows of several reductions, which run as one operation; see :func:`reducescatter`."""
    pairs = [compression.compress(one) for one in tensors]
    results = _Reducescatter.apply(  # type: ignore[no-untyped-call]  # torch has no types there
        *(chosen(op, None), name, prescale_factor, postscale_factor, process_set),
        *[one for one, _ in pairs],
    )
    return [
        compression.decompress(one, context)
        for one, (_, context) in zip(results, pairs, strict=True)
    ]


class _Reducescatter(torch.autograd.Function):
    """A reducescatter through which gradients flow: they are gathered.

    As in Horovod, the gradient of a sum has the factor of the number of ranks: gradients are averaged over ranks.
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
            _reduce(
                *(REDUCESCATTER, tensors, name, op, prescale, postscale, process_set),
                is_inplace=False,
                is_list=True,
            )
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.arguments
        factor = prescale * postscale * (process_set.size() if op == Sum else 1)
        scaled = [one * factor for one in grads]
        found = synchronize(begin(ALLGATHER, None, scaled, process_set, is_list=True))
        return (*[None] * 5, *found)


# --- sparse -------------------------------------------------------------------------------------


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
                *(indices.t(), mean, self._tensor.shape), check_invariants=False
            )
        return self._result


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: ReduceOp,
    process_set: ProcessSet = global_process_set,
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
