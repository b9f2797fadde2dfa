"""The checked arguments of a process group's methods: what torch gives, and what a collective can
do with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvps.errors import ConfigError, Mismatch
from kvps.torch.distributed.host_tensor import Staged


def single(what: str, tensors: Sequence[Any]) -> Sequence[Any]:
    """Return a list of one tensor, or one list, as it is.

    Raises:
        ConfigError: for a list of any other length.
    """
    if len(tensors) != 1:
        raise ConfigError(
            f"{what}: {len(tensors)} tensors were given; the backend kvps takes a single tensor"
        )
    return tensors


def demand_same(what: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Refuse two tensors of different sizes or types.

    Raises:
        Mismatch: naming both.
    """
    if not is_same(tensor, other):
        raise Mismatch(f"{what}: {shape_of(tensor)} and {shape_of(other)} must have the same size and type")


def is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same size and type."""
    return tensor.numel() == other.numel() and tensor.dtype == other.dtype


def shape_of(tensor: torch.Tensor) -> str:
    """Return the type and shape of a tensor, as errors name them."""
    return f"{tensor.dtype}{list(tensor.shape)}"


def op_of(opts: Any) -> str:
    """Return the name of the reduction that was asked for."""
    return "SUM" if opts is None else str(opts.reduceOp.op.name)


def reduction_of(opts: Any, staged: Sequence[Staged]) -> str:
    """Return the reduction to be made of staged tensors, which are multiplied here for a PREMUL_SUM.

    Raises:
        ConfigError: for a PREMUL_SUM of whole numbers.
    """
    name = op_of(opts)
    if name != "PREMUL_SUM":
        return name
    _, factor = opts.reduceOp.__getstate__()  # torch has no other door to it
    for tensor in staged:
        tensor.multiply(factor)
    return "SUM"


def root_of(what: str, opts: Any, size: int) -> int:
    """Return the root that was asked for, as a rank of the group.

    Raises:
        ConfigError: if the group has no such rank.
    """
    root = 0 if opts is None else int(opts.rootRank)
    demand_rank(what, root, size)
    return root


def demand_rank(what: str, rank: int, size: int) -> None:
    """Refuse a rank that the group does not have.

    Raises:
        ConfigError: naming it.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"{what}: the group has no rank {rank}, only 0 to {size - 1}")
