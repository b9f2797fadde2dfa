"""Element types and shape limits of tensors.

A peer never names an element type by text that something here would interpret; it names a row
of :data:`DTYPES`. Sizes are computed in Python integers, so that no product can wrap, and a
shape is checked before anything of its size is allocated. This file knows neither torch nor
numpy: the scheduler and the wire import it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvps.errors import Mismatch

NDIM_MAX = 16
DIM_MAX = 2**40
BYTES_MAX = 2**42
"""Limits of one tensor: dimensions, elements along one of them, bytes in all (4 TiB)."""


@dataclass(frozen=True, slots=True)
class DType:
    """One element type: its number on the wire, its name (torch's and numpy's), its size."""

    id: int
    name: str
    itemsize: int
    kind: str
    """``"half"`` (summed in float32), ``"float"`` or ``"int"``."""


DTYPES: tuple[DType, ...] = (
    DType(1, "float32", 4, "float"),
    DType(2, "float64", 8, "float"),
    DType(3, "float16", 2, "half"),
    DType(4, "bfloat16", 2, "half"),
    DType(5, "int8", 1, "int"),
    DType(6, "int16", 2, "int"),
    DType(7, "int32", 4, "int"),
    DType(8, "int64", 8, "int"),
    DType(9, "uint8", 1, "int"),
)
BY_ID = {dtype.id: dtype for dtype in DTYPES}
BY_NAME = {dtype.name: dtype for dtype in DTYPES}


def summed_in(dtype: str) -> str:
    """Return the name of the type in which elements of type ``dtype`` are added up.

    Example:
        >>> summed_in("bfloat16"), summed_in("int8")
        ('float32', 'int8')
    """
    return "float32" if BY_NAME[dtype].kind == "half" else dtype


@dataclass(frozen=True, slots=True)
class Spec:
    """The type and shape of one tensor.

    Example:
        >>> Spec("float32", (2, 3)).count
        6
    """

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in BY_NAME:
            raise Mismatch(f"element type {self.dtype} is not supported; use one of {', '.join(BY_NAME)}")
        if len(self.shape) > NDIM_MAX or not all(0 <= dim <= DIM_MAX for dim in self.shape):
            raise Mismatch(
                f"shape {self.shape!s:.99} is outside the limits: at most {NDIM_MAX} dimensions of "
                f"0 to {DIM_MAX} elements"
            )
        if self.nbytes > BYTES_MAX:
            raise Mismatch(f"shape {self.shape} of {self.dtype} is over {BYTES_MAX} bytes")

    @property
    def count(self) -> int:
        """Number of elements (1 for a scalar, which has no dimensions)."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Elements of a row, which is what one index of the first dimension holds.

        It is 1 for a tensor that has no rows: of fewer than two dimensions, or without elements.
        """
        return math.prod(self.shape[1:]) or 1

    @property
    def nbytes(self) -> int:
        """Bytes of all elements laid side by side."""
        return self.count * BY_NAME[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"
