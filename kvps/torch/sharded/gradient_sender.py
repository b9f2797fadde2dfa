"""The gradients of a sharded model: a complete gradient is pushed, and its weight is freed.

A gradient that has left is freed when the store has it. If the network is slower than backward, gradients
would heap up here, as much as the whole model. So at most *limit* bytes are in flight: the next bucket
waits until earlier ones have arrived, in their order.

The optimizer of a sharded model, which runs on the servers.

The script says it by a torch optimizer, which is never run and whose numbers a scheduler may change; or by
a name and numbers. Changed ones are sent before the first gradient of a step leaves. By then this rank has
pulled every weight for that step, so the round before is closed, and it was closed by the old numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

import torch

from kvps.core.optim.hyperparams import HyperParams, resolve
from kvps.errors import ConfigError, EpochChanged, ServerLost
from kvps.phrases import names_in_words
from kvps.runtime.ticket import Handle
from kvps.store.server_store import DistStore
from kvps.torch.sync.agreement import check_plain
from kvps.torch.sync.in_flight import BUCKET_BYTES, Buckets
from kvps.torch.sync.parameter_hooks import ParameterHooks, second_gradient
from kvps.torch.sync.parameter_sync import ParameterSync
from kvps.torch.sync.steps import Described, check_groups


class RemoteOptimizer(ParameterSync):
    """The optimizer in a store.

    Args:
        kv: the store.
        params: name -> parameter.
        optimizer: a torch optimizer over those that are trained, or a name.
        numbers: the hyper-parameters that belong to a name.

    Raises:
        ConfigError: for an optimizer that servers cannot run, or not over these parameters.
    """

    def __init__(
        self,
        kv: DistStore,
        params: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | str,
        numbers: Mapping[str, object],
    ) -> None:
        super().__init__(kv, params, None)
        self.described: Described | None = None
        """The numbers of a torch optimizer; None for a name."""
        self.key_of = {param: name for name, param in params.items()}
        """The name of each parameter."""
        if numbers.get("clip_global_norm") is not None:
            raise ConfigError(
                "clip_global_norm: a sharded model pushes and frees the gradients of one block after the "
                "other, so that no update may wait for the norm of all: clip elements with clip_gradient=, "
                "or use DistributedOptimizer(optimizer, model, update_on_kvstore=True, clip_global_norm=...)"
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            if not isinstance(optimizer, str):
                raise ConfigError(
                    f"optimizer: give a torch optimizer or a name, got {type(optimizer).__name__}"
                )
            self._given = resolve(optimizer, numbers)
            return
        if numbers:
            raise ConfigError(
                f"{', '.join(sorted(numbers))}: the optimizer has its own hyper-parameters; give "
                "these only with a name"
            )
        check_plain(optimizer, "shard()")
        check_groups(optimizer, params)
        self.described = Described(optimizer, params)
        self._given = self.wanted()

    def wanted(self) -> HyperParams:
        """Return what the script wants now."""
        return self._given if self.described is None else self.described.now()

    def want_rate(self, lr: float) -> None:
        """Want another learning rate from the next step on.

        Raises:
            ConfigError: for a bad value, or where a torch optimizer says it.
        """
        if self.described is not None:
            raise ConfigError(
                "set_learning_rate(): the optimizer that was passed to shard() has the learning rate; "
                "change optimizer.param_groups, or use a scheduler"
            )
        self._given = self._given.with_lr(lr)

    def send(self) -> None:
        """Give the store the hyper-parameters that have changed since the last step.

        Raises:
            Mismatch: if rank 0 wants something else. EpochChanged: at a return.
        """
        self.want(self.wanted())

    def pull(self) -> None:
        """Take no weights: each comes when it is needed."""

    def _take_up(self, error: EpochChanged) -> None:
        """Go on with the weights of the checkpoint: they are where they belong."""
        lost = [name for name in self.params if name not in error.after]
        if lost:
            raise ServerLost(
                f"the servers rolled back to a checkpoint that does not have {names_in_words(lost)}, and no "
                "worker has the weight; start the job again, and load_state_dict() your saved weights"
            ) from error
        self.renew(error)


class GradientSender:
    """The gradients of one worker on their way to a store.

    Args:
        kv: the store.
        sizes: size of each gradient in bytes, by name, in the order in which the store has the keys.
        limit_bytes: the most bytes that may be in flight; at least one bucket is.
    """

    def __init__(self, kv: DistStore, sizes: Mapping[str, int], limit_bytes: int) -> None:
        self._kv = kv
        self._sizes = sizes
        self.limit_bytes = limit_bytes
        """The most bytes that may be in flight."""
        self._buckets = Buckets(sizes, min(BUCKET_BYTES, max(1, limit_bytes)))
        self._collected: dict[str, torch.Tensor] = {}
        self._away: deque[tuple[Handle, int]] = deque()
        self._away_bytes = 0

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Let a gradient leave, with others.

        Raises:
            KvpsError: if an earlier one has failed.
        """
        self._collected[name] = gradient
        self._send(self._buckets.add(name))

    def flush(self) -> None:
        """Let all gradients leave that were collected.

        Raises:
            KvpsError: as :meth:`add`.
        """
        self._send(self._buckets.flush())

    def begin(self) -> None:
        """Begin the next step; drop the gradients that have not left."""
        self._buckets.begin()
        self._collected.clear()

    def _send(self, names: list[str]) -> None:
        if not names:
            return
        values = [self._collected.pop(name) for name in names]
        if self._kv.catch_up is not None:
            return  # the lost worker, which this one replaces, has made this step
        size = sum(self._sizes[name] for name in names)
        self.wait(self.limit_bytes - size)
        number = self._buckets.number
        handle = self._kv.push(names, values, priority=number, async_op=True)
        self._away.append((cast("Handle", handle), size))
        self._away_bytes += size

    def wait(self, left_bytes: int = 0) -> None:
        """Wait until at most ``left_bytes`` are in flight.

        Raises:
            KvpsError: if one of them has failed.
        """
        while self._away and (self._away_bytes > left_bytes or self._away[0][0].done()):
            handle, size = self._away.popleft()
            self._away_bytes -= size
            handle.wait()

    def drop(self) -> None:
        """Forget the gradients in flight."""
        self._away.clear()
        self._away_bytes = 0
        self.begin()


