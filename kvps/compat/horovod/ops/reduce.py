"""Reductions: allreduce and reducescatter, of one tensor or of a group.

Horovod has each of them in up to eight functions, which differ in whether they wait, write into what they are
given, and take one tensor or several. The arguments that follow the tensors are declared once here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec

import torch
from torch import Tensor

from kvps.compat.horovod.compression import Compression, Compressor, checked
from kvps.compat.horovod.engine.execution import scale
from kvps.compat.horovod.negotiation.request import ALLGATHER, ALLREDUCE, REDUCESCATTER
from kvps.compat.horovod.ops.handles import begin, demand_tensors, refuse, synchronize
from kvps.compat.horovod.process_sets import ProcessSet, global_process_set
from kvps.compat.horovod.reductions import Adasum, Average, ReduceOp, Sum, chosen

P = ParamSpec("P")
Tensors = Sequence[Tensor]


class Reduction(NamedTuple):
    """How the tensors of the ranks are reduced."""

    kind: str
    """``allreduce`` or ``reducescatter``."""
    name: str | None
    op: ReduceOp
    prescale: float
    postscale: float
    process_set: ProcessSet


def _begin(how: Reduction, tensors: Tensors, *, is_list: bool = True, is_inplace: bool = False) -> int:
    """Begin an allreduce or a reducescatter, after checks; return its handle."""
    kind, name, op, process_set = how.kind, how.name, how.op, how.process_set
    demand_tensors(kind, name, tensors, process_set)
    if kind == REDUCESCATTER and op not in (Sum, Average):
        text = f"reducescatter: op={op.name} is not supported; use hvd.Sum or hvd.Average"
        raise refuse(kind, name, process_set, text)
    if op == Adasum and not all(tensor.is_floating_point() for tensor in tensors):
        raise refuse(kind, name, process_set, "Adasum needs floating-point tensors")
    travelling = [tensor.detach() if is_inplace else tensor.detach().clone() for tensor in tensors]
    for tensor in travelling:
        scale(tensor, float(how.prescale))
    factors = {"prescale": float(how.prescale), "postscale": float(how.postscale)}
    results = tensors if is_inplace else None
    return begin(
        kind, name, travelling, process_set, is_list=is_list, results=results, op=op.value, **factors
    )


class _Family(Generic[P]):
    """The functions of one reduction that take the same arguments after the tensors.

    Args:
        describe: returns the reduction that these arguments stand for.
    """

    def __init__(self, describe: Callable[P, Reduction]) -> None:
        self._describe = describe

    def begin(self, tensor: Tensor, *args: P.args, **kwargs: P.kwargs) -> int:
        """Begin the reduction of a tensor; return its handle."""
        return _begin(self._describe(*args, **kwargs), [tensor], is_list=False)

    def begin_group(self, tensors: Tensors, *args: P.args, **kwargs: P.kwargs) -> int:
        """Begin the reductions of several tensors, which run as one operation; return its handle."""
        return _begin(self._describe(*args, **kwargs), list(tensors))

    def begin_inplace(self, tensor: Tensor, *args: P.args, **kwargs: P.kwargs) -> int:
        """Begin to replace a tensor by its reduction; return the handle."""
        return _begin(self._describe(*args, **kwargs), [tensor], is_list=False, is_inplace=True)

    def begin_group_inplace(self, tensors: Tensors, *args: P.args, **kwargs: P.kwargs) -> int:
        """Begin to replace several tensors by their reductions; return the handle."""
        return _begin(self._describe(*args, **kwargs), list(tensors), is_inplace=True)

    def inplace(self, tensor: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        """Replace a tensor by its reduction over the ranks, and return it."""
        synchronize(self.begin_inplace(tensor, *args, **kwargs))
        return tensor

    def group_inplace(self, tensors: Tensors, *args: P.args, **kwargs: P.kwargs) -> Tensors:
        """Replace several tensors by their reductions over the ranks, and return them."""
        synchronize(self.begin_group_inplace(tensors, *args, **kwargs))
        return tensors


def _reduced(how: Reduction, tensors: Tensors, compression: type[Compressor]) -> list[Tensor]:
    """Return the reductions of tensors, through which gradients flow."""
    pairs = [checked(compression).compress(tensor) for tensor in tensors]
    results = _Reduced.apply(how, *[tensor for tensor, _ in pairs])  # type: ignore[no-untyped-call]  # torch has no types there
    return [
        compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)
    ]


def of_one(
    several: Callable[Concatenate[Tensors, P], list[Tensor]],
) -> Callable[Concatenate[Tensor, P], Tensor]:
    """Return the function that does for one tensor what ``several`` does for a group."""

    def one(tensor: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        return several([tensor], *args, **kwargs)[0]

    one.__doc__ = several.__doc__
    return one  # type: ignore[return-value]  # Concatenate has no names, by which scripts give the tensor


# --- allreduce ------------------------------------------------------------------------------------


def _allreduce(
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Reduction:
    return Reduction(ALLREDUCE, name, chosen(op, average), prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    *args: Any,
    **kwargs: Any,
) -> list[Tensor]:
    """Return the reductions of several tensors over the ranks, which run as one operation; gradients
    flow through them. :func:`allreduce` does so for one tensor.

    Args:
        tensors: of the same types and shapes on every rank.
        average: deprecated; use ``op``.
        name: matches the calls of the ranks; by default, the number of the call.
        compression: applied before the tensors travel.
        op: the reduction; Average by default.
        args: as in kwargs.
        kwargs: ``prescale_factor``, which multiplies the tensors before the reduction;
            ``postscale_factor``, which multiplies the results; ``process_set``, the ranks that take part.

    Raises:
        ValueError: for an argument that cannot be, or a name whose operation is not over.
        HorovodInternalError: on every rank, if the ranks do not fit together.
    """
    return _reduced(_allreduce(average, name, op, *args, **kwargs), tensors, compression)


allreduce = of_one(grouped_allreduce)
_of_allreduce = _Family(_allreduce)
allreduce_async, grouped_allreduce_async = _of_allreduce.begin, _of_allreduce.begin_group
allreduce_async_, allreduce_ = _of_allreduce.begin_inplace, _of_allreduce.inplace
grouped_allreduce_async_ = _of_allreduce.begin_group_inplace
grouped_allreduce_ = _of_allreduce.group_inplace


# --- reducescatter --------------------------------------------------------------------------------


def _reducescatter(
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Reduction:
    return Reduction(REDUCESCATTER, name, chosen(op, None), prescale_factor, postscale_factor, process_set)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    *args: Any,
    **kwargs: Any,
) -> list[Tensor]:
    """Return this rank's rows of the reductions of several tensors, which run as one operation;
    gradients flow through them. :func:`reducescatter` does so for one tensor.

    The rows are dealt out in the order of ranks; if they cannot be dealt out evenly, the first
    ranks get one more.

    Args:
        tensors: of the same types and shapes on every rank, with 1 dimension or more.
        name: matches the calls of the ranks; by default, the number of the call.
        compression: applied before the tensors travel.
        args: as in kwargs.
        kwargs: ``op``, Average or Sum; ``process_set``, the ranks that take part; ``prescale_factor``, which
            multiplies the tensors before the reduction; ``postscale_factor``, which multiplies the results.

    Raises:
        ValueError: for an argument that cannot be.
        HorovodInternalError: on every rank, if the ranks do not fit together, or for a scalar.
    """
    return _reduced(_reducescatter(name, *args, **kwargs), tensors, compression)


reducescatter = of_one(grouped_reducescatter)
_of_reducescatter = _Family(_reducescatter)
reducescatter_async, grouped_reducescatter_async = _of_reducescatter.begin, _of_reducescatter.begin_group


class _Reduced(torch.autograd.Function):
    """A reduction through which gradients flow.

    The gradients of an allreduce are reduced alike, and the gradients of a reducescatter are gathered.
    As in Horovod, the gradient of a reducescatter's sum has the factor of the number of ranks: gradients are
    averaged over ranks.
    """

    @staticmethod
    def forward(ctx: Any, how: Reduction, *tensors: Tensor) -> Any:
        ctx.how = how
        return tuple(synchronize(_begin(how, tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        how: Reduction = ctx.how
        if how.kind == ALLREDUCE:
            return None, *_Reduced.apply(how._replace(name=None), *grads)  # type: ignore[no-untyped-call]  # torch has no types there
        factor = how.prescale * how.postscale * ((how.process_set.size() or 1) if how.op == Sum else 1)
        scaled = [grad * factor for grad in grads]
        return None, *synchronize(begin(ALLGATHER, None, scaled, how.process_set, is_list=True))
