"""Requests of a store with servers: rows from devices, in memory that a transport sends without a copy."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvps.runtime.cuda_staging import Staging, ready_on_device
from kvps.store.arguments import KnownKeys, check_values, reduce, values_of
from kvps.store.device_codec import DeviceCodec
from kvps.store.requests import Requests
from kvps.tensors import Array


class ServerRequests(Requests):
    """The requests of one store with servers.

    Args:
        store, keys, on_device: as :class:`~kvps.store.requests.Requests`.
        codec: compresses the values of each device, in place of their sum on its way to servers.
        staging: brings rows from devices.
        allocate: returns memory for some keys, within a limit in seconds.
    """

    def __init__(
        self,
        store: str,
        keys: KnownKeys,
        on_device: bool,
        codec: DeviceCodec | None,
        staging: Staging,
        allocate: Callable[[tuple[str, ...], float], list[torch.Tensor]],
    ) -> None:
        super().__init__(store, keys, on_device, knows_changes=True)
        self._codec = codec
        self._staging = staging
        self._allocate = allocate

    def plain(self, names: tuple[str, ...], given: object) -> tuple[torch.Tensor, ...] | None:
        """Return values that are rows as they are: none where each device's are compressed."""
        if self._codec is not None and not self.compression.are_off:
            return None
        return super().plain(names, given)

    def rows(
        self, names: tuple[str, ...], is_many: bool, value: object, limit_s: float
    ) -> tuple[torch.Tensor, ...]:
        """Return one row for each key; values of devices are compressed and decoded before they are summed."""
        if self._codec is None or self.compression.are_off:
            return super().rows(names, is_many, value, limit_s)
        values = values_of(names, is_many, value)
        check_values(names, values, self._specs, "push")
        settings = [self.setting_of(name) for name in names]
        decoded = [
            devices if setting is None else self._codec.decoded(name, setting, devices)
            for name, setting, devices in zip(names, settings, values, strict=True)
        ]
        return self.rows_of(names, decoded, limit_s)

    def rows_of(
        self, names: tuple[str, ...], values: list[list[Array]], limit_s: float
    ) -> tuple[torch.Tensor, ...]:
        """Return one row for each key, on its device where it is compressed there, else in this machine's memory."""
        reduced = [reduce(devices, self._on_device) for devices in values]
        rows: list[torch.Tensor | None] = [
            ready_on_device(row)
            if row.is_cuda and self._codec is None and self.setting_of(name)
            else None  # a compressed row leaves its device as few bytes
            for name, row in zip(names, reduced, strict=True)
        ]
        left = [index for index, row in enumerate(rows) if row is None]
        brought = self._staging.bring(
            [reduced[index] for index in left],
            lambda indices: self._allocate(
                tuple([names[left[index]] for index in indices]), limit_s
            ),
        )
        for index, row in zip(left, brought, strict=True):
            rows[index] = row
        return tuple([row for row in rows if row is not None])
