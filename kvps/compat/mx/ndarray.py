"""Arrays by MXNet's names: torch tensors that also have ``asnumpy`` and its siblings.

An :class:`NDArray` is a torch tensor: all of torch works on it, and results are NDArrays, too. A
store takes it as the tensor that it is. ``size`` and ``dtype`` are torch's: ``array.numel()`` is
the number of elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from kvps.compat.mx.elsewhere import missing
from kvps.errors import ConfigError
from kvps.runtime.device import settle_all

DType: TypeAlias = "str | type | np.dtype[Any] | torch.dtype"
Shape: TypeAlias = "int | Sequence[int]"
_METHODS = {
    "as_in_ctx": "use as_in_context(device)",
    "as_nd_ndarray": "it is one",
    "as_np_ndarray": "use asnumpy()",
    "attach_grad": "use requires_grad_(); torch adds to .grad, MXNet wrote it",
    "broadcast_to": "use expand(shape)",
    "stype": "dense tensors are dense; torch.sparse_coo_tensor makes the others",
    "tostype": "use to_sparse(1), or mx.nd.sparse.row_sparse_array",
    "handle": "there is no C API",
}
_FUNCTIONS = {
    "concat": "use torch.cat",
    "dot": "use torch.matmul",
    "load": "use torch.load, or safetensors",
    "save": "use torch.save, or safetensors",
    "stack": "use torch.stack",
    "random": "use torch.manual_seed and torch.rand",
}


class NDArray(torch.Tensor):
    """A torch tensor with the methods of MXNet's NDArray that scripts of a store use.

    Example:
        >>> import kvps.compat.mx as mx
        >>> array = mx.nd.array([[1, 2], [3, 4]])
        >>> (array + 1).asnumpy().tolist(), array.context, array.sum().asscalar()
        ([[2.0, 3.0], [4.0, 5.0]], device(type='cpu'), 10.0)
    """

    @property
    def context(self) -> torch.device:
        """The device."""
        return self.device

    @property
    def ctx(self) -> torch.device:
        """The device."""
        return self.device

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """Return a copy as a numpy array."""
        return np.array(plain(self).cpu().numpy())

    def asscalar(self) -> float | int | bool:
        """Return the only element.

        Raises:
            ValueError: if there are several.
        """
        if self.numel() != 1:
            raise ValueError(f"an array of shape {tuple(self.shape)} is no scalar")
        return self.item()

    def copyto(self, other: torch.Tensor | torch.device) -> torch.Tensor:
        """Copy into an array, or onto a device; return the copy."""
        if isinstance(other, torch.device):
            return _wrap(plain(self).to(other, copy=True))
        plain(other).copy_(plain(self))
        return other

    def copy(self) -> NDArray:
        """Return a copy."""
        return _wrap(plain(self).clone())

    def as_in_context(self, context: torch.device) -> NDArray:
        """Return the array on a device: itself if it is there."""
        return self if self.device == context else _wrap(plain(self).to(context))

    def astype(self, dtype: DType, copy: bool = True) -> NDArray:
        """Return the array with another element type, as a torch type, a numpy type or its name."""
        return _wrap(plain(self).to(_dtype(dtype), copy=copy))

    def wait_to_read(self) -> None:
        """Do nothing: calls of a store have written their outputs when they return."""

    def wait_to_write(self) -> None:
        """Do nothing, as :meth:`wait_to_read`."""

    def new_empty(self, *args: Any, **kwargs: Any) -> NDArray:  # copy.deepcopy makes its copy by it
        """Return an uninitialised array, as ``torch.Tensor.new_empty`` does."""
        return _wrap(super().new_empty(*args, **kwargs))

    def __getattr__(self, name: str) -> object:
        if name in _METHODS:
            raise missing("NDArray", name, _METHODS)
        raise AttributeError(f"an NDArray has no attribute {name!r}, and neither has torch.Tensor")


def plain(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor that an array is: the same memory, without its history of gradients."""
    return torch.Tensor.as_subclass(value.detach(), torch.Tensor)


