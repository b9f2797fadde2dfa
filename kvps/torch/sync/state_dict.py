"""Optimizer states as the servers keep them, and as torch's ``state_dict()`` has them.

Servers keep the tensors of torch.optim under torch's names, flat, and one count of updates for each key.
torch keeps the count as a tensor beside them, for all but SGD; and NAdam's ``mu_product``, which follows
from the count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvps.core.optim.hyperparams import HyperParams
from kvps.core.optim.torch_rules import NAdam, create
from kvps.store.optimizer_state import States

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
