"""The optimizer of a sharded model, which runs on the servers.

The script says it by a torch optimizer, which is never run and whose numbers a scheduler may change; or by
a name and numbers. What has changed is sent before the first gradient of a step leaves. By then this rank has
pulled every weight for that step, so the round before is closed, and it was closed by the old numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvps.core.optim.hyperparams import HyperParams, resolve
from kvps.errors import ConfigError, EpochChanged, ServerLost
from kvps.phrases import names_in_words
from kvps.store.server_store import DistStore
from kvps.torch.sync.arguments import check_plain
from kvps.torch.sync.owned_steps import Described
from kvps.torch.sync.parameter_sync import ParameterSync, check_groups


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
        """Give the store what has changed since the last step.

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
        assert self.hyper is not None
        if error.has_optimizer:
            self.tell_rate(self.hyper.number("lr"))
        else:
            self.install(self.hyper)
