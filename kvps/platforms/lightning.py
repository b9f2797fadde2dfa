"""A Lightning strategy whose optimizers run on the servers, or average gradients over all workers.

Lightning's own ``DDPStrategy(process_group_backend="kvps")`` needs nothing of this: it makes a
DistributedDataParallel over the backend "kvps". Here the model stays as it is, and each optimizer
of the module becomes a :class:`~kvps.torch.DistributedOptimizer` with a store of its own. All else
is DDPStrategy's: ranks, samplers, checkpoints, and the collectives of
``self.log(sync_dist=True)``, which go over the backend "kvps", too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from kvps.errors import ConfigError
from kvps.torch import DistributedOptimizer

NAME = "kvps"


class KvpsStrategy(DDPStrategy):
    """Trains a LightningModule with optimizers that average gradients over all workers.

    After this module is imported, ``Trainer(strategy="kvps")`` means ``KvpsStrategy()``.

    Args:
        kvstore: the type of store, such as ``"dist_sync"`` or ``"dist_async"``.
        update_on_kvstore: run the optimizers on the servers; the workers receive weights. Optimizers with
            ``gradient_clip_val`` and precision plugins with a scaler need False, or torch's
            autocast without one.
        compression: as for :class:`~kvps.torch.DistributedOptimizer`.
        more: the other arguments of DDPStrategy.

    Raises:
        ConfigError: for arguments that belong to DistributedDataParallel, when training begins
            with an optimizer that the servers cannot run, or with ``gradient_clip_val`` and
            ``update_on_kvstore=True``.

    Example:
        >>> from lightning.pytorch import Trainer  # doctest: +SKIP
        >>> strategy = KvpsStrategy("dist_async")  # doctest: +SKIP
        >>> Trainer(accelerator="cpu", devices=2, strategy=strategy).fit(module, loader)  # doctest: +SKIP
    """

    strategy_name = NAME

    def __init__(
        self,
        kvstore: str = "dist_sync",
        *,
        update_on_kvstore: bool = True,
        compression: str | Mapping[str, Any] | None = None,
        kvstore_options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        ddp = [name for name in more if name.startswith("ddp_") or name in DDP_ARGUMENTS]
        if ddp:
            raise ConfigError(
                f"KvpsStrategy makes no DistributedDataParallel, which {', '.join(ddp)} is for: leave it "
                "out, or use DDPStrategy(process_group_backend='kvps')"
            )
        super().__init__(**{"process_group_backend": NAME} | more)
        self._kvstore = kvstore
        self._is_on_kvstore = bool(update_on_kvstore)
        self._compression = compression
        self._options = kvstore_options

    def configure_ddp(self) -> None:
        """Leave the model as it is."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the module's optimizers, and have each average its gradients, or run on the servers.

        Raises:
            ConfigError: see :class:`KvpsStrategy`.
        """
        super().setup_optimizers(trainer)
        if self._is_on_kvstore and trainer.gradient_clip_val:
            raise ConfigError(
                f"gradient_clip_val={trainer.gradient_clip_val} clips gradients here, and with "
                "update_on_kvstore=True the servers have their mean: use "
                "KvpsStrategy(update_on_kvstore=False)"
            )
        optimizers: list[torch.optim.Optimizer] = list(self.optimizers)
        self.optimizers = [self._distributed(optimizer, len(optimizers) == 1) for optimizer in optimizers]

    def _distributed(self, optimizer: torch.optim.Optimizer, is_only: bool) -> DistributedOptimizer:
        module = self.lightning_module
        assert module is not None
        mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
        named = [(name, param) for name, param in module.named_parameters() if id(param) in mine]
        return DistributedOptimizer(
            optimizer,
            module if is_only and len(named) == len(list(module.parameters())) else named,
            self._kvstore,
            self._compression,
            update_on_kvstore=self._is_on_kvstore,
            kvstore_options=self._options,
        )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Only accumulate gradients of backward passes inside: Lightning's ``accumulate_grad_batches``."""
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                if isinstance(optimizer, DistributedOptimizer):
                    stack.enter_context(optimizer.no_sync())
            yield

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make ``Trainer(strategy="kvps")`` known."""
        strategy_registry.register(NAME, cls, description="optimizers on the servers of a kvps cluster")


DDP_ARGUMENTS = (
    *("model_averaging_period", "find_unused_parameters", "static_graph", "bucket_cap_mb"),
    *("gradient_as_bucket_view", "broadcast_buffers", "check_reduction"),
)
"""Arguments of DDPStrategy that only concern DistributedDataParallel."""

KvpsStrategy.register_strategies(StrategyRegistry)
