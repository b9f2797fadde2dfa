"""Flags that all workers agree on: whether any gradient is infinite, which parameters were used.

A store whose optimizer updates weights cannot add up anything else, so these few numbers have a store of
their own, without an optimizer. Alone, a worker agrees with itself.
"""

from __future__ import annotations

import torch

from kvps.store.create import create_dist
from kvps.store.options import StoreOptions
from kvps.store.server_store import DistStore


class Agreement:
    """Flags that each worker sets for itself; all need to know whether any of them is set.

    Every worker makes it, and asks, in the same order.

    Args:
        workers: how many there are.
        count: how many flags.
        options: those of the front end's store.
    """

    def __init__(self, workers: int, count: int, options: StoreOptions) -> None:
        self._kv: DistStore | None = None
        if workers > 1:
            self._kv = create_dist("dist_sync", "agreement", options)
            self._kv.init("flags", torch.zeros(count, dtype=torch.float32, device="cpu"))

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Return for each flag whether it is set at any worker.

        Args:
            flags: booleans.
        """
        if self._kv is None:
            return flags.bool()
        found: torch.Tensor = self._kv.pushpull("flags", flags.to("cpu", torch.float32))
        return found > 0
