"""The checked arguments of DiLoCo and LocalSGD: the outer optimizer, the store's options, and the
weight of a worker."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from kvps.core.optim.from_torch import describe
from kvps.core.optim.hyperparams import HyperParams, resolve
from kvps.errors import ConfigError
from kvps.store.create import checked_late

DELAYED = "delayed_nesterov"
"""The outer optimizer for pushes that come one by one."""
STORES = {"sync": "dist_sync", "async": "dist_async"}
"""The type of store of each mode."""
TOKENS = "tokens"
"""The weight of a worker that counts what it has trained on."""


def outer_of(outer: object, lr: float, momentum: float, mode: str = "sync") -> HyperParams:
    """Return the optimizer that servers apply to pseudo-gradients.

    Args:
        outer: ``"nesterov"``, ``"delayed_nesterov"``, ``"sgd"``, or a torch optimizer, whose own
            hyper-parameters count.
        lr, momentum: of those given by name.
        mode: the mode.

    Raises:
        ConfigError: for anything else, a number out of its range, or an optimizer that does not fit the mode.
    """
    if isinstance(outer, torch.optim.Optimizer):
        return describe(outer)
    if outer not in ("nesterov", "sgd", DELAYED):
        raise ConfigError(
            f"outer={outer!r:.60}: use 'nesterov', 'delayed_nesterov', 'sgd', or a torch "
            "optimizer that servers can run"
        )
    if outer == DELAYED and mode != "async":
        raise ConfigError(
            f"outer='{DELAYED}' needs mode='async'; with mode={mode!r} pushes are merged, so use "
            "outer='nesterov'"
        )
    for name, value in (("lr", lr), ("momentum", momentum)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name}={value!r:.40}: use a number")
    if outer == "nesterov" and not momentum > 0:
        raise ConfigError(f"outer='nesterov' needs a momentum above 0, not {momentum}; use outer='sgd'")
    if outer == DELAYED:
        return resolve(DELAYED, {"lr": lr, "momentum": momentum})
    return resolve("sgd", {"lr": lr, "momentum": momentum, "nesterov": outer == "nesterov"})


class OuterNumbers:
    """The numbers of an outer torch optimizer, which servers have read once."""

    def __init__(self, outer: object) -> None:
        self._given = outer if isinstance(outer, torch.optim.Optimizer) else None
        self._read = None if self._given is None else describe(self._given)

    def check(self) -> None:
        """Check that the numbers are still those that servers have.

        Raises:
            ConfigError: if the script, perhaps by a scheduler, has changed them since.
        """
        if self._given is None or self._read is None or (now := describe(self._given)) == self._read:
            return
        raise ConfigError(
            f"the outer optimizer was changed, perhaps by a scheduler: lr={now.number('lr'):g}, but servers "
            f"have lr={self._read.number('lr'):g}, which they read once. Leave the outer optimizer as it is, "
            "and call set_learning_rate() of each store in stores, on every worker"
        )


def warn_unless_entered(optimizer: torch.optim.Optimizer, owner: str) -> Any:
    """Have the first step of an inner optimizer warn that it does not count; return the handle
    that prevents this."""

    def warn(*_: object) -> None:
        handle.remove()
        warnings.warn(
            f"the inner optimizer was stepped outside the {owner}, so the step does not count, and nothing "
            f"is merged: train inside `with {owner}(...):`",
            stacklevel=3,
        )

    handle = optimizer.register_step_post_hook(warn)
    return handle


def store_type(mode: object) -> str:
    """Return the type of store of a mode.

    Raises:
        ConfigError: for an unknown mode.
    """
    if not isinstance(mode, str) or mode not in STORES:
        raise ConfigError(f"mode={mode!r:.40}: use one of {', '.join(STORES)}")
    return STORES[mode]


def has_means(mode: str, late: str) -> bool:
    """Return whether servers compute the mean of a round; else each push counts as one part of the
    number of workers.

    With ``late="next"``, workers that push in turns each close rounds of their own: by means,
    every round would move the weights by a whole step.

    Raises:
        ConfigError: for an unknown value of ``late``.
    """
    return checked_late(late) == "drop" and mode == "sync"


def share_of(alpha: object) -> float:
    """Return the local share of a merged parameter.

    Raises:
        ConfigError: if it is not from 0 to 1.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise ConfigError(f"alpha={alpha!r:.40}: use a number from 0 (global) to 1 (local)")
    return float(alpha)


def is_dynamic(dynamic: object, mode: str, fragments: int) -> bool:
    """Return whether the steps of a turn follow the worker's speed.

    Raises:
        ConfigError: if they cannot: where rounds merge all workers' pushes, or fragments take turns.
    """
    if not isinstance(dynamic, bool):
        raise ConfigError(f"dynamic_sync_every={dynamic!r:.40}: use True or False")
    if dynamic and mode != "async":
        raise ConfigError(
            f"dynamic_sync_every=True needs mode='async': with mode={mode!r} all workers make the "
            "same number of steps"
        )
    if dynamic and fragments > 1:
        raise ConfigError(
            f"dynamic_sync_every=True needs one fragment, not {fragments}: fragments take turns at the same "
            "steps on all workers; use fragments=1"
        )
    return dynamic


class Weight:
    """The weight of this worker's pseudo-gradients: a number, or the tokens since a fragment last left.

    Args:
        given: None for 1, a number above 0, or ``"tokens"``.
        fragments: the number of fragments.
        is_mean: whether servers compute means, as :func:`has_means` returns it.

    Raises:
        ConfigError: for another weight, or a weight in a store without means.
    """

    def __init__(self, given: object, fragments: int, is_mean: bool) -> None:
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if (
            given is not None
            and given != TOKENS
            and not (
                is_number and 0 < float(given) < math.inf  # type: ignore[arg-type]  # it is a number
            )
        ):
            raise ConfigError(f"weight={given!r:.40}: use a number above 0, 'tokens', or None")
        if given is not None and not is_mean:
            raise ConfigError(
                f"weight={given!r} needs mode='sync' and late='drop': with mode='async' or late='next', each "
                "push counts as one part of the number of workers, and servers compute no mean"
            )
        self._given: Any = given
        self._tokens = [0.0] * fragments

    def add(self, tokens: float) -> None:
        """Count tokens that this worker has trained on.

        Raises:
            ConfigError: for a negative number, or if tokens are not the weight.
        """
        if self._given != TOKENS:
            raise ConfigError("add_tokens() needs weight='tokens'")
        if not 0 <= tokens < math.inf:
            raise ConfigError(f"add_tokens({tokens!r:.40}): use a number of tokens, 0 or more")
        self._tokens = [count + tokens for count in self._tokens]

    def of(self, fragment: int) -> float:
        """Return the weight of a fragment that leaves now.

        Raises:
            ConfigError: if no tokens were counted since it last left.
        """
        if self._given != TOKENS:
            return 1.0 if self._given is None else float(self._given)
        if not self._tokens[fragment]:
            raise ConfigError(
                "weight='tokens', but add_tokens() was not called since this fragment was last merged; call "
                "it in each step"
            )
        return self._tokens[fragment]

    def overall(self) -> float:
        """Return the weight of this worker in a mean of all fragments: of its tokens the most, or
        1 if there are none."""
        if self._given != TOKENS:
            return 1.0 if self._given is None else float(self._given)
        return max(self._tokens) or 1.0

    def left(self, fragment: int) -> None:
        """Count the tokens of a fragment that has left from 0."""
        self._tokens[fragment] = 0.0
