"""Samplers and batch splitting: the examples of each worker, and of each of its devices."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils.data import Dataset, DistributedSampler

from kvps.errors import ConfigError, Mismatch
from kvps.store.base import KVStoreBase

T = TypeVar("T")
Device: TypeAlias = "str | int | torch.device"


def split_and_load(
    batch: Any, devices: Device | Sequence[Device], batch_axis: int = 0, even_split: bool = True
) -> list[torch.Tensor]:
    """Split a batch into one slice per device, and move each slice to its device.

    Args:
        batch: a tensor or a numpy array. A slice that stays on its device shares the memory of the batch.
        devices: a device or a list of devices; for a single device, the batch is not split.
        batch_axis: the axis of the examples.
        even_split: refuse a batch that the devices cannot share equally; otherwise the first ``size % n``
            slices get one more example.

    Raises:
        Mismatch: (a ValueError) if the batch cannot be split like that.

    Example:
        >>> import torch, kvps
        >>> kvps.split_and_load(torch.arange(3), ["cpu", "cpu"], even_split=False)
        [tensor([0, 1]), tensor([2])]
    """
    targets = [devices] if isinstance(devices, str | int | torch.device) else list(devices)
    if not targets:
        raise ConfigError("split_and_load needs a device, such as ['cpu'] or ['cuda:0', 'cuda:1']")
    tensor = torch.as_tensor(batch)
    if not -tensor.dim() <= batch_axis < tensor.dim():
        raise Mismatch(f"a batch of shape {tuple(tensor.shape)} has no axis {batch_axis}")
    size, count = tensor.shape[batch_axis], len(targets)
    if count == 1:
        return [tensor.to(targets[0])]
    if size < count:
        raise Mismatch(
            f"a batch of {size} cannot be split over {count} devices; use a larger batch or fewer "
            "devices"
        )
    if even_split and size % count:
        raise Mismatch(
            f"a batch of {size} cannot be split evenly over {count} devices; use a batch size that "
            f"is a multiple of {count} (drop_last=True in the DataLoader skips the smaller last "
            "batch), or even_split=False"
        )
    slices = torch.tensor_split(tensor, count, dim=batch_axis)
    return [part.to(device) for part, device in zip(slices, targets, strict=True)]


def data_sampler(
    dataset: Dataset[T],
    kv: KVStoreBase,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> DistributedSampler[T]:
    """Return a sampler that gives this worker its share of ``dataset``, for a DataLoader.

    All workers get equally many examples, so that every worker pushes in every round: examples are repeated
    to fill up the last round, or skipped with ``drop_last``. Call ``sampler.set_epoch(epoch)`` before each
    epoch; otherwise every epoch has the same order.

    Args:
        dataset: a dataset with a length.
        kv: a store: its ``rank`` and ``num_workers`` decide.
        shuffle: draw the examples in an order that ``seed`` and the epoch decide, the same for
            all workers.
        seed: give the same on every worker.
        drop_last: skip the examples that cannot be divided equally.

    Raises:
        ConfigError: for a dataset without a length.

    Example:
        >>> sampler = kvps.data_sampler(dataset, kv)  # doctest: +SKIP
        >>> loader = DataLoader(dataset, batch_size=32, sampler=sampler)  # doctest: +SKIP
    """
    if not isinstance(dataset, Sized):
        raise ConfigError(
            f"{type(dataset).__name__} has no length, so it cannot be divided; let each worker "
            "read its own part, by kv.rank and kv.num_workers"
        )
    return DistributedSampler(
        dataset, kv.num_workers, kv.rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
