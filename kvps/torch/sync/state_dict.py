"""Optimizer states as the servers keep them, and as torch's ``state_dict()`` has them; the base of a wrapping
optimizer.

The torch optimizer of a front end whose updates run in the store keeps no state.
:class:`StateInStore` makes the optimizer's ``state_dict()`` and ``load_state_dict()`` those of the
store, so that a script which saves and loads the optimizer loses no momenta.

Servers keep the tensors of torch.optim under torch's names, flat, and one count of updates for each key.
torch keeps the count as a tensor beside them, for all but SGD; and NAdam's ``mu_product``, which follows
from the count.

:class:`WrappedOptimizer` has the attributes and methods that an optimizer leaves to the optimizer that it
wraps, and those that it refuses.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from kvps.core.optim.hyperparams import HyperParams
from kvps.core.optim.torch_rules import NAdam, create
from kvps.errors import ConfigError
from kvps.store.base import Store
from kvps.store.optimizer_state import States
from kvps.torch.sync.parameter_sync import ParameterSync
from kvps.torch.sync.steps import Described, Resumable

DERIVED = ("step", "mu_product")
"""Entries of a torch state that servers need not know."""
_LEFT_OUT: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers whose state dicts are now without the state that a store has."""


@contextmanager
def without_stored(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Leave the state that a store has out of the optimizer's state dicts inside."""
    _LEFT_OUT.add(optimizer)
    try:
        yield
    finally:
        _LEFT_OUT.discard(optimizer)


def to_torch(
    hyper: HyperParams, found: States, params: Mapping[str, torch.Tensor]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Return torch's state of each parameter that was updated.

    Args:
        hyper: of the store's optimizer.
        found: what the store gave.
        params: name -> parameter; a state gets its shape and device.
    """
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for name, (step, rows) in found.items():
        param = params[name]
        entry: dict[str, Any] = {}
        if hyper.name != "sgd":
            entry["step"] = torch.tensor(float(step), device="cpu")
        updater = create(hyper)
        if isinstance(updater, NAdam):
            entry["mu_product"] = torch.tensor(updater.product(step), device="cpu")
        for title, row in rows.items():
            entry[title] = row.view(param.shape).to(param.device)
        state[param] = entry
    return state


def from_torch(state: Mapping[torch.Tensor, Mapping[str, Any]], params: Mapping[str, torch.Tensor]) -> States:
    """Return what the store is to keep, of torch's state of each parameter."""
    found: States = {}
    for name, param in params.items():
        entry = state.get(param)
        if not entry:
            continue
        rows = {
            title: value.detach().to("cpu").contiguous().view(-1)
            for title, value in entry.items()
            if isinstance(value, torch.Tensor) and title not in DERIVED
        }
        found[name] = int(entry.get("step", 1)), rows  # SGD only asks whether there was one
    return found


def has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has made or loaded steps, which the servers have to go on from."""
    # Adagrad has state before its first step. SGD counts no steps: there the momentum tells.
    return any(entry and float(entry.get("step", 1)) for entry in optimizer.state.values())


def in_words(optimizer: object) -> str:
    """Say whether an optimizer has state, for the comparison of workers: all have some, or none."""
    is_loaded = isinstance(optimizer, torch.optim.Optimizer) and has_state(optimizer)
    return "loaded" if is_loaded else "empty"


def take_over(optimizer: torch.optim.Optimizer, model: ParameterSync) -> None:
    """Move the state of an optimizer into the store; every worker calls, and rank 0's state counts."""
    found = from_torch(optimizer.state, model.params)
    optimizer.state.clear()
    if not model.steps.is_behind:
        model.survive(lambda: model.kv.set_optimizer_states(found))


class StateInStore:
    """The state of a torch optimizer whose updates a store makes: saved from the store, and loaded into it.

    State that the optimizer has already is moved into the store: all workers have some, or none.

    ``optimizer.state_dict()`` fetches the state; a call by one worker is enough. Every worker calls
    ``optimizer.load_state_dict()``, and rank 0's call counts.

    Args:
        optimizer: the script's, which has no state of its own.
        model: the parameters and their store. After its end the optimizer's methods are torch's own.
        described: the numbers of the optimizer. Those that are loaded with a state are sent before
            the state, which may be of another rule.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: ParameterSync, described: Described) -> None:
        if has_state(optimizer):
            take_over(optimizer, model)
        self._model = weakref.ref(model)
        self._described = described
        self._hooks = (
            optimizer.register_state_dict_pre_hook(self._fetch),
            optimizer.register_state_dict_post_hook(self._drop),
            optimizer.register_load_state_dict_post_hook(self._send),
        )

    def close(self) -> None:
        """Leave the optimizer to the script."""
        for hook in self._hooks:
            hook.remove()

    def _model_for(self, optimizer: torch.optim.Optimizer) -> ParameterSync | None:
        return None if optimizer in _LEFT_OUT else self._model()

    def _fetch(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model_for(optimizer)
        if model is not None:
            assert model.hyper is not None
            found = model.kv.optimizer_states()
            optimizer.state.update(to_torch(model.hyper, found, model.params))

    def _drop(self, optimizer: torch.optim.Optimizer, _: dict[str, Any]) -> None:
        if self._model_for(optimizer) is not None:
            optimizer.state.clear()

    def _send(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model_for(optimizer)
        if model is not None:
            assert model.hyper is not None
            wanted = self._described.scaled_as(model.hyper)
            model.survive(lambda: model.want(wanted))
            take_over(optimizer, model)


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
        """Add a group of parameters that were frozen, and in no group, when this was created.

        Every worker adds the same. They were among ``named_parameters``, so the store knows their keys.

        Raises:
            ConfigError: at the next step, for other parameters.
        """
        self._inner.add_param_group(param_group)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled or copied, as its store does.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a DistributedOptimizer cannot be pickled or copied: its store is the connection of this "
            "process to the job. Save optimizer.state_dict(), and copy the model alone"
        )

    def __repr__(self) -> str:
        where = "in" if self._on_store else "over"
        return f"DistributedOptimizer {where} {self._model.kv!r}: {self._inner!r}"
