"""Packed rows of a pull: a scale and an int8 for each element, in place of elements of the table's type."""

from __future__ import annotations

import torch

SCALE_BYTES = 4
"""Bytes of a row's scale, a float32, which come before its elements."""
_MOST = 127


def packed(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [n, dim] packed, uint8 [n, 4 + dim].

    An element is off by half of 1/127 of the largest of its row at most. Of a row with an element that is not
    finite, all are NaN.

    Example:
        >>> unpacked(packed(torch.tensor([[1.0, -0.5, 0.0], [0.0, 0.0, 0.0]])), torch.float32)
        tensor([[ 1.0000, -0.5039,  0.0000],
                [ 0.0000,  0.0000,  0.0000]])
    """
    wide = rows.float()
    scales = wide.abs().amax(1, keepdim=True).div_(_MOST)
    whole = wide.div(scales).round_().nan_to_num_(0.0).clamp_(-_MOST, _MOST).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), whole.view(torch.uint8)], 1)


def unpacked(octets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return packed rows as rows [n, dim] of a type."""
    scales = octets[:, :SCALE_BYTES].reshape(-1).view(torch.float32)[:, None]
    return octets[:, SCALE_BYTES:].view(torch.int8).float().mul_(scales).to(dtype)
