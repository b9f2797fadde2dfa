"""Stochastic rounding of updated rows to half types: up or down by chance, so that small steps are not lost.

An update is computed in float32. Rounded to the nearest, a step of less than half the distance to the next
number of a half type would change nothing, however often it came. Rounded by chance, it changes the row as
often as it should, and the mean is that of float32. The chance is a hash of the row and of the step of its
table: the same pushes give the same bits, on any server and after a restart.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvps.core.optim.base import State
from kvps.splitmix import Bits, mixed

_WORD = 0xD6E8FEB86659FD93
"""Distance between the states of two neighbouring words of a row."""
_PER_WORD = 4
"""Elements that one word has bits for, 16 each."""
_TINY, _SCALE = np.float32(2.0**-14), np.float32(2.0**24)
"""The smallest normal float16, and what makes whole numbers of the float16 below it."""
_DROPPED = 13
"""Bits of a float32 that a float16 lacks."""
_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]


class Rounding:
    """The chances of the rows of one update.

    Args:
        rows: 64 well mixed bits for each row, other ones in each step.
    """

    def __init__(self, rows: Bits) -> None:
        self._rows = rows

    def __getitem__(self, some: slice) -> Rounding:
        return Rounding(self._rows[some])

    def rounded(self, columns: State, like: State) -> State:
        """Return columns in the types of ``like``: of float32 [n, width] each, one row for each of mine."""
        found, word = {}, 0
        for name, column in columns.items():
            dtype = like[name].dtype
            if dtype == column.dtype:
                found[name] = column
                continue
            count, width = column.shape
            words = -(-width // _PER_WORD)
            states = np.arange(word, word + words, dtype=np.uint64) * np.uint64(_WORD)
            chances = mixed(self._rows[:, None] + states).view(np.uint16)
            word += words
            found[name] = rounded(column, dtype, chances.reshape(count, -1)[:, :width])
        return found


def rounded(values: torch.Tensor, dtype: torch.dtype, chances: Halves) -> torch.Tensor:
    """Return float32 values in a half type, each the number below or above it.

    Args:
        values: float32, contiguous.
        dtype: bfloat16 or float16.
        chances: as long; a value x between a and b becomes b where chance / 65536 is 1 - (x - a) / (b - a)
            or more.

    Example:
        >>> chances = np.array([0, 0x7FFF, 0x8000, 0xFFFF], np.uint16)
        >>> (rounded(torch.full((4,), 1 + 2**-8), torch.bfloat16, chances) - 1).tolist()
        [0.0, 0.0, 0.0078125, 0.0078125]
    """
    wide: Floats = values.numpy()
    octets = _bfloats(wide, chances) if dtype == torch.bfloat16 else _float16s(wide, chances)
    is_nan = np.isnan(wide)
    if is_nan.any():
        octets[is_nan] = _NAN[dtype]
    return torch.from_numpy(octets).view(dtype)


def _bfloats(wide: Floats, chances: Halves) -> Halves:
    bits = wide.view(np.uint32) + chances
    bits >>= np.uint32(16)
    return bits.astype(np.uint16)


def _float16s(wide: Floats, chances: Halves) -> Halves:
    chances = chances >> np.uint16(16 - _DROPPED)
    bits = wide.view(np.uint32) + chances
    bits &= np.uint32(0xFFFFFFFF << _DROPPED & 0xFFFFFFFF)
    cut = bits.view(np.float32)
    is_tiny = np.abs(wide) < _TINY
    if is_tiny.any():
        whole = wide[is_tiny] * _SCALE + chances[is_tiny] * np.float32(2.0**-_DROPPED)
        cut[is_tiny] = np.floor(whole) / _SCALE
    with np.errstate(over="ignore"):
        return cut.astype(np.float16).view(np.uint16)
