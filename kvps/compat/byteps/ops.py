"""BytePS's push_pull and its relatives, negotiated by name as Horovod's collectives are; the optimizer and
broadcasts.

DistributedOptimizer and the broadcasts are Horovod's under other signatures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

import torch

from kvps import config
from kvps.compat.horovod import functions, mpi_ops
from kvps.compat.horovod import optimizer as horovods
from kvps.compat.horovod.compression import Compression, Compressor
from kvps.compat.horovod.engine.context import current
from kvps.compat.horovod.mpi_ops import Average, Sum, local_rank, local_size, poll, rank, size, synchronize

PREFIX = "byteps."
"""The beginning of the names of operations; a declared tensor is known by the rest."""


def init(lazy: bool = True) -> None:
    """Join the job, and wait until all ranks have called.

    Args:
        lazy: accepted for BytePS's sake.

    Raises:
        NotImplementedError: with BYTEPS_ENABLE_ASYNC=1; the text names the way to train without rounds.
        HorovodInternalError: if a rank is lost meanwhile.
    """
    if config.switch("BYTEPS_ENABLE_ASYNC"):
        raise NotImplementedError(
            "BYTEPS_ENABLE_ASYNC=1: use kvps.torch.DistributedOptimizer(..., kvstore='dist_async', "
            "update_on_kvstore=True), or 'dist_ssp', which bounds the staleness"
        )
    mpi_ops.init()


def shutdown() -> None:
    """Wait until the operations of this rank are over, and leave; nothing before :func:`init`.

    Operations in flight are not lost: BytePS's own waits for all ranks, too. An operation that another
    rank does not begin within a minute fails.
    """
    engine = current().engine
    if engine is not None:
        engine.drain()
    mpi_ops.shutdown()


def suspend() -> None:
    """Leave the negotiation until :func:`resume`; every rank calls it."""
    shutdown()


def resume(num_workers: int, num_servers: int, global_rank: int = -1) -> None:
    """Go on after :func:`suspend`; every rank calls it.

    Args:
        num_workers: the number of workers of the job, which is fixed.
        num_servers: accepted for BytePS's sake: the job has its servers.
        global_rank: accepted for BytePS's sake: a rank stays.

    Raises:
        ValueError: for another number of workers.
    """
    init()
    if num_workers != size():
        raise ValueError(
            f"resume({num_workers}, {num_servers}): the job has {size()} workers, and kvps cannot change "
            "that. Start a new job from a checkpoint"
        )


def declare(name: str, **kwargs: str) -> None:
    """Do nothing but check: names need no declaration, and ranks may use them in any order.

    Args:
        name: of a tensor.
        kwargs: accepted for BytePS's sake; compression is chosen by ``compression=``.

    Raises:
        ValueError: before ``init()``, or for a name that is empty.
    """
    rank()
    if not name:
        raise ValueError("declare(): give a name")


def push_pull_async(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> int:
    """Begin :func:`push_pull`; return its handle, for :func:`poll` and :func:`synchronize`."""
    return mpi_ops.allreduce_async(tensor, name=_named(name), op=_op(average))


def push_pull_async_inplace(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> int:
    """Begin :func:`push_pull_inplace`; return its handle, for :func:`poll` and :func:`synchronize`."""
    return mpi_ops.allreduce_async_(tensor, name=_named(name), op=_op(average))


def push_pull(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: type[Compressor] = Compression.none,
) -> torch.Tensor:
    """Return the mean or sum of a tensor over the ranks; gradients flow through it.

    Args:
        tensor: of the same type and shape on every rank.
        average: whether the result is the mean.
        name: matches the calls of the ranks. Several of one name may be under way: the first
            matches the first.
        version: accepted for BytePS's sake.
        priority: accepted for BytePS's sake.
        compression: applied before the tensor travels.

    Raises:
        AssertionError: without a name.
        ValueError: for a sparse tensor.
        HorovodInternalError: on every rank, if the ranks do not fit together.

    Example:
        >>> bps.push_pull(torch.ones(2), average=False, name="hits")  # doctest: +SKIP
        tensor([2., 2.])
    """
    if name is None:
        raise AssertionError(
            "push_pull() needs a name, by which the calls of the ranks find each other: give name="
        )
    return mpi_ops.allreduce(tensor, name=_named(name), compression=compression, op=_op(average))


def push_pull_inplace(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> torch.Tensor:
    """Replace a tensor by its mean or sum over the ranks, and return it; see :func:`push_pull`."""
    synchronize(push_pull_async_inplace(tensor, average, name, version, priority))
    return tensor


def _named(name: str | None) -> str | None:
    """Return the name of an operation: the second use of a name is another than the first, which
    may be under way."""
    if name is None:
        return None
    use = next(current().numbers.setdefault(f"{PREFIX}{name}", count(1)))
    return f"{PREFIX}{name}" if use == 1 else f"{PREFIX}{name}#{use}"


def _op(average: bool) -> Any:
    return Average if average else Sum


def DistributedOptimizer(  # noqa: N802  # BytePS's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
) -> Any:
    """Return an optimizer like the given one, whose ``step()`` uses the mean of all ranks' gradients.

    Args:
        optimizer: a torch optimizer, with whose groups and state the new one goes on.
        named_parameters: ``model.named_parameters()``: different names, for each parameter of the optimizer.
        compression: of the gradients.
        backward_passes_per_step: the number of backward passes whose gradients are added up before they
            leave.

    Raises:
        ValueError: for an argument that cannot be.
    """
    return horovods.DistributedOptimizer(optimizer, named_parameters, compression, backward_passes_per_step)


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[Any], root_rank: int, prefix: str = "Parameter."
) -> None:
    """Replace tensors by the tensors of one rank.

    Args:
        params: a ``state_dict()``, pairs of name and tensor, or tensors; the same on every rank.
        root_rank: the rank that has the values.
        prefix: accepted for BytePS's sake.

    Raises:
        ValueError: for anything else.
        HorovodInternalError: on every rank, if shapes or types differ.
    """
    functions.broadcast_parameters(params, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, prefix: str = "Parameter."
) -> None:
    """Set the optimizer of every rank to the state of one rank's.

    Args:
        optimizer: any torch optimizer, also a DistributedOptimizer, over the same parameters on every rank.
        root_rank: the rank that has the state.
        prefix: accepted for BytePS's sake.

    Raises:
        ValueError: on every rank, for a state that is not data; or if the root's optimizer has other
            parameters.
    """
    functions.broadcast_optimizer_state(optimizer, root_rank)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return one rank's object on every rank; see :func:`kvps.compat.horovod.broadcast_object`."""
    return functions.broadcast_object(obj, root_rank, name)


__all__ = ["DistributedOptimizer", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
__all__ += ["declare", "init", "local_rank", "local_size", "rank", "resume", "shutdown", "size", "suspend"]
__all__ += [
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "synchronize",
]
