"""The gradients of a sharded model: a complete gradient is pushed, and its weight is freed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kvps.errors import ConfigError, EpochChanged
from kvps.torch.sharded.in_flight import GradientSender
from kvps.torch.sharded.remote_optimizer import RemoteOptimizer
from kvps.torch.sync.parameter_hooks import ParameterHooks, second_gradient

REMEDY = (
    "call step() after each backward(): gradients of a sharded model leave during backward, and cannot be discarded. To "
    "skip a batch, look at its loss before backward(); to train another model with a loss, set "
    "requires_grad_(False) on this one meanwhile; for several passes in a step, use backward_passes_per_step="
)


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
        self._rule = rule
        self._params: Mapping[str, torch.Tensor] = rule.params
        self._outgoing = outgoing
        self._free = free
        self._go_on = go_on
        self._left: set[str] = set()
        """Names of the parameters whose gradients have left in this step."""
        self._done: set[str] = set()
        """Names of the parameters whose gradients are complete in this backward pass."""
        self.is_given_up = False
        """Whether the servers have returned to a checkpoint, so that the gradients of this step are void."""
        self.hooks = ParameterHooks(rule, passes, self._on_gradient)

    @property
    def is_begun(self) -> bool:
        """Whether there are gradients of this step."""
        return bool(self._left) or self.hooks.is_begun

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
                f"backward needs the weight {name!r} again, but its gradient has already been pushed in "
                f"this step, and the servers update the weight with it: {REMEDY}, or add up the losses "
                "(retain_graph=True is not supported)"
            )

    def _on_gradient(self, name: str) -> None:
        param = self._params[name]
        gradient = param.grad
        if gradient is None:
            return
        if gradient.requires_grad:
            raise ConfigError(
                f"the gradient of {name!r} would be differentiated (create_graph=True), which shard() does "
                "not support, because it frees the weights"
            )
        if name in self._left:
            param.grad = None
            raise second_gradient(name, REMEDY)
        is_last = self.hooks.count(name)
        self._done.add(name)
        self._free([name])
        if is_last:
            self._leave(name)

    def _leave(self, name: str) -> None:
        param = self._params[name]
        gradient, param.grad = param.grad, None
        assert gradient is not None
        is_first = not self._left
        self._left.add(name)
        self.hooks.leave(name)
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
        """The gradients of this step are of weights that are outdated: none leaves from here on."""
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
            ConfigError: naming parameters that have no gradient. KvpsError: the error of a pushed gradient.
        """
        missing = self.hooks.missing(self._left)
        if missing and not self.is_given_up:
            raise self.hooks.no_gradient(
                missing,
                "the last step()",
                "Use them, or set requires_grad_(False) on them before shard()",
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
        self.hooks.begin()
        self._left.clear()
        self._done.clear()
        self.is_given_up = False