def array(source_array: object, ctx: torch.device | None = None, dtype: DType | None = None) -> NDArray:
    """Return a new array.

    Args:
        source_array: a tensor, an array, or nested lists of numbers.
        ctx: where; None is the CPU.
        dtype: the element type; None is the tensor's, and float32 for anything else, as in MXNet.

    Example:
        >>> import numpy as np, kvps.compat.mx as mx
        >>> mx.nd.array(np.arange(3)).dtype
        torch.float32
    """
    if isinstance(source_array, torch.Tensor):
        given = plain(source_array)
        wanted = given.dtype if dtype is None else _dtype(dtype)
    else:
        given = torch.from_numpy(np.array(source_array))
        wanted = torch.float32 if dtype is None else _dtype(dtype)
    return _wrap(given.to(device=ctx or torch.device("cpu"), dtype=wanted, copy=True))


def full(shape: Shape, val: float, ctx: torch.device | None = None, dtype: DType = "float32") -> NDArray:
    """Return a new array, each element ``val``."""
    sizes = _sizes(shape)
    return _wrap(torch.full(sizes, val, dtype=_dtype(dtype), device=ctx or "cpu"))


def ones(shape: Shape, ctx: torch.device | None = None, dtype: DType | None = None) -> NDArray:
    """Return a new array of ones; float32 without ``dtype``."""
    return full(shape, 1, ctx, "float32" if dtype is None else dtype)


def zeros(
    shape: Shape, ctx: torch.device | None = None, dtype: DType | None = None, stype: str = "default"
) -> NDArray:
    """Return a new array of zeros; float32 without ``dtype``.

    Raises:
        ConfigError: for a sparse ``stype``; pulled rows are written into a dense array.
    """
    if stype != "default":
        raise ConfigError(
            f"stype={stype!r}: a store keeps dense keys, and row_sparse_pull writes rows into a dense array; "
            "leave stype out. mx.nd.sparse.row_sparse_array makes rows to push"
        )
    return full(shape, 0, ctx, "float32" if dtype is None else dtype)


def empty(shape: Shape, ctx: torch.device | None = None, dtype: DType | None = None) -> NDArray:
    """Return a new array that is not initialised; float32 without ``dtype``."""
    wanted = _dtype("float32" if dtype is None else dtype)
    return _wrap(torch.empty(_sizes(shape), dtype=wanted, device=ctx or "cpu"))


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1.0,
    repeat: int = 1,
    ctx: torch.device | None = None,
    dtype: DType = "float32",
) -> NDArray:
    """Return evenly spaced numbers, each ``repeat`` times."""
    begin, end = (0, start) if stop is None else (start, stop)
    numbers = torch.arange(begin, end, step, dtype=_dtype(dtype), device=ctx or "cpu")
    return _wrap(numbers.repeat_interleave(repeat))


def zeros_like(data: torch.Tensor) -> NDArray:
    """Return zeros of the shape, the type and the device of ``data``."""
    return _wrap(torch.zeros_like(plain(data)))


def ones_like(data: torch.Tensor) -> NDArray:
    """Return ones of the shape, the type and the device of ``data``."""
    return _wrap(torch.ones_like(plain(data)))


def waitall() -> None:
    """Wait for the kernels that are queued on GPUs; calls of a store need no waiting."""
    settle_all()


class sparse:  # noqa: N801  (the name of a module of MXNet)
    """The part of ``mx.nd.sparse`` that makes rows to push."""

    @staticmethod
    def row_sparse_array(
        arg1: tuple[object, object],
        shape: Sequence[int],
        ctx: torch.device | None = None,
        dtype: DType | None = None,
    ) -> torch.Tensor:
        """Return rows of a key as a ``torch.sparse_coo`` tensor.

        Args:
            arg1: the rows, and their numbers.
            shape: the shape of the key.
            ctx: where; None is the CPU.
            dtype: the element type; as for :func:`array`.

        Example:
            >>> import torch, kvps.compat.mx as mx
            >>> rows = mx.nd.sparse.row_sparse_array((mx.nd.ones((1, 2)), [3]), shape=(5, 2))
            >>> rows.to_dense()[3].tolist()
            [1.0, 1.0]
        """
        data, indices = arg1
        rows = plain(array(data, ctx, dtype))
        ids = plain(array(indices, ctx, "int64"))
        return torch.sparse_coo_tensor(ids[None], rows, tuple(shape), check_invariants=True)


def _wrap(tensor: torch.Tensor) -> NDArray:
    return tensor.as_subclass(NDArray)


def _sizes(shape: Shape) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _dtype(dtype: DType) -> torch.dtype:
    """Return the torch type that ``dtype`` names.

    Raises:
        ConfigError: if torch has none.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={dtype!r}: torch has no such element type")
    return found


def __getattr__(name: str) -> object:
    raise missing("mx.nd", name, _FUNCTIONS)
