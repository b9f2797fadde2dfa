"""An optimizer that wraps another: the attributes and methods that it leaves to the wrapped one, and those that it refuses."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from kvps.errors import ConfigError
from kvps.store.base import Store
from kvps.torch.sync.parameter_sync import ParameterSync
from kvps.torch.sync.steps import Resumable


class WrappedOptimizer(Resumable, torch.optim.Optimizer):
    """The base of an optimizer that makes the steps of ``_inner`` with gradients that ``_model`` averages."""

    _inner: torch.optim.Optimizer
    _model: ParameterSync
    _on_store: bool

    @property
    def kvstore(self) -> Store:
        """The store that averages gradients, for its ``rank``, ``num_workers`` and ``barrier()``."""
        return self._model.kv

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""
        return self._inner

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default hyper-parameters of the wrapped optimizer."""
        return self._inner.defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self._on_store or bool(getattr(self._inner, "_step_supports_amp_scaling", False))

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # it is being made
            raise AttributeError(name)
        return getattr(self._inner, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the store would not know their keys."""
        raise ConfigError(
            "add_param_group() is not supported: create a DistributedOptimizer over all parameters"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled or copied, as its store does.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a DistributedOptimizer cannot be pickled or copied: its store is the connection of this process to the "
            "job. Save optimizer.state_dict(), and copy the model alone"
        )

    def __repr__(self) -> str:
        where = "in" if self._on_store else "over"
        return f"DistributedOptimizer {where} {self._model.kv!r}: {self._inner!r}"
