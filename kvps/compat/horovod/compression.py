"""Compression of gradients before they travel, as Horovod has it: none, or half precision."""

from __future__ import annotations

from typing import Any

import torch

from kvps.compat.horovod.common.exceptions import InvalidArgument


class Compressor:
    """A pair of functions around a reduction; derive from it for a compression of your own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor that travels, and what :meth:`decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the reduced tensor in its first type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors travel in float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor in float16, and its own type."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in the type that it had."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


def checked(compression: Any) -> Any:
    """Return a compression that has both functions.

    Raises:
        InvalidArgument: for anything else.
    """
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise InvalidArgument(
            f"compression={compression!r}: give hvd.Compression.none or fp16, or a class with "
            "compress() and decompress()"
        )
    return compression


class Compression:
    """The compressions for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
