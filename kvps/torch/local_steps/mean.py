"""The mean of the workers' weights between two merges, in a store of its own, which has no outer
optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from kvps.errors import EpochChanged
from kvps.store import residual_state
from kvps.store.create import create_dist
from kvps.store.options import StoreOptions

log = logging.getLogger("kvps")


class MeanStore:
    """The store through which workers compute means of tensors.

    Args:
        owner: the front end.
        options: of the front end's stores.
        compression: as :meth:`kvps.KVStore.set_gradient_compression`; None for none.
    """

    def __init__(self, owner: str, options: StoreOptions, compression: Any) -> None:
        self._kv = create_dist("dist_sync", f"{owner}.mean", options, average=True)
        self._lost: int | None = None
        """Means of the lost worker that this one replaces, which its script has still to pass;
        None if unknown."""
        residual_state.compress(self._kv, compression, "compression")

    def resume(self) -> None:
        """Begin with the next mean of the others: the script of this replacement does not run again."""
        self._lost = 0

    def close(self) -> None:
        """Close the store."""
        self._kv.close()

    def of(self, tensors: Mapping[str, torch.Tensor], weight: float) -> dict[str, torch.Tensor]:
        """Return the means over all workers, each of which calls; ``tensors`` are used up.

        If the servers return to a checkpoint meanwhile, the call is made again.

        Args:
            tensors: name -> tensor; the same names and shapes on every worker.
            weight: of this worker.

        Raises:
            KvpsError: as :meth:`kvps.KVStore.pushpull`.
        """
        names, values = list(tensors), list(tensors.values())
        while True:
            try:
                self._kv.init(names, [torch.zeros_like(value) for value in values])
                if self._lost is None:
                    place = self._kv.take_place(names)
                    self._lost = place.owed if place.is_replacement else 0
                self._kv.resume(names)
                if self._lost > 0:
                    self._lost -= 1
                    return dict(tensors)
                means = [torch.empty_like(value) for value in values]
                self._kv.pushpull(names, values, out=means, weight=weight)
            except EpochChanged as error:
                log.warning("%s", error)
            else:
                return dict(zip(names, means, strict=True))
