"""Gradient hooks of a sharded model: a complete gradient leaves, and its weight is freed.

A second gradient of a parameter in one step would be a second push, and so another round. So several
passes make up a step only where that was asked for, and then gradients are added up here until the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvps.errors import ConfigError, EpochChanged
from kvps.phrases import names_in_words
from kvps.torch.sharded.in_flight import GradientSender
from kvps.torch.sharded.remote_optimizer import RemoteOptimizer


class GradientHooks:
    """The gradients of one step.

    Args:
        rule: the optimizer in the store, which knows the parameters.
        outgoing: the way to the store.
        passes: how many backward passes make up a step.
        free: lets go of weights.
        go_on: called when the servers have returned to a checkpoint.
    """

    def __init__(
        self,
        rule: RemoteOptimizer,
        outgoing: GradientSender,
        passes: int,
        free: Callable[[list[str]], None],
        go_on: Callable[[EpochChanged], None],
    ) -> None:
        if type(passes) is not int or passes < 1:
            raise ConfigError(
                f"backward_passes_per_step={passes!r}: use a whole number of passes from 1 on"
            )
        self._rule = rule
        self._params: Mapping[str, torch.Tensor] = rule.params
        self._outgoing = outgoing
        self._wanted_passes = passes
        self._free = free
        self._go_on = go_on
        self._passes: dict[str, int] = {}
        """Of each parameter, the passes whose gradients are in ``.grad``."""
        self._left: set[str] = set()
        """Whose gradients have left in this step."""
        self._done: set[str] = set()
        """Whose gradients are complete in this backward pass."""
        self.is_given_up = False
        """The servers have returned to a checkpoint: what is made in this step leads nowhere."""
        self._hooks: dict[str, Any] = {}
        self.watch()

    def watch(self) -> None:
        """Put hooks on all parameters that are trained, but for those that have one."""
        for name in self._rule.trained:
            if name not in self._hooks:
                param: Any = self._params[name]  # torch gives this method no types
                self._hooks[name] = param.register_post_accumulate_grad_hook(
                    lambda _, name=name: self._on_gradient(name)
                )

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    @property
    def is_begun(self) -> bool:
        """Whether there are gradients of this step."""
        return bool(self._left or self._passes)

    def is_done(self, name: str) -> bool:
        """Whether this backward pass needs no weight of a parameter any more."""
        return name in self._done or name in self._left

    def check(self, name: str) -> None:
        """Check that backward may have a weight.

        Raises:
            ConfigError: if its gradient has left: its weight is of the next step, or soon will be.
        """
        if name in self._left:
            raise ConfigError(
                f"backward needs the weight {name!r} again, and its gradient has left in this step: "
                "retain_graph=True and a second backward() do not go with shard(); add up the losses, "
                "or say backward_passes_per_step="
            )

    def _on_gradient(self, name: str) -> None:
        param = self._params[name]
        gradient = param.grad
        if gradient is None:
            return
        if gradient.requires_grad:
            raise ConfigError(
                f"the gradient of {name!r} is to be differentiated (create_graph=True), which shard() does "
                "not support: the weights that this needs are freed"
            )
        if name in self._left:
            param.grad = None
            raise ConfigError(
                f"parameter {name!r} got another gradient after the first had left, and before step(): "
                "call step() in between; if several backward passes make up a step, say "
                "backward_passes_per_step="
            )
        self._passes[name] = self._passes.get(name, 0) + 1
        self._done.add(name)
        self._free([name])
        if self._passes[name] >= self._wanted_passes:
            self._leave(name)

    def _leave(self, name: str) -> None:
        param = self._params[name]
        gradient, param.grad = param.grad, None
        assert gradient is not None
        is_first = not self._left
        self._left.add(name)
        self._passes.pop(name, None)
        if self.is_given_up:
            return
        try:
            if is_first:
                self._rule.send()
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            self._outgoing.add(name, gradient.to(param.dtype))
        except EpochChanged as error:
            self.give_up(error)

    def give_up(self, error: EpochChanged) -> None:
        """The gradients of this step are of weights that nobody has any more: none leaves from here on."""
        self.is_given_up = True
        self._outgoing.drop()
        self._go_on(error)

    def end_pass(self) -> None:
        """A backward pass is over."""
        self._done.clear()
        if not self.is_given_up:
            try:
                self._outgoing.flush()
            except EpochChanged as error:
                self.give_up(error)

    def step(self) -> None:
        """Let the last gradients of a step leave, and begin the next.

        Raises:
            ConfigError: naming parameters that have no gradient. KvpsError: what became of one that left.
        """
        missing = [
            name
            for name in self._rule.trained
            if name not in self._left and self._params[name].grad is None
        ]
        if missing and not self.is_given_up:
            raise ConfigError(
                f"no gradient for {names_in_words(missing)}, of {len(self._rule.trained)} parameters: no backward() "
                "has reached them since the last step(). Use them, or set requires_grad_(False) on them "
                "before shard()"
            )
        for name in self._rule.trained:
            if self._params[name].grad is not None:
                self._leave(name)
        self.end_pass()
        if not self.is_given_up:
            try:
                self._outgoing.wait(self._outgoing.limit_bytes)
            except EpochChanged as error:
                self.give_up(error)
        self.begin()

    def begin(self) -> None:
        """A step is over: what comes from now on is of the next."""
        self._outgoing.begin()
        self._passes.clear()
        self._left.clear()
        self._done.clear()
        self.is_given_up = False
