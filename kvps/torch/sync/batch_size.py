"""The batch size by which a store's optimizer divides the sums of gradients: rank 0's first."""

from __future__ import annotations

import math
import numbers
from dataclasses import replace

import torch

from kvps.core.optim.hyperparams import HyperParams
from kvps.errors import ConfigError
from kvps.store.kvstore import KVStore
from kvps.torch.sync.parameter_sync import ParameterSync

KEY = "kvps.batch_size"
"""The key of rank 0's first batch size."""


class AgreedBatch:
    """The batch size that all workers have agreed on, which the store's optimizer has as a factor of gradients.

    Args:
        model: the parameters and their store.
    """

    def __init__(self, model: ParameterSync) -> None:
        self._model = model
        self._size: float | None = None
        """None before the first step."""

    def size(self, batch: float) -> float:
        """Return it; at the first call the workers agree on rank 0's ``batch``."""
        if self._size is not None:
            return self._size
        kv = self._model.kv
        if not isinstance(kv, KVStore):
            self._size = 1.0  # a plug-in divides by nothing; this worker does
            return self._size
        shared = torch.tensor([batch], dtype=torch.float64, device="cpu")
        kv.init(KEY, shared)
        kv.pull(KEY, out=shared)
        self._size = float(shared)
        if self._size != 1.0:
            self._model.install(self._rescaled(self._size))
        return self._size

    def take(self) -> None:
        """Learn which batch size was agreed on before this worker replaced a lost worker."""
        shared = torch.zeros(1, dtype=torch.float64, device="cpu")
        self._model.kv.pull(KEY, out=shared)
        self._size = float(shared)
        self._model.hyper = self._rescaled(self._size)

    def _rescaled(self, size: float) -> HyperParams:
        hyper = self._model.hyper
        assert hyper is not None
        rescale = hyper.number("rescale_grad") / size
        return replace(hyper, values={**hyper.values, "rescale_grad": rescale})


def positive(batch_size: object) -> float:
    """Return a batch size as a number.

    Raises:
        ConfigError: if it is not above 0.
    """
    is_number = isinstance(batch_size, numbers.Real) and not isinstance(batch_size, bool)
    value = float(batch_size) if is_number else math.nan  # type: ignore[arg-type]
    if not 0 < value < math.inf:
        raise ConfigError(f"batch_size={batch_size!r}: use a number above 0")
    return value
