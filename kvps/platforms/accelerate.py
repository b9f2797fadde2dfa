"""Accelerate with a DistributedOptimizer: models that it prepares stay without DistributedDataParallel.

Both would average the same gradients. Hugging Face's Trainer uses an Accelerator, too. It asks for
the norm of the gradients by clipping them at infinity, which writes to gradients that are on their
way; here that only reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator

from kvps.errors import ConfigError


def without_ddp(accelerator: Accelerator) -> Accelerator:
    """Have ``accelerator.prepare()`` leave out DistributedDataParallel, and nothing else; return
    the accelerator.

    For models whose optimizer is a :class:`kvps.torch.DistributedOptimizer`, which averages their gradients.

    Args:
        accelerator: an Accelerator, or the accelerator of a transformers Trainer
            (``trainer.accelerator``), which has not prepared a model yet.

    Raises:
        ConfigError: if it prepares models by DeepSpeed, FSDP or Megatron, which have optimizers of
            their own; or if it has prepared a model.

    Example:
        >>> from accelerate import Accelerator  # doctest: +SKIP
        >>> accelerator = without_ddp(Accelerator(cpu=True))  # doctest: +SKIP
        >>> model, loader = accelerator.prepare(model, loader)  # doctest: +SKIP
    """
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ConfigError(f"an Accelerator with {kind} needs its own optimizers; use MULTI_GPU or MULTI_CPU")
    if accelerator._models:
        raise ConfigError("the Accelerator has prepared a model: call without_ddp() before prepare()")
    prepare, clip = accelerator.prepare_model, accelerator.clip_grad_norm_

    def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        return prepare(model, device_placement=device_placement, evaluation_mode=True)

    def clip_grad_norm_(
        parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Any:
        if not math.isinf(max_norm):
            return clip(parameters, max_norm, norm_type=norm_type)
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        grads = [param.grad for param in params if param.grad is not None]
        return torch.nn.utils.get_total_norm(grads, norm_type)

    accelerator.prepare_model, accelerator.clip_grad_norm_ = prepare_model, clip_grad_norm_
    return accelerator
