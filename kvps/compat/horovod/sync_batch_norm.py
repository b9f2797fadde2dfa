"""Horovod's SyncBatchNorm: batch normalisation over the batches of all ranks, on the CPU and on GPUs."""

from __future__ import annotations

from itertools import count

import torch

from kvps.compat.horovod.engine.context import current
from kvps.compat.horovod.ops.reduce import allreduce_
from kvps.compat.horovod.reductions import Sum
from kvps.torch import sync_batchnorm

PREFIX = "sync_batch_norm"
"""The beginning of the names of a layer's operations."""


class SyncBatchNorm(sync_batchnorm.SyncBatchNorm):
    """BatchNorm1d, 2d and 3d over the batches of all ranks; outputs equal the outputs of one process
    with all of them.

    Every rank runs the same layers in the same order; batches may differ in size.

    Args:
        num_features: channels: the size of dimension 1 of its input, which has two or more.
        eps: added to the variance.
        momentum: of running statistics; None for their plain mean.
        affine: have a weight and a bias.
        track_running_stats: keep running statistics for evaluation.

    Raises:
        ValueError: in a forward pass, for an input of fewer than 2 dimensions or with other channels.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._ours: _Exchange | None = None

    def _check_input_dim(self, input: torch.Tensor) -> None:  # torch's name
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) needs an input of shape (N, {self.num_features}, "
                f"...): expected at least 2D input (got {input.dim()}D input, {tuple(input.shape)})"
            )

    def _found_exchange(self) -> sync_batchnorm.Exchange | None:
        mine = current()
        if mine.running().size == 1:
            return None
        if self._ours is None or self._ours.engine is not mine.engine:
            number = next(mine.numbers.setdefault(PREFIX, count()))
            self._ours = _Exchange(f"{PREFIX}.{number}", mine.engine)
        return self._ours

    def __getstate__(self) -> dict[str, object]:
        """Return the state of a copy of this layer, without its names."""
        return {**super().__getstate__(), "_ours": None}


class _Exchange:
    """The sums of one layer: allreduces of two names."""

    def __init__(self, name: str, engine: object) -> None:
        self._name, self.engine = name, engine

    def __call__(self, way: str, sums: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        return allreduce_(sums, op=Sum, name=f"{self._name}.{way}")
