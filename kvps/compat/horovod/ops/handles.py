"""Handles of asynchronous collectives: how operations begin, and how their results are taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvps.compat.horovod.common.exceptions import HorovodInternalError, InvalidArgument
from kvps.compat.horovod.engine.context import current
from kvps.compat.horovod.engine.execution import Operation, parts_of
from kvps.compat.horovod.negotiation.request import (
    ALLGATHER,
    ALLTOALL,
    BARRIER,
    REDUCESCATTER,
    CollectiveRequest,
)
from kvps.compat.horovod.process_sets import ProcessSet, global_process_set

REFUSED_MAX_S = 0.5
"""Seconds that a refusal waits for the others to have heard of it. Then its name is free for the
next call."""


def begin(
    kind: str,
    name: str | None,
    tensors: Sequence[torch.Tensor],
    process_set: ProcessSet,
    *,
    is_list: bool = False,
    results: Sequence[torch.Tensor] | None = None,
    **more: Any,
) -> int:
    """Request a collective; return its handle.

    Args:
        kind: of the operation.
        name: of the operation; None for the next number of this kind.
        tensors: dense tensors, which stay unchanged until the operation is over, or hold its result.
        process_set: the ranks that take part.
        is_list: whether the result is a list.
        results: returned in place of ``tensors``, whose memory they share.
        more: the other fields of the request.

    Raises:
        ValueError: before ``init()``; for a sparse tensor, a process set that is not registered,
            or a name whose operation is not over.
        HorovodInternalError: if the engine has failed.
    """
    mine = current()
    rank = mine.running().rank
    demand_set(process_set)
    number = process_set.process_set_id
    if number is None:
        raise ValueError(f"{process_set} is not registered; give it to hvd.init() or hvd.add_process_set()")
    if not process_set.included():
        raise ValueError(f"{kind}: rank {rank} is not in {process_set}; see included()")
    request = CollectiveRequest(mine.name(name, kind), kind, number, parts_of(tensors), **more)
    return mine.submit(Operation(request, tensors, is_list, results))


def demand_set(process_set: object) -> None:
    """Refuse anything but a process set; which ranks to tell is unknown then.

    Raises:
        InvalidArgument: naming its type.
    """
    if not isinstance(process_set, ProcessSet):
        given = type(process_set).__name__
        raise InvalidArgument(f"process_set: give a hvd.ProcessSet, got {given}")


def refuse(kind: str, name: str | None, process_set: ProcessSet, text: str) -> InvalidArgument:
    """Tell the other ranks that this one refuses its own call, so that they do not wait; return the error."""
    error = InvalidArgument(text)
    mine = current()
    number = process_set.process_set_id
    if mine.engine is not None and number is not None and process_set.included():
        request = CollectiveRequest(mine.name(name, kind), kind, number, fault=text)
        operation = Operation(request)
        try:
            mine.running().submit(operation)
        except (ValueError, HorovodInternalError):
            return error  # the name is in use, or nobody waits any more
        operation.wait_for(REFUSED_MAX_S)
    return error


def demand_tensors(kind: str, name: str | None, tensors: Sequence[Any], process_set: ProcessSet) -> None:
    """Check that all are dense tensors, and have rows if the operation needs them.

    Raises:
        InvalidArgument: naming the first that is not; the other ranks are told.
    """
    current().running()
    demand_set(process_set)
    if wrong := [type(tensor).__name__ for tensor in tensors if not isinstance(tensor, torch.Tensor)]:
        raise refuse(kind, name, process_set, f"{kind} needs a torch.Tensor, got {wrong[0]}")
    if any(tensor.is_meta for tensor in tensors):
        text = f"{kind}: a tensor on the device meta has no values to send"
        raise refuse(kind, name, process_set, text)
    sparse = next((tensor for tensor in tensors if tensor.layout is not torch.strided), None)
    if sparse is not None:
        text = (
            f"{kind}: Tensor is required to be dense, got layout {sparse.layout}; use to_dense(), or "
            "sparse_allreduce_async()"
        )
        raise refuse(kind, name, process_set, text)
    if not tensors:
        raise refuse(kind, name, process_set, f"{kind}: give one tensor or more")
    if kind in (ALLGATHER, ALLTOALL, REDUCESCATTER) and any(not tensor.dim() for tensor in tensors):
        text = f"{kind} needs tensors with 1 dimension or more, got a scalar"
        raise refuse(kind, name, process_set, text)


def poll(handle: int | Callable[[], Any]) -> bool:
    """Return whether an operation is over; :func:`synchronize` then returns at once.

    Args:
        handle: of an asynchronous collective.

    Raises:
        ValueError: for a handle that was not made here, or whose result was taken.
    """
    if callable(handle):
        return bool(getattr(handle, "is_over")())  # noqa: B009  # a sparse handle has it
    return current().poll(handle)


def synchronize(handle: int | Callable[[], Any]) -> Any:
    """Wait for an operation; return its result, or None if the result was taken before.

    Args:
        handle: of an asynchronous collective.

    Raises:
        HorovodInternalError: if it failed; the text says why, on every rank.
    """
    return handle() if callable(handle) else current().synchronize(handle)


def join(device: int = -1) -> int:
    """Take part with zeros in the allreduces of the other ranks, until every rank has joined.

    Args:
        device: accepted for Horovod's sake.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: if a rank is lost.
    """
    last = current().running().join()
    assert isinstance(last, int)
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of a process set has called.

    Raises:
        HorovodInternalError: if a rank is lost.
    """
    synchronize(begin(BARRIER, None, [], process_set))