REMEDY = (
    "call step() after each backward(): gradients of a sharded model leave during backward, and cannot be "
    "discarded. To skip a batch, look at its loss before backward(); to train another model with a loss, "
    "set requires_grad_(False) on this one meanwhile; for several passes in a step, use "
    "backward_passes_per_step="
)


class GradientHooks:
    """The gradients of one step.

    Args:
        rule: the optimizer in the store, which knows the parameters.
        outgoing: the way to the store.
        passes: how many backward passes make up a step.
        free: lets go of weights.
    """

    def __init__(
        self,
        rule: RemoteOptimizer,
        outgoing: GradientSender,
        passes: int,
        free: Callable[[list[str]], None],
    ) -> None:
        self._rule = rule
        self.params: Mapping[str, torch.Tensor] = rule.params
        """Name -> parameter."""
        self._outgoing = outgoing
        self._free = free
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
        param = self.params[name]
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
        param = self.params[name]
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
        self._rule.go_on(error)

    def end_pass(self) -> None:
        """A backward pass is over."""
        self._done.clear()
        self._unless_given_up(self._outgoing.flush)

    def _unless_given_up(self, call: Callable[[], None]) -> None:
        """Make a call that lets gradients leave, and give the step up if the servers have returned."""
        if self.is_given_up:
            return
        try:
            call()
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
                missing, "the last step()", "Use them, or set requires_grad_(False) on them before shard()"
            )
        for name in self._rule.trained:
            if self.params[name].grad is not None:
                self._leave(name)
        self.end_pass()
        self._unless_given_up(lambda: self._outgoing.wait(self._outgoing.limit_bytes))
        self.begin()

    def begin(self) -> None:
        """A step is over: later gradients are of the next."""
        self._outgoing.begin()
        self.hooks.begin()
        self._left.clear()
        self._done.clear()
        self.is_given_up = False
