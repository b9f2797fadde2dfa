"""torchft's names for local steps: a script changes one import, ``from kvps.compat.torchft import
DiLoCo, LocalSGD``.

Arguments have the names and the order of torchft.local_sgd. There is no manager, since the servers
know the workers: pass None. The options that only say how torchft copies and sends are accepted
and have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvps.core.optim.from_torch import describe
from kvps.errors import ConfigError
from kvps.torch.local_steps import diloco, local_sgd

QUANTIZED = {"type": "int8", "pull": True}
"""The compression of ``should_quantize=True``: eight bits, as torchft's."""


class DiLoCo(diloco.DiLoCo):
    """Trains by local steps, with torchft's arguments.

    Args:
        manager: None.
        model_fragments: the modules that take turns.
        inner_optimizer: a torch optimizer over their parameters.
        outer_optimizer: a torch optimizer that servers can run; or a list of equal ones, one per fragment.
        sync_every: steps between two merges of a parameter, a multiple of the number of fragments.
        backup_device: where the weights of the last merge are kept.
        pin_memory, use_bucketization, bucket_cap_mb: no effect.
        should_quantize: compress both directions to eight bits per element.
        fragment_sync_delay: steps that training goes on while a fragment is on its way.
        fragment_update_alpha: the share of the local weights in a merged fragment.
        options: the options of :class:`kvps.torch.DiLoCo` that torchft has not, such as ``quorum``.

    Raises:
        ConfigError: for a manager, outer optimizers that differ, or as :class:`kvps.torch.DiLoCo`.
    """

    def __init__(
        self,
        manager: None,
        model_fragments: Sequence[torch.nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: int | None = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        **options: Any,
    ) -> None:
        _refuse_manager(manager)
        modules = list(model_fragments)
        if should_quantize:
            options.setdefault("compression", QUANTIZED)
        super().__init__(
            torch.nn.ModuleList(modules),
            inner_optimizer,
            _one_of(outer_optimizer),
            sync_every=sync_every,
            fragments=modules,
            delay=fragment_sync_delay,
            alpha=fragment_update_alpha,
            backup_device=backup_device,
            **options,
        )


class LocalSGD(local_sgd.LocalSGD):
    """Averages the weights of all workers every ``sync_every`` steps, with torchft's arguments.

    Args:
        manager: None.
        model: a module.
        optimizer: a torch optimizer over its parameters.
        sync_every: steps between two averages.

    Raises:
        ConfigError: for a manager, or as :class:`kvps.torch.LocalSGD`.
    """

    def __init__(
        self,
        manager: None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sync_every: int,
        **options: Any,
    ) -> None:
        _refuse_manager(manager)
        super().__init__(model, optimizer, sync_every, **options)


def _refuse_manager(manager: object) -> None:
    if manager is not None:
        raise ConfigError(
            f"manager: got a {type(manager).__name__}, but kvps has no manager: the servers know which "
            "workers there are. Pass None"
        )


def _one_of(outer: torch.optim.Optimizer | list[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return the outer optimizer; all of a list must be equal.

    Raises:
        ConfigError: if they are not.
    """
    if not isinstance(outer, list):
        return outer
    if not outer:
        raise ConfigError("outer_optimizer: the list is empty; give a torch optimizer")
    first, *others = [describe(optimizer) for optimizer in outer]
    for number, described in enumerate(others, start=1):
        if described != first:
            raise ConfigError(
                f"outer_optimizer[{number}] is {described}, and outer_optimizer[0] is {first}; servers have "
                "one set of hyper-parameters for all fragments"
            )
    return outer[0]
