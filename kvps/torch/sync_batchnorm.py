"""Batch normalisation over the batches of all workers.

If each worker has few examples, their mean and variance are too noisy for normalisation. Here workers
exchange three sums per layer and forward pass, and two in the backward pass::

    forward   count, sum of x, sum of x²              -> mean and variance of the whole batch
    backward  sum of dy, sum of dy · (x - mean)       -> the gradient of x

They travel in float64, so that the difference of x² and mean² is accurate. torch's stable kernel computes the
means and variances of each worker's own examples, in float32 for half types.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own habit
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from kvps.errors import ConfigError
from kvps.runtime.current import claim, demand_own_device
from kvps.store.kvstore import KVStore
from kvps.torch.sync.shared_stores import Options, own_store

PREFIX = "kvps.batchnorm/"
"""The prefix of the keys."""


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d over the batches of all workers; outputs equal the outputs of one process
    with all of them.

    Every worker runs the same layers in the same order. Batches may differ in size, and may be empty. In
    evaluation, and with one worker, it is torch's own layer. As there, gradients of ``weight`` and ``bias``
    are those of this worker's examples: the trainer sums them.

    Args:
        num_features: channels: the size of dimension 1 of its input, which has two or more.
        eps: added to the variance.
        momentum: of running statistics; None for their plain mean.
        affine: have a weight and a bias.
        track_running_stats: keep running statistics for evaluation.
        device: of parameters and statistics.
        dtype: of parameters and statistics.
        kvstore: a kind of store that sums, or such a store.
        kvstore_options: ``timeout``, ``on_worker_lost`` and ``worker_grace`` as in :func:`kvps.create`, for a
            ``kvstore`` that is named.

    Raises:
        ConfigError: in a forward pass, for an input of fewer than 2 dimensions, if there is one value
            per channel in all, or if other workers of this process train on the same accelerator.

    Example:
        >>> import torch, kvps.torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4))
        >>> type(kvps.torch.SyncBatchNorm.convert_sync_batchnorm(model)[1]).__name__
        'SyncBatchNorm'
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kvstore: str | KVStore = "dist_sync",
        kvstore_options: Options = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._kvstore, self._options = kvstore, kvstore_options
        self._exchange: StatisticsExchange | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        """Normalise ``input``, of shape (N, C, ...)."""
        self._check_input_dim(input)
        exchange = self._found_exchange() if self.training else None
        if exchange is None:
            return super().forward(input)
        factor = self._factor()
        running = (self.running_mean, self.running_var) if self.track_running_stats else None
        is_device_shared = claim([input])
        result: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]  # torch has no types there
            input, self.weight, self.bias, running, factor, self.eps, exchange
        )
        demand_own_device(result.requires_grad and is_device_shared(), "SyncBatchNorm", input.device)
        return result

    def _check_input_dim(self, input: torch.Tensor) -> None:  # torch's name
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ConfigError(
                f"SyncBatchNorm({self.num_features}) needs an input of shape (N, {self.num_features}, "
                f"...), got {tuple(input.shape)}"
            )

    def _factor(self) -> float:
        """Return the share of this batch in the running statistics, and count the batch."""
        if not self.track_running_stats or self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            return 1.0 / float(self.num_batches_tracked)
        return self.momentum

    def _found_exchange(self) -> Exchange | None:
        """Return the exchange of this layer's sums; None if there is one worker."""
        kv = own_store("batchnorm", self._kvstore, self._options)
        if kv.num_workers == 1:
            return None
        if self._exchange is None or self._exchange.kv is not kv:
            self._exchange = StatisticsExchange(kv, self.num_features)
        return self._exchange

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy of this layer, without its place in a store."""
        return {**self.__dict__, "_exchange": None}

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, *, kvstore: str | KVStore = "dist_sync", kvstore_options: Options = None
    ) -> torch.nn.Module:
        """Return ``module`` with each BatchNorm in it replaced by one of these, values kept.

        A module that is a BatchNorm itself is not changed; its replacement is returned.
        """
        if isinstance(module, cls):
            return module
        if isinstance(module, _BatchNorm):
            return cls._converted(module, kvstore, kvstore_options)
        for name, child in module.named_children():
            new = cls.convert_sync_batchnorm(child, kvstore=kvstore, kvstore_options=kvstore_options)
            if new is not child:
                setattr(module, name, new)
        return module

    @classmethod
    def _converted(cls, old: _BatchNorm, kvstore: str | KVStore, options: Options) -> SyncBatchNorm:
        new = cls(
            old.num_features,
            old.eps,
            old.momentum,
            old.affine,
            old.track_running_stats,
            kvstore=kvstore,
            kvstore_options=options,
        )
        new.training = old.training
        if old.affine:
            new.weight, new.bias = old.weight, old.bias
        new.running_mean, new.running_var = old.running_mean, old.running_var
        new.num_batches_tracked = old.num_batches_tracked
        return new


class Exchange(Protocol):
    """The sums of one layer over all workers."""

    def __call__(self, way: str, sums: torch.Tensor) -> torch.Tensor:
        """Return the sum over workers, in float64: of 2 · C + 1 numbers "forward", of 2 · C "backward"."""


class StatisticsExchange:
    """The sums of one layer: two keys of a store, numbered by order of first forward passes."""

    def __init__(self, kv: KVStore, channels: int) -> None:
        self.kv = kv
        number = sum(key.startswith(PREFIX) and key.endswith("forward") for key in kv.keys())  # noqa: SIM118  # it is no dict
        self._keys = {way: f"{PREFIX}{number}/{way}" for way in ("forward", "backward")}
        sizes = (2 * channels + 1, 2 * channels)
        blanks = [torch.zeros(size, dtype=torch.float64, device="cpu") for size in sizes]
        kv.init([*self._keys.values()], blanks)

    def __call__(self, way: str, sums: torch.Tensor) -> torch.Tensor:
        """Return the sum over workers."""
        total: torch.Tensor = self.kv.pushpull(self._keys[way], sums, out=torch.empty_like(sums))
        return total


class _Normalise(torch.autograd.Function):
    """The layer, with its exchange in both passes."""

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: tuple[torch.Tensor, torch.Tensor] | None,
        factor: float,
        eps: float,
        exchange: Exchange,
    ) -> torch.Tensor:
        x = _wide(given)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        channels, count = x.shape[1], x.numel() // max(1, x.shape[1])
        if count:
            var, mean = (moment.double() for moment in torch.var_mean(x, dims, correction=0))
        else:
            var = mean = torch.zeros(channels, dtype=torch.float64, device=x.device)
        own = torch.full((1,), float(count), dtype=torch.float64, device=x.device)
        sums = exchange("forward", torch.cat([own, count * mean, count * (var + mean * mean)]))
        total = float(sums[0])
        if total <= 1:
            raise ConfigError(
                f"SyncBatchNorm needs more than 1 value per channel over all workers, got {total:g}"
            )
        mean = sums[1 : channels + 1] / total
        var = (sums[channels + 1 :] / total - mean * mean).clamp_min(0)
        if running is not None:
            unbiased = var * (total / (total - 1))
            for kept, new in zip(running, (mean, unbiased), strict=True):
                kept.lerp_(new.to(kept.dtype), factor)
        mean_x, var_x = mean.to(x.dtype), var.to(x.dtype)
        w = None if weight is None else weight.to(x.dtype)
        b = None if bias is None else bias.to(x.dtype)
        ctx.save_for_backward(given, weight, mean_x, (var + eps).rsqrt().to(x.dtype))
        ctx.exchange, ctx.total = exchange, total
        return F.batch_norm(x, mean_x, var_x, w, b, False, 0.0, eps).to(given.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        given, weight, mean, invstd = ctx.saved_tensors
        x, dy = _wide(given), _wide(grad)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        centred = x - mean.view(shape)
        sum_dy, sum_dy_x = dy.sum(dims), (dy * centred).sum(dims)
        grad_weight = grad_bias = grad_given = None
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = (sum_dy_x * invstd).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = sum_dy if weight is None else sum_dy.to(weight.dtype)
        # Also where this worker needs no gradient of x: others may, and wait for its sums.
        sums = ctx.exchange("backward", torch.cat([sum_dy, sum_dy_x]).double())
        if ctx.needs_input_grad[0]:
            mean_dy, mean_dy_x = (sums / ctx.total).to(x.dtype).view(2, -1)
            scale = invstd if weight is None else invstd * weight.to(x.dtype)
            slope = (mean_dy_x * invstd * invstd).view(shape)
            dx = (dy - mean_dy.view(shape) - centred * slope) * scale.view(shape)
            grad_given = dx.to(given.dtype)
        return grad_given, grad_weight, grad_bias, None, None, None, None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in float32 if it is of a half type."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
