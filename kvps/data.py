"""Samplers and batch splitting: the examples of each worker, of each of its devices, and from a step on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from kvps.errors import ConfigError, Mismatch
from kvps.store.base import KVStoreBase

T = TypeVar("T")
Device: TypeAlias = "str | int | torch.device"
_READING = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "pin_memory_device"),
)
"""The arguments of a DataLoader that say how it reads a batch."""


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
            f"a batch of {size} cannot be split over {count} devices; use a larger batch or fewer devices"
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
    dataset: Dataset[T], kv: KVStoreBase, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler[T]:
    """Return a sampler that gives this worker its share of ``dataset``, for a DataLoader.

    All workers get equally many examples, so that every worker pushes in every round: examples are repeated
    to fill up the last round, or skipped with ``drop_last``. Call ``sampler.set_epoch(epoch)`` before each
    epoch; otherwise every epoch has the same order.

    Where workers come and go (``N:MAX`` workers), an epoch is divided among the workers that are there when
    a worker calls ``set_epoch``. A worker that comes or goes later changes nothing in the epoch of the
    others: some examples are then read twice, or not at all, until each has begun its next epoch.

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
    how: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    if kv.present is not None:
        return _PresentSampler(dataset, kv, **how)
    return DistributedSampler(dataset, kv.num_workers, kv.rank, **how)


class _PresentSampler(DistributedSampler[T]):
    """A sampler that divides each epoch among the workers that are there when it begins."""

    def __init__(self, dataset: Dataset[T], kv: KVStoreBase, **how: Any) -> None:
        super().__init__(dataset, 1, 0, **how)
        self._kv = kv
        self._look()

    def _look(self) -> None:
        """Take in which workers there are."""
        ranks = self._kv.present
        assert ranks is not None
        super().__init__(
            self.dataset, len(ranks), ranks.index(self._kv.rank), self.shuffle, self.seed, self.drop_last
        )

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: the order of the examples, and the workers that share them."""
        self._look()
        super().set_epoch(epoch)


def epochs_from(loader: DataLoader[T], start: int, epochs: int) -> Iterator[tuple[int, Iterable[Any]]]:
    """Yield the number of each epoch and its batches, from step ``start`` of the job on.

    So a script that :meth:`Trainer.resume` has begin at a step reads the batches that it would
    have read there. Each epoch begins with ``set_epoch(epoch)`` of the loader's sampler, if it has
    that. The batches of the first epoch before ``start`` are not read; a subclass of DataLoader
    reads them, and drops them.

    Args:
        loader: a DataLoader with a length. The order of its sampler follows from the epoch, as with
            :func:`data_sampler`, or is always the same.
        start: the number of batches that this rank has behind it, of all epochs.
        epochs: the number of epochs of the job.

    Raises:
        ConfigError: for a loader without a length, or one that draws its order at random, which
            cannot be repeated.

    Example:
        >>> start = trainer.resume()  # doctest: +SKIP
        >>> for epoch, batches in kvps.epochs_from(loader, start, epochs):  # doctest: +SKIP
        ...     for x, y in batches: ...
    """
    sampler = _checked_sampler(loader)
    length = len(loader)
    return _epochs(loader, sampler, *divmod(start, length), epochs)


def _epochs(
    loader: DataLoader[T], sampler: Any, first: int, skipped: int, epochs: int
) -> Iterator[tuple[int, Iterable[Any]]]:
    for epoch in range(first, epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        yield epoch, _behind(loader, skipped) if epoch == first and skipped else loader


def _checked_sampler(loader: DataLoader[T]) -> Any:
    """Return the sampler whose order follows from the epoch; None if the order is always the same."""
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.dataset, Sized):
        raise ConfigError(
            "epochs_from() needs a dataset with a length and an order: skip what was read before "
            "in your own dataset"
        )
    nested = getattr(loader.batch_sampler, "sampler", None)
    samplers = [loader.batch_sampler, nested, loader.sampler]
    for sampler in samplers:
        if hasattr(sampler, "set_epoch"):
            return sampler
    for sampler in samplers:
        if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
            raise ConfigError(
                f"{type(sampler).__name__} draws another order in each process, so that no process can go on "
                "where another was: use sampler=kvps.data_sampler(dataset, kv), and no shuffle=True"
            )
    return None


def _behind(loader: DataLoader[T], count: int) -> Iterable[Any]:
    """Return the batches of an epoch behind the first ``count``."""
    if type(loader) is not DataLoader:
        return islice(loader, count, None)
    order: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    rest = list(islice(order, count, None))
    how: dict[str, Any] = {name: getattr(loader, name) for name in _READING}
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=rest, **how)
    return DataLoader(loader.dataset, batch_sampler=rest, **how)
