"""Means over all workers: of losses, accuracies, anything that is a number or a tensor of numbers."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Mapping
from typing import Any

import torch

from kvps.errors import ConfigError
from kvps.store.kvstore import KVStore
from kvps.torch.sync.shared_stores import Options, own_store


def average(
    value: Any,
    name: str | None = None,
    weight: float = 1.0,
    *,
    kvstore: str | KVStore = "dist_sync",
    kvstore_options: Options = None,
) -> Any:
    """Return the mean of ``value`` over all workers; every worker calls.

    Sums are taken in float64. Workers that have left do not count; nor do workers that have joined, if
    ``kvstore`` is the store that they joined.

    Args:
        value: a number, a tensor, or a dict of these, with the same structure on every worker.
        name: pairs this call with calls of that name only.
        weight: the weight of this worker's value, such as the number of its examples.
        kvstore: a kind of store that sums, or such a store.
        kvstore_options: ``timeout``, ``on_worker_lost`` and ``worker_grace`` as in :func:`kvps.create`, for a
            ``kvstore`` that is named.

    Returns:
        A float for a number; for a tensor, a new tensor on its device, of its type if that is floating point,
        else float64; for a dict, a dict. NaN if all weights are 0.

    Raises:
        ConfigError: for anything else. Timeout: if a worker does not call, or has another shape.

    Example:
        >>> import kvps.torch
        >>> seen = kvps.torch.average({"loss": 0.5, "accuracy": 0.9}, weight=128)  # doctest: +SKIP
    """
    if not isinstance(weight, numbers.Real) or isinstance(weight, bool) or not 0 <= weight < float("inf"):
        raise ConfigError(f"weight={weight!r}: use a number, 0 or more")
    is_many = isinstance(value, Mapping)
    some: dict[Any, Any] = dict(value) if is_many else {None: value}
    order = sorted(some, key=str)
    rows = [_row(key, some[key]) for key in order]
    flat = torch.cat(
        [*(row.view(-1) * weight for row in rows), torch.tensor([weight], device="cpu").double()]
    )
    if not weight:
        flat.zero_()  # also where the value is not finite
    kv = own_store("average", kvstore, kvstore_options)
    if kv.num_workers > 1:
        said = repr([(str(key), tuple(row.shape)) for key, row in zip(order, rows, strict=True)])
        digest = hashlib.blake2b(said.encode(), digest_size=8).hexdigest()
        key = f"kvps.average/{name or ''}"[:230] + f"/{digest}"
        if key not in kv.keys():  # noqa: SIM118  # it is no dict
            kv.init(key, torch.zeros_like(flat))
        kv.pushpull(key, flat, out=flat)
    means = torch.split(flat[:-1] / flat[-1], [row.numel() for row in rows])
    found = {
        key: _like(some[key], mean.view(row.shape)) for key, row, mean in zip(order, rows, means, strict=True)
    }
    return {key: found[key] for key in some} if is_many else found[None]


def _row(key: object, value: object) -> torch.Tensor:
    """Return ``value`` in float64 on the CPU."""
    where = "value" if key is None else f"value[{key!r}]"
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_complex():
            return value.detach().to("cpu", torch.float64).contiguous()
        raise ConfigError(f"{where} is a tensor of {value.dtype}, {value.layout}; use a real, dense tensor")
    if isinstance(value, numbers.Real):
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    raise ConfigError(f"{where} is a {type(value).__name__}; use a number, a tensor, or a dict of these")


def _like(value: object, mean: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return mean.item()
    dtype = value.dtype if value.is_floating_point() else torch.float64
    return mean.to(value.device, dtype, copy=True)
