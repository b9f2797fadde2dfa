"""MXNet's names for scripts of its KVStore: ``import kvps.compat.mx as mx``, with torch tensors in
place of MXNet's arrays.

Stores, optimizers and their arguments have the names, the argument order and the defaults of MXNet
1.9.1. A name of MXNet that is not here raises AttributeError with the way out;
:doc:`/migrating/mxnet-names` lists them all.

Example:
    >>> import kvps.compat.mx as mx
    >>> kv = mx.kv.create("local")
    >>> kv.init(3, mx.nd.zeros((2,)))
    >>> kv.push(3, [mx.nd.ones((2,)), mx.nd.ones((2,))])
    >>> out = mx.nd.empty((2,))
    >>> kv.pull(3, out=out)
    >>> out.asnumpy().tolist()
    [2.0, 2.0]
"""

from __future__ import annotations

import torch

from kvps.compat.mx import gluon, kvstore, ndarray, optimizer
from kvps.compat.mx.elsewhere import ELSEWHERE, missing

kv = kvstore
nd = ndarray
opt = optimizer

__all__ = ["gluon", "kv", "kvstore", "nd", "ndarray", "opt", "optimizer"]
__all__ += ["cpu", "cpu_pinned", "current_context", "gpu", "num_gpus"]


def cpu(device_id: int = 0) -> torch.device:
    """Return the device of the CPU; every ``device_id`` is the same memory, as in MXNet.

    Example:
        >>> import torch, kvps.compat.mx as mx
        >>> mx.cpu(1)
        device(type='cpu')
    """
    return torch.device("cpu")


def cpu_pinned(device_id: int = 0) -> torch.device:
    """Return the device of the CPU: kvps stages values of GPUs in page-locked memory by itself."""
    return torch.device("cpu")


def gpu(device_id: int = 0) -> torch.device:
    """Return a CUDA device.

    Example:
        >>> import torch, kvps.compat.mx as mx
        >>> mx.gpu(1)
        device(type='cuda', index=1)
    """
    return torch.device("cuda", device_id)


def num_gpus() -> int:
    """Return the number of devices of the accelerator's type."""
    return torch.accelerator.device_count()


def current_context() -> torch.device:
    """Return the device on which ``mx.nd`` creates arrays: the CPU."""
    return torch.device("cpu")


def __getattr__(name: str) -> object:
    raise missing("mx", name, ELSEWHERE)
