"""Batches over devices, examples over workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

import kvps

if TYPE_CHECKING:
    from collections.abc import Iterator


class Store(kvps.KVStoreBase):
    """A place in a cluster, and nothing else."""

    def __init__(self, rank: int, num_workers: int) -> None:
        self._place = rank, num_workers

    @property
    def rank(self) -> int:
        return self._place[0]

    @property
    def num_workers(self) -> int:
        return self._place[1]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0


def test_single_device_gets_the_batch_as_it_is() -> None:
    batch = torch.arange(3)
    for devices in ("cpu", torch.device("cpu"), ["cpu"]):
        (only,) = kvps.split_and_load(batch, devices)
        assert only.data_ptr() == batch.data_ptr()


def test_devices_share_a_batch_equally() -> None:
    parts = kvps.split_and_load(np.arange(8).reshape(4, 2), ["cpu", "cpu"])
    assert [part.tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_the_axis_of_the_examples_can_be_chosen() -> None:
    parts = kvps.split_and_load(torch.zeros(3, 4), ["cpu", "cpu"], batch_axis=1)
    assert [part.shape for part in parts] == [(3, 2), (3, 2)]
    parts = kvps.split_and_load(torch.zeros(3, 4), ["cpu", "cpu"], batch_axis=-1)
    assert [part.shape for part in parts] == [(3, 2), (3, 2)]


def test_without_even_split_the_first_slices_get_one_more() -> None:
    parts = kvps.split_and_load(torch.arange(8), ["cpu"] * 3, even_split=False)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("size", "options", "text"),
    [
        (7, {}, "multiple of 3.*drop_last=True.*even_split=False"),
        (2, {"even_split": False}, "larger batch or fewer devices"),
        (6, {"batch_axis": 1}, "no axis 1"),
    ],
)
def test_indivisible_batch_is_a_value_error_with_advice(
    size: int, options: dict[str, int], text: str
) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        kvps.split_and_load(torch.arange(size), ["cpu"] * 3, **options)
    assert isinstance(caught.value, kvps.KvpsError)


def test_no_device_is_an_error() -> None:
    with pytest.raises(kvps.ConfigError, match="needs a device"):
        kvps.split_and_load(torch.arange(3), [])


def test_samplers_share_a_dataset_out() -> None:
    dataset = TensorDataset(torch.arange(12))
    shares = [list(kvps.data_sampler(dataset, Store(rank, 3))) for rank in range(3)]
    assert [len(share) for share in shares] == [4, 4, 4]
    assert sorted(index for share in shares for index in share) == list(range(12))


@pytest.mark.parametrize(("drop_last", "each"), [(False, 4), (True, 3)])
def test_all_workers_get_equally_many_examples(drop_last: bool, each: int) -> None:
    dataset = TensorDataset(torch.arange(10))
    samplers = [kvps.data_sampler(dataset, Store(rank, 3), drop_last=drop_last) for rank in range(3)]
    assert [len(list(sampler)) for sampler in samplers] == [each] * 3


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    dataset = TensorDataset(torch.arange(50))
    sampler = kvps.data_sampler(dataset, Store(0, 1), seed=5)
    first = list(sampler)
    assert first == list(kvps.data_sampler(dataset, Store(0, 1), seed=5))
    assert first != list(kvps.data_sampler(dataset, Store(0, 1), seed=6))
    sampler.set_epoch(1)
    assert first != list(sampler)
    assert list(kvps.data_sampler(dataset, Store(0, 1), shuffle=False)) == list(range(50))


def test_a_dataset_without_a_length_is_an_error() -> None:
    with pytest.raises(kvps.ConfigError, match=r"Endless has no length.*kv\.rank"):
        kvps.data_sampler(Endless(), Store(0, 1))


# --- from a step on -----------------------------------------------------------------------------------


class Counted(torch.utils.data.Dataset[int]):
    """Numbers, and how many of them were read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index


class OwnLoader(DataLoader[int]):
    """A subclass, which may have arguments of its own."""


def loaders(data: Counted) -> dict[str, DataLoader[int]]:
    sampler: DistributedSampler[int] = kvps.data_sampler(data, Store(1, 2))
    return {
        "sampler": DataLoader(data, 3, sampler=sampler),
        "last batch dropped": DataLoader(data, 3, sampler=sampler, drop_last=True),
        "batch sampler": DataLoader(data, batch_sampler=BatchSampler(sampler, 3, False)),
        "no batches": DataLoader(data, batch_size=None, sampler=sampler),
        "in order": DataLoader(data, 4, sampler=SequentialSampler(data)),
        "subclass": OwnLoader(data, 3, sampler=sampler),
    }


def read(loader: DataLoader[int], start: int, epochs: int = 3) -> list[tuple[int, list[int]]]:
    return [
        (epoch, batch.tolist() if isinstance(batch, torch.Tensor) else batch)
        for epoch, batches in kvps.epochs_from(loader, start, epochs)
        for batch in batches
    ]


@pytest.mark.parametrize("name", loaders(Counted(4)))
def test_a_script_reads_from_its_step_on_the_batches_of_a_whole_run(name: str) -> None:
    whole = read(loaders(Counted(23))[name], 0)
    for start in range(len(whole) + 1):
        assert read(loaders(Counted(23))[name], start) == whole[start:]
    assert len({str(epoch) for epoch, _ in whole}) == 3


def test_batches_before_the_step_are_not_read() -> None:
    data = Counted(24)
    loader = loaders(data)["sampler"]
    assert len(read(loader, start=10)) == 2
    assert data.read == 6


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(Counted(4), shuffle=True), "RandomSampler draws another order in each process"),
        (DataLoader(Endless()), "a dataset with a length"),
    ],
)
def test_an_order_that_cannot_be_repeated_is_refused(loader: DataLoader[int], why: str) -> None:
    with pytest.raises(kvps.ConfigError, match=why):
        kvps.epochs_from(loader, 0, 1)
