"""Moves: allgather, broadcast and alltoall, of one tensor or of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvps.compat.horovod.engine.context import current
from kvps.compat.horovod.negotiation.request import ALLGATHER, ALLTOALL, BROADCAST
from kvps.compat.horovod.ops.handles import begin, demand_tensors, refuse, synchronize
from kvps.compat.horovod.ops.reduce import Tensors, grouped_allreduce, of_one
from kvps.compat.horovod.process_sets import ProcessSet
from kvps.compat.horovod.process_sets import global_process_set as WORLD  # noqa: N812, a constant here
from kvps.compat.horovod.reductions import Average

# --- allgather ----------------------------------------------------------------------------------


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = WORLD) -> int:
    """Begin :func:`allgather`; return its handle."""
    demand_tensors(ALLGATHER, name, [tensor], process_set)
    return begin(ALLGATHER, name, [tensor.detach()], process_set)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = WORLD
) -> int:
    """Begin :func:`grouped_allgather`; return its handle."""
    given = list(tensors)
    demand_tensors(ALLGATHER, name, given, process_set)
    return begin(ALLGATHER, name, [tensor.detach() for tensor in given], process_set, is_list=True)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = WORLD
) -> list[Tensor]:
    """Return several tensors of all ranks, each joined along the first dimension; they travel as one
    operation, and gradients flow through them. :func:`allgather` does so for one tensor.

    Args:
        tensors: of the same types on every rank; shapes may differ in the first dimension only.
        name: matches the calls of the ranks; by default, the number of the call.
        process_set: the ranks that take part.

    Raises:
        ValueError: for an argument that cannot be, or a name whose operation is not over.
        HorovodInternalError: on every rank, if the ranks do not fit together, or for a scalar.
    """
    return list(_Allgather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]  # torch has no types there


allgather = of_one(grouped_allgather)


class _Allgather(torch.autograd.Function):
    """An allgather through which gradients flow: each rank gets the mean of its rows' gradients."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Any:
        found = synchronize(grouped_allgather_async(tensors, name, process_set))
        ctx.process_set, ctx.rows = process_set, [len(tensor) for tensor in tensors]
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        process_set: ProcessSet = ctx.process_set
        own = [torch.tensor([rows], device="cpu") for rows in ctx.rows]
        rows = grouped_allgather(own, process_set=process_set)
        means = grouped_allreduce(list(grads), op=Average, process_set=process_set)
        place = process_set.rank() or 0
        found = [
            mean.narrow(0, int(of_ranks[:place].sum()), int(of_ranks[place]))
            for mean, of_ranks in zip(means, rows, strict=True)
        ]
        return (None, None, *found)


# --- broadcast ----------------------------------------------------------------------------------


def _broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, is_inplace: bool
) -> int:
    demand_tensors(BROADCAST, name, [tensor], process_set)
    if type(root_rank) is not int or root_rank not in process_set.ranks:
        text = f"root_rank={root_rank!r} is not in the process set {process_set.ranks}"
        raise refuse(BROADCAST, name, process_set, text)
    travelling = tensor.detach()
    if not is_inplace:
        is_root = root_rank == current().running().rank
        travelling = travelling.clone() if is_root else torch.empty_like(travelling)
    results = [tensor] if is_inplace else None
    return begin(BROADCAST, name, [travelling], process_set, results=results, root=root_rank)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD
) -> int:
    """Begin :func:`broadcast`; return its handle."""
    return _broadcast(tensor, root_rank, name, process_set, is_inplace=False)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD
) -> int:
    """Begin :func:`broadcast_`; return its handle."""
    return _broadcast(tensor, root_rank, name, process_set, is_inplace=True)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD
) -> Tensor:
    """Return the tensor of one rank; gradients flow through it.

    Args:
        tensor: of the same type and shape on every rank.
        root_rank: the rank in the job, also where ``process_set`` has fewer ranks.
        name: matches the calls of the ranks; by default, the number of the call.
        process_set: the ranks that take part.

    Raises:
        ValueError: for an argument that cannot be, or a name whose operation is not over.
        HorovodInternalError: on every rank, if the ranks do not fit together, or the root is not in the set.
    """
    result: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]  # torch has no types there
    return result


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD
) -> Tensor:
    """Replace a tensor by one rank's, and return it; see :func:`broadcast`."""
    synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


class _Broadcast(torch.autograd.Function):
    """A broadcast through which gradients flow: the root gets their mean, and the others zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mean = grouped_allreduce(list(grads), op=Average, process_set=ctx.process_set)[0]
        if ctx.root_rank != current().running().rank:
            mean = torch.zeros_like(mean)
        return mean, None, None, None


# --- alltoall -----------------------------------------------------------------------------------


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = WORLD,
) -> int:
    """Begin :func:`alltoall`; return its handle, whose result is always a pair."""
    demand_tensors(ALLTOALL, name, [tensor], process_set)
    rows, fault = _splits(tensor, splits, process_set.size() or 1)
    if fault:
        raise refuse(ALLTOALL, name, process_set, f"alltoall: {fault}")
    return begin(ALLTOALL, name, [tensor.detach()], process_set, splits=(rows,))


def _splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, count: int) -> tuple[tuple[int, ...], str]:
    """Return the rows for each of ``count`` ranks, or why there are none."""
    if splits is None:
        if len(tensor) % count:
            return (), f"{len(tensor)} rows are not divisible by {count} ranks; give splits"
        return (len(tensor) // count,) * count, ""
    try:
        given = splits if isinstance(splits, Tensor) else torch.tensor(splits, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        return (), f"splits must be whole numbers, one for each rank: {error}"
    if given.is_floating_point() or given.is_complex() or given.dim() != 1:
        found = f"{given.dtype}{list(given.shape)}"
        return (), f"splits must be whole numbers, one for each rank; got {found}"
    rows = tuple([int(count) for count in given])
    if len(rows) != count:
        return (), f"{len(rows)} splits were given for {count} ranks"
    if min(rows) < 0 or sum(rows) > len(tensor):
        return (), f"splits {list(rows)} need more rows than the {len(tensor)} of the tensor"
    return rows, ""


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = WORLD,
) -> Tensor | tuple[Tensor, Tensor]:
    """Give each rank some rows of a tensor, and return the rows that the ranks gave; gradients
    flow through it.

    Args:
        tensor: of the same type on every rank; shapes may differ in the first dimension only.
        splits: the number of rows for each rank of the set; by default, the same for all. Rows
            beyond their sum stay here.
        name: matches the calls of the ranks; by default, the number of the call.
        process_set: the ranks that take part.

    Returns:
        The rows that came, in the order of ranks; with ``splits``, also how many came from each rank (int32).

    Raises:
        ValueError: for splits that cannot be, or a name whose operation is not over; other ranks are told.
        HorovodInternalError: on every rank, if the ranks do not fit together.
    """
    rows, received = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]  # torch has no types there
    return rows if splits is None else (rows, received)


class _Alltoall(torch.autograd.Function):
    """An alltoall through which gradients flow: they go back where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        splits: Tensor | Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        rows, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.received, ctx.rows = process_set, received, len(tensor)
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = alltoall(grads[0], ctx.received, process_set=ctx.process_set)[0]
        rest = found.new_zeros((ctx.rows - len(found), *found.shape[1:]))
        return torch.cat([found, rest]), None, None, None
