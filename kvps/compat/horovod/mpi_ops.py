"""The names of ``horovod.torch.mpi_ops``, for scripts that import from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvps.compat.horovod.common.exceptions import HorovodInternalError
from kvps.compat.horovod.engine.context import current
from kvps.compat.horovod.ops.handles import barrier, join, poll, synchronize
from kvps.compat.horovod.ops.move import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from kvps.compat.horovod.ops.reduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from kvps.compat.horovod.ops.sparse import sparse_allreduce_async
from kvps.compat.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    ids_and_ranks,
    init,
    remove_process_set,
)
from kvps.compat.horovod.reductions import Adasum, Average, Max, Min, Product, Sum

T = TypeVar("T")


def shutdown() -> None:
    """Leave the negotiation. Operations that are not decided fail on every rank; so do later ones,
    until ``init()``.

    A process that ends well does this by itself.
    """
    current().shutdown()


def is_initialized() -> bool:
    """Return whether :func:`init` was called, and :func:`shutdown` was not."""
    return current().engine is not None


def rank() -> int:
    """Return the rank of this process.

    Raises:
        ValueError: before ``init()``.
    """
    return current().running().rank


def size() -> int:
    """Return the number of ranks.

    Raises:
        ValueError: before ``init()``.
    """
    return current().running().size


def local_rank() -> int:
    """Return the place of this rank among the ranks of its machine.

    Raises:
        ValueError: before ``init()``.
    """
    return current().neighbours().index(rank())


def local_size() -> int:
    """Return the number of ranks on this machine.

    Raises:
        ValueError: before ``init()``.
    """
    return len(current().neighbours())


def cross_rank() -> int:
    """Return the place of this machine among the machines that have a rank at this place.

    Raises:
        ValueError: before ``init()``.
    """
    place = local_rank()
    machines = [ranks for ranks in current().machines() if len(ranks) > place]
    return [ranks[place] for ranks in machines].index(rank())


def cross_size() -> int:
    """Return the number of machines that have a rank at this rank's place.

    Raises:
        ValueError: before ``init()``.
    """
    place = local_rank()
    return sum(len(ranks) > place for ranks in current().machines())


def is_homogeneous() -> bool:
    """Return whether every machine has as many ranks.

    Raises:
        ValueError: before ``init()``.
    """
    return len({len(ranks) for ranks in current().machines()}) == 1


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Refused: kvps records timelines of all processes at once.

    Raises:
        NotImplementedError: always; the text names the command.
    """
    raise NotImplementedError(
        f"start_timeline({file_path!r}): use the command 'kvps trace', which records all ranks and servers"
    )


def stop_timeline() -> None:
    """Refused, as :func:`start_timeline` is.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("stop_timeline(): use the command 'kvps trace'")


def mpi_threads_supported() -> bool:
    """Return True: collectives may be called from several threads.

    Raises:
        ValueError: before ``init()``.
    """
    current().running()
    return True


def _constant(answer: T, why: str) -> Callable[[], T]:
    """Return a function that asks what Horovod was built with, and always has the same answer."""

    def built() -> T:
        return answer

    built.__doc__ = f"Return {answer}: {why}"
    return built


mpi_enabled = mpi_built = _constant(False, "MPI is not used.")
gloo_enabled = gloo_built = _constant(True, "tensors travel through the CPU, as with Gloo.")
nccl_built = _constant(0, "NCCL is not used.")
ddl_built = _constant(False, "DDL is not used.")
ccl_built = _constant(False, "oneCCL is not used.")
cuda_built = rocm_built = _constant(
    False, "no collective runs on a GPU. Tensors of a GPU are copied through the CPU."
)


class _basics:  # noqa: N801  # Horovod's name; its own tests look at the process sets through it
    """The table of process sets, where Horovod's tests read it."""

    _get_process_set_ids_and_ranks = staticmethod(ids_and_ranks)


__all__ = ["Adasum", "Average", "HorovodInternalError", "Max", "Min", "ProcessSet", "Product", "Sum"]
__all__ += ["init", "is_homogeneous", "is_initialized", "shutdown", "start_timeline", "stop_timeline"]
__all__ += ["cross_rank", "cross_size", "local_rank", "local_size", "rank", "size"]
__all__ += ["add_process_set", "global_process_set", "remove_process_set"]
__all__ += ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "sparse_allreduce_async"]
__all__ += ["grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["reducescatter", "reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async"]
__all__ += ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "alltoall", "alltoall_async"]
__all__ += ["barrier", "join", "poll", "synchronize"]
__all__ += ["ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "mpi_built", "mpi_enabled"]
__all__ += ["mpi_threads_supported", "nccl_built", "rocm_built"]
