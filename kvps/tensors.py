"""Tensors and frames: torch and numpy arrays as flat tensors, and as bytes on the wire.

Everything inside kvps is a flat, contiguous torch tensor on the CPU. A frame is a view of one
(never a copy), and the other way round; half types are summed in float32. New tensors that others
will read come from a :class:`Memory`, which knows what others can read without a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvps.dtypes import BY_NAME, DTYPES, DType, Spec
from kvps.errors import Mismatch

Array: TypeAlias = "torch.Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]"
"""A value from the user: a torch tensor on any device, or a numpy array."""

TORCH: dict[str, torch.dtype] = {dtype.name: getattr(torch, dtype.name) for dtype in DTYPES}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH.items()}


SMALL_BYTES = 256 << 10
"""Bytes up to which values are copied and added up without torch: with cold caches its first function takes
some 50 us, and each other 20."""


def dtype_of(tensor: torch.Tensor) -> DType:
    """Return the row of the dtype table for ``tensor``."""
    return BY_NAME[NAMES[tensor.dtype]]


def as_tensor(value: Array) -> torch.Tensor:
    """Return ``value`` as a tensor that shares its memory, wherever it lives.

    Raises:
        Mismatch: for anything but a dense tensor or array of a supported element type.
    """
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            raise Mismatch(f"expected a dense tensor, got {_kind_of(value)}")
        tensor = value.detach()
    elif isinstance(value, np.ndarray):
        if value.dtype.name not in BY_NAME or value.dtype.isbuiltin != 1:
            raise Mismatch(f"element type {value.dtype} is not supported; use one of {', '.join(BY_NAME)}")
        # torch has no read-only tensors, and strides only in whole elements, forwards.
        plain = value.flags.behaved and all(
            stride >= 0 and stride % value.itemsize == 0 for stride in value.strides
        )
        tensor = torch.from_numpy(value if plain else value.copy())
    else:
        raise Mismatch(
            f"expected a torch.Tensor or a numpy.ndarray, got {type(value).__name__}; "
            "wrap it with torch.as_tensor(...)"
        )
    if tensor.dtype not in NAMES:
        raise Mismatch(f"element type {tensor.dtype} is not supported; use one of {', '.join(BY_NAME)}")
    return tensor


def ids_of(ids: object, what: str = "ids") -> torch.Tensor:
    """Return ids, or ``what`` else, as a tensor of int64.

    Raises:
        Mismatch: if they are not 64-bit integers.
    """
    if isinstance(ids, torch.Tensor):
        tensor = ids.detach()
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            raise Mismatch(f"{what} are a dense tensor with values, got {_kind_of(tensor)}")
    else:
        try:
            array = np.asarray(ids)
            if array.dtype == np.float64 and not isinstance(ids, np.ndarray):
                array = _unsigned(ids, array)
            if array.dtype == np.uint64:
                array = array.view(np.int64)
            tensor = torch.from_numpy(array.astype(np.int64) if array.size == 0 else array.copy())
        except (TypeError, ValueError, OverflowError) as error:
            raise Mismatch(f"{what} are whole numbers of 64 bits, got {ids!r:.60}: {error}") from error
    if tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized or tensor.dtype == torch.bool:
        raise Mismatch(f"{what} are whole numbers, got {tensor.dtype}")
    return tensor.to(torch.int64)


def _kind_of(tensor: torch.Tensor) -> str:
    return "a nested tensor" if tensor.is_nested else f"{tensor.layout} on {tensor.device}"


def _unsigned(ids: object, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return unsigned ids in lists, some of them above 2**63, of which numpy makes floats; or ``array``."""
    objects = np.asarray(ids, dtype=object)
    return array if any(type(each) is not int for each in objects.flat) else objects.astype(np.uint64)


def spec_of(value: Array) -> Spec:
    """Return the type and shape of ``value``."""
    tensor = as_tensor(value)
    return Spec(NAMES[tensor.dtype], tuple(tensor.shape))


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` side by side in this machine's memory; a copy if it must be."""
    return tensor.cpu().contiguous()


def accumulator(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in the type its sum is taken in: float32 for half types, else its own."""
    return tensor.float() if dtype_of(tensor).kind == "half" else tensor


def keep_frame(tensor: torch.Tensor, frame: memoryview) -> None:
    """Have :func:`to_frame` find the bytes of a tensor that nobody but kvps refers to.

    Views of the tensor have no frame of their own, and users get only views.
    """
    tensor._kvps_frame = frame  # type: ignore[attr-defined]


def to_frame(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a flat tensor, uncopied."""
    frame: memoryview | None = getattr(tensor, "_kvps_frame", None)
    return tensor.view(torch.uint8).numpy().data if frame is None else frame


def from_frame(frame: memoryview, dtype: str) -> torch.Tensor:
    """Return the numbers in ``frame`` as a flat tensor, uncopied where memory allows it.

    It must not be written to: it may be another process's memory.
    """
    if not frame.nbytes:
        return torch.empty(0, dtype=TORCH[dtype], device="cpu")
    if frame.readonly:
        frame = memoryview(bytearray(frame))
    tensor = torch.frombuffer(frame, dtype=TORCH[dtype])
    # A small frame may begin at any address (it shares a buffer with its message's head).
    return tensor if tensor.data_ptr() % BY_NAME[dtype].itemsize == 0 else tensor.clone()


def at_address(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``count`` elements that begin at an address, which is not checked, as a flat tensor.

    The caller owns their memory, and reads and writes no element that is not its own.
    """
    return torch.frombuffer((ctypes.c_ubyte * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def by_row(rows: torch.Tensor) -> npt.NDArray[np.void]:
    """Return rows [n, dim] as an item each: numpy scatters these two to four times as fast as torch rows.

    It shows their memory, if they are contiguous.
    """
    octets = rows.detach().contiguous().view(torch.uint8).numpy()
    return octets.view(f"V{octets.shape[1]}")[:, 0]


class Memory(Protocol):
    """Where tensors come from whose values others will read."""

    def empty(self, count: int, dtype: str) -> torch.Tensor:
        """Return a flat tensor whose contents are undefined."""

    def lends(self, route: str | bytes, pieces: Sequence[torch.Tensor]) -> bool:
        """Whether the peer along ``route`` would read ``pieces`` where they lie."""

    def side_by_side(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return values that were lent here as one tensor without a copy; None if that fails."""


class Private:
    """This process's own memory: values that others are to read must be copied to them."""

    def empty(self, count: int, dtype: str) -> torch.Tensor:
        """Return a flat tensor whose contents are undefined."""
        size_bytes = count * BY_NAME[dtype].itemsize
        if not 0 < size_bytes <= SMALL_BYTES:
            return torch.empty(count, dtype=TORCH[dtype], device="cpu")
        octets = bytearray(size_bytes)
        tensor = torch.frombuffer(octets, dtype=TORCH[dtype])
        keep_frame(tensor, memoryview(octets))
        return tensor

    def lends(self, route: str | bytes, pieces: Sequence[torch.Tensor]) -> bool:
        """Nobody else can read anything here."""
        return False

    def side_by_side(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Nobody lends anything here."""
        return None


PRIVATE = Private()
