"""Broadcasts and gathers of whole things: parameters, optimizer states, and objects made of data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvps.compat.horovod.engine.context import current
from kvps.compat.horovod.ops.handles import synchronize
from kvps.compat.horovod.ops.move import allgather, broadcast_, broadcast_async_
from kvps.compat.horovod.process_sets import ProcessSet, global_process_set
from kvps.errors import ConfigError
from kvps.torch.broadcast import give_state, packed_or_text, send_packed
from kvps.torch.serialization import pack, unpack


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Replace tensors by the tensors of one rank.

    Args:
        params: a ``state_dict()``, pairs of name and tensor, or tensors; the same on every rank.
        root_rank: the rank that has the values.
        process_set: the ranks that take part.

    Raises:
        ValueError: for anything else.
        HorovodInternalError: on every rank, if shapes or types differ.
    """
    handles = []
    for index, (name, tensor) in enumerate(_named(params)):
        handles.append(
            broadcast_async_(tensor, root_rank, f"broadcast_parameters.{index}.{name}", process_set)
        )
    for handle in handles:
        synchronize(handle)


def _named(params: object) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        pairs: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | str):
        pairs = [entry if isinstance(entry, tuple) else ("", entry) for entry in params]
    else:
        raise ValueError(
            f"invalid params of type: {type(params)}; give a state_dict(), or named_parameters()"
        )
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"params: {name!r} is a {type(tensor).__name__}, not a tensor; see broadcast_object()"
            )
    return pairs


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Set the optimizer of every rank to the state of one rank's: momenta, step counts, and
    options of groups.

    States that only the root has are created on the other ranks; states that the root does not
    have are dropped. The optimizer never steps, as it does in Horovod, so no parameter changes.
    Where it has no state, each parameter that needs a gradient gets one of zeros, as there.

    Args:
        optimizer: any torch optimizer, also a DistributedOptimizer, over the same parameters on every rank.
        root_rank: the rank that has the state.
        model: accepted for Horovod's sake.
        process_set: the ranks that take part.

    Raises:
        ValueError: on every rank, for a state that is not data; or if the root's optimizer has
            other parameters.
        HorovodInternalError: if a rank is lost.
    """
    rank = current().running().rank
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer: give a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if not optimizer.state_dict()["state"]:
        _give_zeros(optimizer)
    give_state(
        optimizer,
        (rank, root_rank),
        lambda make: _sent(make, root_rank, "broadcast_optimizer_state", process_set),
        lambda tensors: broadcast_parameters(tensors, root_rank, process_set),
    )


def _give_zeros(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter without a gradient that needs one zeros."""
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and param.grad is None:
                zeros = torch.zeros_like(param)
                param.grad = zeros.to_sparse() if is_sparse else zeros


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return one rank's object on every rank.

    Args:
        obj: None, bool, int, float, complex, str, bytes, tensor or array, or list, tuple, dict,
            set of those. Unlike Horovod, kvps sends no pickle: anything else would let a rank run
            code in the others.
        root_rank: the rank that has the object.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.

    Raises:
        ValueError: on every rank, if the object has anything else in it; the text names its type and place.
        HorovodInternalError: if a rank is lost.
    """
    is_root = current().running().rank == root_rank
    key = f"broadcast_object.{name or ''}"
    packed = _sent((lambda: pack(obj)) if is_root else None, root_rank, key, process_set)
    return obj if is_root else unpack(packed)


def _sent(make: Any, root: int, name: str, process_set: ProcessSet) -> bytes:
    """Return the bytes that the root makes, on every rank; raise its error, if it makes none, on
    every rank."""
    try:
        return send_packed(make, root, lambda part, row: broadcast_(row, root, f"{name}.{part}", process_set))
    except ConfigError as error:
        raise ValueError(str(error)) from error


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks, on every rank.

    Args:
        obj: as in :func:`broadcast_object`.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.

    Raises:
        ValueError: on every rank, if an object has anything else in it; the text names the rank,
            type and place.
        HorovodInternalError: if a rank is lost.
    """
    current().running()
    packed, error = packed_or_text(lambda: pack(obj))
    key = f"allgather_object.{name or ''}"
    size = torch.tensor([-len(packed) if error is not None else len(packed)], device="cpu")
    sizes = [int(count) for count in allgather(size, f"{key}.size", process_set)]
    row = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    rows = torch.split(allgather(row, f"{key}.bytes", process_set), [abs(length_of) for length_of in sizes])
    for rank, length, encoded in zip(process_set.ranks, sizes, rows, strict=True):
        if length < 0:
            text = encoded.numpy().tobytes().decode()
            raise ValueError(f"rank {rank} cannot send its object: {text}") from error
    return [unpack(encoded.numpy().tobytes()) for encoded in rows]
