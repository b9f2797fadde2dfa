"""Optimizer states as the servers keep them, and as torch's ``state_dict()`` has them.

The torch optimizer of a front end whose updates run in the store keeps no state. :class:`StateInStore` makes the optimizer's
``state_dict()`` and ``load_state_dict()`` those of the store, so that a script which saves and loads the optimizer loses no momenta.

Servers keep the tensors of torch.optim under torch's names, flat, and one count of updates for each key.
torch keeps the count as a tensor beside them, for all but SGD; and NAdam's ``mu_product``, which follows
from the count.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from kvps.core.optim.hyperparams import HyperParams
from kvps.core.optim.torch_rules import NAdam, create
from kvps.errors import ConfigError
from kvps.store.optimizer_state import States
from kvps.torch.sync.parameter_sync import ParameterSync

DERIVED = ("step", "mu_product")
"""Entries of a torch state that servers need not know."""


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


def from_torch(
    state: Mapping[torch.Tensor, Mapping[str, Any]], params: Mapping[str, torch.Tensor]
) -> States:
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


def demand_empty(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has state already: servers would begin without it.

    Raises:
        ConfigError: saying when to load the state.
    """
    # Adagrad has state before its first step. SGD counts no steps: there the momentum tells.
    held = sum(1 for entry in optimizer.state.values() if entry and float(entry.get("step", 1)))
    if held:
        raise ConfigError(
            f"the optimizer has state of {held} parameters (momenta, step counts), and servers, which make the updates, begin "
            "without state. Create the optimizer anew, and call load_state_dict() after it was wrapped"
        )


class StateInStore:
    """The state of a torch optimizer whose updates a store makes: saved from the store, and loaded into it.

    ``optimizer.state_dict()`` fetches the state; a call by one worker is enough. Every worker calls
    ``optimizer.load_state_dict()``, and rank 0's call counts.

    Args:
        optimizer: the script's, which has no state of its own.
        model: the parameters and their store. After its end the optimizer's methods are torch's own.

    Raises:
        ConfigError: if the optimizer has state already.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: ParameterSync) -> None:
        demand_empty(optimizer)
        self._model = weakref.ref(model)
        self._hooks = (
            optimizer.register_state_dict_pre_hook(self._fetch),
            optimizer.register_state_dict_post_hook(self._drop),
            optimizer.register_load_state_dict_post_hook(self._send),
        )

    def close(self) -> None:
        """Leave the optimizer to the script."""
        for hook in self._hooks:
            hook.remove()

    def _fetch(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model()
        if model is not None:
            assert model.hyper is not None
            found = model.kv.optimizer_states()
            optimizer.state.update(to_torch(model.hyper, found, model.params))

    def _drop(self, optimizer: torch.optim.Optimizer, _: dict[str, Any]) -> None:
        if self._model() is not None:
            optimizer.state.clear()

    def _send(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model()
        if model is None:
            return
        found = from_torch(optimizer.state, model.params)
        optimizer.state.clear()
        model.survive(lambda: model.kv.set_optimizer_states(found))
