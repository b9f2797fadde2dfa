"""Staging of torch.distributed's tensors on the host, and reductions that servers lack.

A row is a flat tensor on the CPU. Where the caller's tensor is one, it is used as it is, and a result is
written there at once; else a copy stands for it, and a tensor of a GPU is copied through the CPU.

The checked arguments of a process group's methods: what torch gives, and what a collective can
do with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import numpy as np
import torch

from kvps.errors import ConfigError, Mismatch

HALF = (torch.float16, torch.bfloat16)
SPARSE = "coalesce"
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Types that torch stores and does not add; numpy does."""

Fold = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

FOLDS: dict[str, Fold] = {
    **{"SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum},
    **{"MAX": torch.maximum, "BAND": torch.bitwise_and, "BOR": torch.bitwise_or},
    "BXOR": torch.bitwise_xor,
}
"""The reductions there are: what makes one tensor of two."""
_OF_FLAGS: dict[str, Fold] = {
    **{"SUM": torch.logical_or, "MAX": torch.logical_or, "BOR": torch.logical_or},
    **{"PRODUCT": torch.logical_and, "MIN": torch.logical_and, "BAND": torch.logical_and},
    "BXOR": torch.logical_xor,
}
"""The same for bool."""
_OF_UNSIGNED: dict[str, Callable[..., np.ndarray]] = {
    **{"SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum},
    **{"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor},
}
"""The same for :data:`UNSIGNED`."""


class Staged:
    """A tensor of the caller, and the row that stands for it.

    Args:
        tensor: dense, on any device, of any strides.
        is_read: its values count; else only its room does.

    Attributes:
        row: its elements, flat and side by side on the CPU.
    """

    def __init__(self, tensor: torch.Tensor, is_read: bool = True) -> None:
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"the backend kvps needs dense tensors, got layout {tensor.layout}; use to_dense(). "
                "all_reduce takes sparse tensors (torch.sparse_coo), too, for SUM and AVG"
            )
        self._tensor = tensor.detach()
        staged = self._tensor
        fits = staged.is_cpu and staged.is_contiguous() and not staged.is_inference()
        self._is_itself = fits and not staged.is_conj() and not staged.is_neg()
        if self._is_itself:
            self.row = staged.view(-1)
        elif is_read:
            with torch.inference_mode(False), torch.no_grad():
                self.row = torch.empty(staged.shape, dtype=staged.dtype, device="cpu").copy_(staged).view(-1)
        else:
            self.row = blank(staged.numel(), staged.dtype)

    @property
    def shape(self) -> torch.Size:
        """The shape of the caller's tensor."""
        return self._tensor.shape

    def multiply(self, factor: float | torch.Tensor) -> None:
        """Multiply the row, and leave the caller's tensor as it is.

        Raises:
            ConfigError: for whole numbers.
        """
        if not self.row.is_floating_point() and not self.row.is_complex():
            raise ConfigError(f"ReduceOp.PREMUL_SUM needs fractions, got {self.row.dtype}; use SUM")
        self.row = self.row * factor
        self._is_itself = False

    def deliver(self, row: torch.Tensor | None = None) -> None:
        """Give the tensor the values of its row, or of another one."""
        given = self.row if row is None else row
        if self._is_itself and given is self.row:
            return
        tensor, values = self._tensor, given.view(self._tensor.shape)
        for dim, stride in enumerate(tensor.stride()):
            if not stride and tensor.shape[dim] > 1:  # an expanded tensor: its elements are one
                tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        with torch.inference_mode():  # where tensors of either kind may be written to
            tensor.copy_(values)


def blank(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a new row; its contents are undefined."""
    with torch.inference_mode(False):
        return torch.empty(count, dtype=dtype, device="cpu")


def padded(row: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``row`` with zeros behind it up to ``size`` elements; itself if it is so long."""
    if len(row) == size:
        return row
    longer = blank(size, row.dtype)
    longer[: len(row)] = row
    longer[len(row) :] = 0
    return longer


def octets(row: torch.Tensor) -> torch.Tensor:
    """Return the same memory as bytes."""
    return row.view(torch.uint8)


def check(name: str, dtype: torch.dtype) -> None:
    """Refuse a reduction that means nothing for elements of ``dtype``.

    Raises:
        ConfigError: naming both.
    """
    if name not in FOLDS:
        raise ConfigError(
            f"ReduceOp.{name} is not supported by the backend kvps; use one of {', '.join(FOLDS)}"
        )
    if dtype.itemsize == 1 and dtype.is_floating_point:
        raise ConfigError(
            f"reductions of {dtype} are not supported, since nothing adds such elements; reduce bfloat16 or "
            "float32. broadcast, gathers, all_to_all and messages move them as they are"
        )
    is_whole = not dtype.is_floating_point and not dtype.is_complex
    is_bitwise = name in ("BAND", "BOR", "BXOR")
    if is_bitwise and not is_whole:
        raise ConfigError(f"ReduceOp.{name} needs whole numbers or bool, got {dtype}")
    if name == "AVG" and dtype == torch.bool:
        raise ConfigError("ReduceOp.AVG needs numbers, got torch.bool; use MAX or MIN")
    if name in ("MIN", "MAX") and dtype.is_complex:
        raise ConfigError(f"ReduceOp.{name} needs an order, and {dtype} has none")
    if (reason := _obstacle(name, dtype)) is not None:
        raise ConfigError(f"ReduceOp.{name} of {dtype} is not supported: {reason}")


def check_sparse(dtype: torch.dtype) -> None:
    """Refuse sparse tensors whose elements torch cannot add up.

    Raises:
        ConfigError: naming the type.
    """
    if (reason := _obstacle(SPARSE, dtype)) is not None:
        raise ConfigError(f"sparse tensors of {dtype} are not added up: {reason}; use to_dense()")


@cache
def _obstacle(name: str, dtype: torch.dtype) -> str | None:
    """Return why torch cannot reduce elements of ``dtype``, or None.

    A reduction that failed after its values had travelled would leave its track unusable.
    """
    zeros = torch.zeros(2, dtype=dtype, device="cpu")
    try:
        if name == SPARSE:
            places = torch.zeros(1, 2, dtype=torch.int64, device="cpu")
            torch.sparse_coo_tensor(places, zeros, (1,), check_invariants=False).coalesce()
        else:
            fold(name, [zeros] * 2)
    except (RuntimeError, TypeError) as error:
        return str(error)
    return None


def fold(name: str, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the reduction of ``rows``, taken in their order.

    Half types are reduced in twice the precision and rounded once.

    Example:
        >>> fold("AVG", [torch.tensor([1.0]), torch.tensor([2.0])])
        tensor([1.5000])
    """
    dtype = rows[0].dtype
    if dtype == torch.bool:
        return reduce(_OF_FLAGS[name], rows)
    if dtype in UNSIGNED:
        values = reduce(_OF_UNSIGNED[name], [row.numpy() for row in rows])
        if name == "AVG":
            values = values // values.dtype.type(len(rows))
        return torch.from_numpy(values)
    if dtype in HALF:
        rows = [row.float() for row in rows]
    if dtype == torch.complex32:
        rows = [row.to(torch.complex64) for row in rows]
    total = reduce(FOLDS[name], rows)
    if name == "AVG":
        divide(total, len(rows))
    return total.to(dtype)


def divide(total: torch.Tensor, count: int) -> None:
    """Divide a sum in place; whole numbers are cut off at the point, as NCCL does it.

    Example:
        >>> divide(total := torch.tensor([-5, 5]), 2)
        >>> total
        tensor([-2,  2])
    """
    is_exact = total.is_floating_point() or total.is_complex()
    total.div_(count, rounding_mode=None if is_exact else "trunc")


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
