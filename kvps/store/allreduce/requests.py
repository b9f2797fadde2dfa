"""Requests of an ``allreduce`` store: rows on the device of the collective, and copies of its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvps.errors import ConfigError
from kvps.runtime.cuda_staging import bring_back
from kvps.store.arguments import Outcome, reduce, targets_for
from kvps.store.requests import COPY_FALSE, Requests
from kvps.tensors import Array


class AllreduceRequests(Requests):
    """The requests of one ``allreduce`` store."""

    def rows_of(
        self, names: tuple[str, ...], values: list[list[Array]], limit_s: float
    ) -> tuple[torch.Tensor, ...]:
        """Return one row for each key, all of them on one device."""
        reduced = [reduce(devices, self._on_device) for devices in values]
        if len({row.device for row in reduced}) > 1:  # one collective is of one device
            reduced = [row.cpu() for row in reduced]
        return tuple(reduced)

    def wanted(self, names: tuple[str, ...], is_many: bool, out: object, copy: bool) -> Outcome:
        """Return the end of a pull: copies of the values that are at this rank, or these themselves."""
        if out is None:

            def returned(rows: Any) -> object:
                if not copy:
                    return rows if is_many else rows[0]
                copies = [row.clone() if row.device.type == "cpu" else row.cpu() for row in rows]
                return copies if is_many else copies[0]

            return Outcome((), returned)
        if not copy:
            raise ConfigError(COPY_FALSE)
        form = self._keys.form(names)
        given: Any = out if is_many else [out]
        if form is not None and form.fits(given, as_sinks=True):
            targets, places = list(given), list(range(len(given)))
        else:  # several of one key, or such as must be looked at
            lists = targets_for(names, is_many, out, self._specs)
            targets = [target for devices in lists for target in devices]
            places = [index for index, devices in enumerate(lists) for _ in devices]

        def write(rows: Any) -> object:
            deliver(targets, [rows[place] for place in places])
            return out

        return Outcome((), write)


@torch.no_grad()
def deliver(targets: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
    """Copy each row into its target, a tensor of the user's, wherever either is."""
    if all(row.is_cpu for row in (*targets, *rows)) and not any(map(torch.Tensor.is_neg, targets)):
        torch._foreach_copy_(list(targets), list(rows))  # all at once: there may be thousands
        return
    pairs = list(zip(targets, rows, strict=True))
    bring_back([(target, row) for target, row in pairs if row.is_cpu])
    for target, row in pairs:
        if row.is_cuda:
            target.copy_(row)
            row.record_stream(torch.cuda.current_stream(row.device))
