"""DistributedDataParallel's gradients through a store that compresses them: a communication hook.

Theory of operation
-------------------
DistributedDataParallel lays gradients side by side in *buckets*, and calls a hook for each that is full,
while backward goes on. The hook here cuts a bucket into its parameters, each of which has a key of its own in
a store that computes means, and pushes and pulls them in one call. So a parameter keeps its residual,
although DistributedDataParallel builds other buckets after the first step; and biases, which are small, are
not compressed (``min_bytes``). The mean comes back into the bucket.

The hook does not wait. A separate thread completes its future, because callbacks of the future may wait for
other buckets.
"""

# Without ``from __future__ import annotations``: torch compares a hook's annotations with the classes.

import threading
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from kvps.errors import ConfigError
from kvps.runtime.ticket import Handle
from kvps.store import residual_state
from kvps.store.autotune.workload import Workload
from kvps.store.kvstore import KVStore
from kvps.store.names import kind_of
from kvps.torch.sync.parameter_sync import named, store_of
from kvps.torch.sync.same_model import demand_same

OWNER = "torch.comm_hook"
KINDS = ("dist_sync", "dist_sync_device")
"""Stores that compute means and compress."""


class CommState:
    """The state of :func:`comm_hook`: a store, and its compression. Every rank creates the same.

    Args:
        compression: as for :meth:`kvps.KVStore.set_gradient_compression`: ``"fp16"``, or ``{"type": "2bit",
            "threshold": 0.01}``; None for no compression.
        kvstore: ``"dist_sync"``, ``"dist_sync_device"``, or such a store created with ``average=True``, which
            then serves nothing else; None for ``"dist_sync"``.
        named_parameters: a module, or its ``named_parameters()``: the patterns of ``rules`` match these
            names. None numbers the parameters in the order of their first gradients.
        kvstore_options: ``timeout``, ``on_worker_lost`` and ``worker_grace`` as in :func:`kvps.create`, for a
            ``kvstore`` that is named.

    Raises:
        ConfigError: for invalid arguments.

    Example:
        >>> ddp = torch.nn.parallel.DistributedDataParallel(model)  # doctest: +SKIP
        >>> state = kvps.torch.CommState({"type": "2bit", "threshold": 0.01})  # doctest: +SKIP
        >>> ddp.register_comm_hook(state, kvps.torch.comm_hook)  # doctest: +SKIP
    """

    def __init__(
        self,
        compression: str | Mapping[str, Any] | None,
        kvstore: str | KVStore | None = None,
        named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        kvstore_options: Mapping[str, Any] | None = None,
    ) -> None:
        wanted = KINDS[0] if kvstore is None else kvstore
        if isinstance(wanted, str) and kind_of(wanted).type not in KINDS:
            raise ConfigError(f"kvstore={wanted!r}: use one of {', '.join(KINDS)}")
        self._is_numbered = named_parameters is None
        given = {} if named_parameters is None else named(named_parameters)
        self._names: dict[torch.Tensor, str] = {one: name for name, one in given.items()}
        work = (
            Workload(str(wanted), given, average=True, compression=compression) if given else None
        )
        self._kv = _checked(store_of(wanted, OWNER, kvstore_options, average=True, work=work))
        residual_state.compress(self._kv, compression, "compression")
        demand_same(self._kv, "CommState", given, {})

    @property
    def kvstore(self) -> KVStore:
        """The store that averages gradients."""
        return self._kv

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of this rank's gradients; each rank saves its own."""
        return residual_state.state_of(self._kv)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's :meth:`state_dict`; that of another rank is ignored, and residuals start at zero.

        Raises:
            Mismatch: if it belongs to another model.
        """
        residual_state.put(self._kv, state_dict)

    def close(self) -> None:
        """Close the store."""
        self._kv.close()

    def begin(self, bucket: GradBucket) -> Handle:
        """Push the gradients of a bucket; their mean replaces them.

        Raises:
            ConfigError: for sparse gradients, or parameters without a name here.
        """
        buffer, params = bucket.buffer(), bucket.parameters()
        if buffer.layout is not torch.strided:
            raise ConfigError(
                f"a gradient is {buffer.layout}, and comm_hook needs dense gradients: use sparse=False in "
                "the Embedding"
            )
        names = [self._name_of(param) for param in params]
        values = list(torch.split(buffer, [param.numel() for param in params]))
        known = set(self._kv.keys())
        new = [index for index, name in enumerate(names) if name not in known]
        if new:
            blank = [
                torch.zeros(len(values[index]), dtype=buffer.dtype, device="cpu") for index in new
            ]
            self._kv.init([names[index] for index in new], blank)
        # Backward ends where the next forward pass begins: each bucket is more urgent than those before.
        handle = self._kv.pushpull(
            names, values, out=values, priority=bucket.index(), async_op=True
        )
        return cast("Handle", handle)

    def _name_of(self, param: torch.Tensor) -> str:
        if self._is_numbered:
            return self._names.setdefault(param, str(len(self._names)))
        if param not in self._names:
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} has a gradient but is not in "
                "named_parameters; pass the module that DistributedDataParallel wraps"
            )
        return self._names[param]


def comm_hook(state: CommState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average a bucket over the ranks, compressed as ``state`` says.

    Register it with ``ddp.register_comm_hook(state, kvps.torch.comm_hook)``, in a process group of any
    backend whose ranks are workers of a cluster, such as those of kvps-launch.

    Args:
        state: a :class:`CommState`, of this model alone.
        bucket: a bucket of DistributedDataParallel.

    Returns:
        A future of the mean, which is in the bucket's own memory. It fails with the error of the call.

    Raises:
        ConfigError: for sparse gradients.
    """
    buffer: torch.Tensor = bucket.buffer()
    handle = state.begin(bucket)
    done: Future[None] = Future(devices=[buffer.device] if buffer.is_cuda else None)

    def settle(_: Future[None]) -> torch.Tensor:
        handle.wait()
        return buffer

    # A Python future that was given an exception counts as a success in C++; one whose callback raises
    # does not.
    mean = done.then(settle)
    finish = threading.Thread(
        target=done.set_result, args=(None,), name="kvps comm_hook", daemon=True
    )
    handle.when_over(finish.start)
    return mean


def _checked(kv: Any) -> KVStore:
    """Return a store that computes means.

    Raises:
        ConfigError: for any other.
    """
    if not isinstance(kv, KVStore) or kv.type not in KINDS:
        raise ConfigError(f"kvstore: {kv!r} is not supported; use one of {', '.join(KINDS)}")
    if kv.has_optimizer or not (kv.average or kv.num_workers == 1):
        why = "has an optimizer" if kv.has_optimizer else "adds up"
        raise ConfigError(
            f"kvstore: store {kv.name!r} {why}, and the hook needs means: create it with average=True and "
            "without an optimizer, or give the name of a store"
        )
    return kv
