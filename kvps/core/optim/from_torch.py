"""The optimizer name and hyper-parameters of a torch.optim object.

``set_optimizer(torch.optim.SGD(...))`` must not send the object: only a name and checked numbers
travel. :func:`describe` reads them off. It refuses what it cannot carry over exactly (another
class, a subclass with rules of its own, an option the servers do not have, parameter groups that
differ), since training on in a slightly different way is worse than an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from kvps.core.optim.hyperparams import HyperParams, resolve, schema_of
from kvps.errors import ConfigError

NAMES: Mapping[type[torch.optim.Optimizer], str] = {
    **{torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"},
    **{torch.optim.Adagrad: "adagrad", torch.optim.Adadelta: "adadelta", torch.optim.RMSprop: "rmsprop"},
    **{torch.optim.NAdam: "nadam", torch.optim.RAdam: "radam", torch.optim.Adamax: "adamax"},
}
"""The torch classes that servers can run -> optimizer name."""

_MANNER = frozenset({"foreach", "fused", "capturable"})
"""Options that choose how torch computes, not what; servers choose for themselves."""


def describe(optimizer: torch.optim.Optimizer, key_of: Mapping[Tensor, str] | None = None) -> HyperParams:
    """Return the name and hyper-parameters of a torch optimizer, as they are now.

    Its state (momenta, step counts) is not carried over.

    Args:
        optimizer: exactly one of the classes in :data:`NAMES`, not a subclass of one; all its
            parameter groups with the same hyper-parameters.
        key_of: the key of each parameter. With it, groups may differ in ``lr`` and
            ``weight_decay``, which become multipliers of their keys.

    Raises:
        ConfigError: another class, an option that servers do not have, or groups that differ.

    Example::

        >>> describe(torch.optim.SGD(model.parameters(), lr=0.1)).name
        'sgd'
    """
    name = NAMES.get(type(optimizer))
    if name is None:
        valid = ", ".join(cls.__name__ for cls in NAMES)
        raise ConfigError(
            f"servers cannot run {type(optimizer).__module__}.{type(optimizer).__qualname__}; use "
            f"one of {valid} of torch.optim (not a subclass), a name for set_optimizer, or "
            "update_on_kvstore=False"
        )
    groups = [_options(group, optimizer.defaults) for group in optimizer.param_groups]
    factors: dict[str, object] = {}
    if key_of is not None:
        keys = [[key_of[param] for param in group["params"]] for group in optimizer.param_groups]
        factors = {"lr_mult": _factors("lr", groups, keys), "wd_mult": _factors("weight_decay", groups, keys)}
    first, *others = groups
    for number, other in enumerate(others, start=1):
        _check_same(name, number, first, other)
    if name in ("adam", "adamw") and first.pop("decoupled_weight_decay", False):
        name = "adamw"  # so torch itself defines AdamW
    return resolve(name, {**_carried(name, first), **factors})


def _factors(option: str, groups: list[dict[str, object]], keys: list[list[str]]) -> dict[str, float]:
    """Give all groups one value of ``option``; return the factors that make up for it."""
    values = [cast("float", group[option]) for group in groups]
    common = next((value for value in values if value), values[0])
    factors: dict[str, float] = {}
    for group, value, names in zip(groups, values, keys, strict=True):
        if value != common:
            factors.update(dict.fromkeys(names, value / common))
            group[option] = common
    return factors


def _options(group: Mapping[str, object], declared: Mapping[str, object]) -> dict[str, object]:
    """Return those options of a parameter group that change results.

    Args:
        group: it also holds the parameters, and what schedulers note there (``initial_lr``, ...).
        declared: the options that the optimizer's class declares.
    """
    return {name: _plain(value) for name, value in group.items() if name in declared and name not in _MANNER}


def _plain(value: object) -> object:
    """Return one-element tensors, which torch allows for lr and betas, as numbers."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple):
        return tuple(_plain(part) for part in value)
    return value


def _check_same(name: str, number: int, first: Mapping[str, object], other: Mapping[str, object]) -> None:
    different = [option for option in first if other.get(option) != first[option]]
    if different:
        option = different[0]
        raise ConfigError(
            f"optimizer '{name}': parameter group {number} has {option}={other.get(option)!r}, "
            f"group 0 has {first[option]!r}; servers have one set of hyper-parameters: give one "
            "group, and lr_mult={key: factor} / wd_mult={key: factor} for keys that differ"
        )


def _carried(name: str, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options that servers support; any other option that is switched on is refused."""
    schema = schema_of(name)
    known = {*schema.by_name(), *schema.pairs}
    for option, value in options.items():
        if option not in known and value:
            raise ConfigError(
                f"optimizer '{name}': servers do not support {option}={value!r}; omit it, or "
                f"use update_on_kvstore=False. Servers support: {schema.valid_names()}"
            )
    return {option: value for option, value in options.items() if option in known}


__all__ = ["NAMES", "describe"]
