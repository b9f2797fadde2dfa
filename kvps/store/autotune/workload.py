"""The workload of a front end: the gradients of each step, and how they travel.

A front end describes it before its store is open, for :mod:`kvps.store.autotune.choice` to try settings with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvps.core.optim.hyperparams import HyperParams

LEVELS = 8
"""The number of priorities of parameters, in their order."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The gradients that a front end is going to push and pull in each step.

    Args:
        store: the name of a kind of store.
        params: name -> parameter.
        average: the store takes means.
        compression: as for :meth:`kvps.KVStore.set_gradient_compression`; None for none.
        hyper: returns the hyper-parameters of the store's optimizer; None if it has none.
        has_levels: priorities are those of the layers' order, all in one call.
    """

    store: str
    params: Mapping[str, torch.Tensor]
    average: bool = False
    compression: Any = None
    hyper: Callable[[], HyperParams | None] = lambda: None
    has_levels: bool = False
