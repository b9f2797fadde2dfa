"""BytePS's CrossBarrier: the next forward pass begins before the last updates are in."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvps.torch.optimizer import DistributedOptimizer


def CrossBarrier(  # noqa: N802  # BytePS's name
    model: torch.nn.Module,
    byteps_opt: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    num_steps: int = 10**6,
) -> DistributedOptimizer:
    """Return kvps's own optimizer with ``overlap_forward``, for any torch optimizer.

    Args:
        model: the module whose forward passes are overlapped.
        byteps_opt: a torch optimizer, which is not a DistributedOptimizer yet.
        named_parameters: accepted for BytePS's sake: the names are the model's.
        num_steps: accepted for BytePS's sake: the last step need not be known.

    Example:
        >>> optimizer = CrossBarrier(model, torch.optim.Adam(model.parameters()))  # doctest: +SKIP
    """
    return DistributedOptimizer(byteps_opt, model, overlap_forward=True)
