"""BytePS's DistributedOptimizer and broadcasts, which are Horovod's under other signatures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvps.compat.horovod import functions
from kvps.compat.horovod import optimizer as horovods
from kvps.compat.horovod.compression import Compression, Compressor


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
        backward_passes_per_step: the number of backward passes whose gradients are added up before they leave.

    Raises:
        ValueError: for an argument that cannot be.
    """
    return horovods.DistributedOptimizer(
        optimizer, named_parameters, compression, backward_passes_per_step
    )


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[Any], root_rank: int, prefix: str = "Parameter."
) -> None:
    """Replace tensors by those of one rank.

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
        ValueError: on every rank, for a state that is not data; or if the root's optimizer has other parameters.
    """
    functions.broadcast_optimizer_state(optimizer, root_rank)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return one rank's object on every rank; see :func:`kvps.compat.horovod.broadcast_object`."""
    return functions.broadcast_object(obj, root_rank, name)
