"""Local SGD: DiLoCo whose outer optimizer is the mean of the weights."""

from __future__ import annotations

from typing import Any

import torch

from kvps.errors import ConfigError
from kvps.torch.local_steps.diloco import DiLoCo


class LocalSGD(DiLoCo):
    """Trains by local steps, and averages the weights of all workers every ``sync_every`` of them.

    Args:
        model, inner_optimizer: as in :class:`DiLoCo`.
        sync_every: steps between two averages.
        options: the other options of :class:`DiLoCo`, but ``outer``, ``lr`` and ``momentum``. With
            ``mode="async"`` or ``late="next"``, each push moves the servers' weights to the
            worker's by its part of the way.

    Raises:
        ConfigError: for invalid arguments.

    Example:
        >>> with kvps.torch.LocalSGD(model, optimizer, sync_every=8):  # doctest: +SKIP
        ...     train(model, optimizer)
    """

    _OWNER = "local_sgd"

    def __init__(
        self, model: Any, inner_optimizer: torch.optim.Optimizer, sync_every: int = 100, **options: Any
    ) -> None:
        fixed = sorted({"outer", "lr", "momentum"} & options.keys())
        if fixed:
            raise ConfigError(f"LocalSGD averages weights and takes no {fixed[0]}=; use DiLoCo")
        # w - 1.0 * mean(w - w_i) is the mean of the weights.
        super().__init__(model, inner_optimizer, "sgd", 1.0, 0.0, sync_every=sync_every, **options)
