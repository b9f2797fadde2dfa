"""Fragments of a model: the parts that are synchronised one after another, balanced by bytes or given by the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvps.errors import ConfigError
from kvps.phrases import names_in_words

Fragments = tuple[tuple[str, ...], ...]
"""The names of the parameters of each fragment; every trained parameter is in one of them."""


def fragments_of(params: Mapping[str, torch.Tensor], wanted: object) -> Fragments:
    """Return the fragments that a user asks for.

    Args:
        params: name -> parameter, of those that are trained.
        wanted: the number of fragments; or a list of them, each a module, or a list of parameters and modules.

    Raises:
        ConfigError: naming the parameters that are in no fragment, in two, or not in the model.

    Example:
        >>> layers = {"a": torch.zeros(4), "b": torch.zeros(2), "c": torch.zeros(2)}
        >>> fragments_of(layers, 2)
        (('a',), ('b', 'c'))
    """
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return _balanced(params, wanted)
    if not isinstance(wanted, Sequence) or isinstance(wanted, str):
        raise ConfigError(
            f"fragments={wanted!r:.60}: give a number, or a list of modules or of lists of parameters"
        )
    return _given(params, wanted)


def _balanced(params: Mapping[str, torch.Tensor], count: int) -> Fragments:
    """Put each parameter, the largest first, into the fragment with the fewest bytes."""
    if not 1 <= count <= len(params):
        raise ConfigError(
            f"fragments={count}: use 1 to {len(params)}, the number of trained parameters"
        )
    sizes = [0] * count
    chosen: dict[str, int] = {}
    for name in sorted(params, key=lambda name: -_bytes(params[name])):
        lightest = sizes.index(min(sizes))
        chosen[name] = lightest
        # A parameter without elements counts, too, so that no fragment stays empty.
        sizes[lightest] += _bytes(params[name]) + 1
    return tuple(
        tuple([name for name in params if chosen[name] == number]) for number in range(count)
    )


def _bytes(param: torch.Tensor) -> int:
    return param.numel() * param.element_size()


def _given(params: Mapping[str, torch.Tensor], wanted: Sequence[Any]) -> Fragments:
    names = {param: name for name, param in params.items()}
    found: list[tuple[str, ...]] = []
    places: dict[str, int] = {}
    for number, entry in enumerate(wanted):
        members = _parameters(entry, f"fragments[{number}]")
        foreign = [param for param in members if param not in names]
        if foreign:
            shapes = ", ".join([str(tuple(param.shape)) for param in foreign[:3]])
            raise ConfigError(
                f"fragments[{number}] has {len(foreign)} trained parameter(s) that the model has not, of shape "
                f"{shapes}; build fragments from the modules of the model"
            )
        mine = tuple([names[param] for param in members])
        repeated = [name for name in mine if name in places]
        if repeated:
            raise ConfigError(
                f"parameter {repeated[0]!r} is in fragments[{places[repeated[0]]}] and in "
                f"fragments[{number}]; each parameter belongs to one fragment"
            )
        if not mine:
            raise ConfigError(f"fragments[{number}] has no trained parameter; remove it")
        places.update(dict.fromkeys(mine, number))
        found.append(mine)
    missing = [name for name in params if name not in places]
    if missing:
        raise ConfigError(
            f"no fragment has {names_in_words(missing)}; add it to a fragment, or freeze it by "
            "requires_grad_(False)"
        )
    return tuple(found)


def _parameters(given: object, where: str) -> list[torch.Tensor]:
    """Return the trained parameters of a module, a parameter, or a list of either; each once."""
    found: list[torch.Tensor]
    if isinstance(given, torch.nn.Module):
        found = list(given.parameters())
    elif isinstance(given, torch.Tensor):
        found = [given]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        found = [param for element in given for param in _parameters(element, where)]
    else:
        raise ConfigError(
            f"{where} is a {type(given).__name__}; give a module, a parameter, or a list of them"
        )
    return list(dict.fromkeys([param for param in found if param.requires_grad]))
