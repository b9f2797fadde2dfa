"""BytePS's DistributedDataParallel: a module whose ``backward()`` averages gradients over the ranks.

Each gradient leaves when backward has made it. A callback at the end of backward waits for all of
them, and sends the gradients of parameters that backward did not reach, since another rank may have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from kvps.compat.byteps.ops import push_pull_async_inplace, size, synchronize
from kvps.compat.horovod.compression import Compression, Compressor
from kvps.compat.horovod.engine.context import current
from kvps.compat.horovod.functions import broadcast_parameters
from kvps.runtime.current import claim, demand_own_device
from kvps.torch.sync.parameter_hooks import PassEnd, watch


class DistributedDataParallel(torch.nn.Module):
    """A module with the same parameters on every rank, whose gradients are means over the ranks.

    Args:
        module: its parameters and buffers get the values of rank 0.
        device_ids: accepted for BytePS's sake; the module stays where it is.
        broadcast_buffers: send rank 0's buffers before each forward pass in training.
        compression: of the gradients.

    Example:
        >>> model = bps.parallel.DistributedDataParallel(model)  # doctest: +SKIP
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[Any] | None = None,
        broadcast_buffers: bool = True,
        compression: type[Compressor] = Compression.none,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise ValueError(f"module: give a torch.nn.Module, got {type(module).__name__}")
        self.module = module
        self.device_ids = device_ids
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self._compression = compression
        number = next(current().numbers.setdefault("data_parallel", count()))
        self._names: dict[torch.Tensor, str] = {
            param: f"Gradient.{number}.{name}"
            for name, param in module.named_parameters()
            if param.requires_grad
        }
        self._under_way: dict[torch.Tensor, tuple[int, Any]] = {}
        self._end = PassEnd()
        is_device_shared = claim(self._names)
        broadcast_parameters(module.state_dict(), 0)
        for param in self._names if size() > 1 else ():
            demand_own_device(is_device_shared(), "DistributedDataParallel", param.device)
            watch(self._on_gradient, param, param)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self.broadcast_buffers and self.training and self.require_backward_grad_sync:
            buffers = dict(self.module.named_buffers())
            if buffers:
                broadcast_parameters(buffers, 0)
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients of backward passes inside on this rank, where they add up until the next
        pass outside."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _on_gradient(self, param: torch.Tensor) -> None:
        if not self.require_backward_grad_sync:
            return
        if self._end.wait(self._finish):
            self._under_way.clear()  # the means of a pass that failed have no reader
        self._send(param)

    def _send(self, param: torch.Tensor) -> None:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        compressed, context = self._compression.compress(param.grad)
        handle = push_pull_async_inplace(compressed, average=True, name=self._names[param])
        self._under_way[param] = handle, (compressed, context)

    @torch.no_grad()
    def _finish(self) -> None:
        """Wait until the gradients of all parameters are means."""
        for param in self._names:
            if param not in self._under_way:
                self._send(param)
        under_way, self._under_way = self._under_way, {}
        for param, (handle, (_, context)) in under_way.items():
            reduced = self._compression.decompress(synchronize(handle), context)
            assert param.grad is not None
            if reduced.data_ptr() != param.grad.data_ptr():
                param.grad.copy_(reduced)
