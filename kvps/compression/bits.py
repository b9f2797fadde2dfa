"""Bytes as numbers of other types, and small numbers packed into bytes."""

from __future__ import annotations

import torch


def typed(octets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as numbers; a copy if they lie where such numbers may not."""
    is_aligned = octets.data_ptr() % dtype.itemsize == 0 and (
        octets.storage_offset() % dtype.itemsize == 0
    )
    return (octets if is_aligned else octets.clone()).view(dtype)


def store(out: torch.Tensor, numbers: torch.Tensor) -> None:
    """Write the bytes of ``numbers`` to ``out``, unless they are there."""
    if out.data_ptr() != numbers.data_ptr():
        out.copy_(numbers.contiguous().view(torch.uint8))


def packed_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """Return numbers below 16 as bytes: two to a byte, the first in the upper half, along the last dimension.

    Example:
        >>> packed_nibbles(torch.tensor([1, 2, 3])).tolist()
        [18, 48]
    """
    padded = torch.nn.functional.pad(nibbles.to(torch.uint8), (0, nibbles.shape[-1] % 2))
    return (padded[..., ::2] << 4) | padded[..., 1::2]


def nibbles_of(octets: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first ``count`` numbers that :func:`packed_nibbles` has packed, along the last dimension."""
    pairs = torch.stack((octets >> 4, octets & 15), dim=-1)
    return pairs.flatten(-2)[..., :count]
