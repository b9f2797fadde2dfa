"""Sums of sparse gradients over workers: pushed as rows, and rows that come back.

Without an optimizer a key is the sum of the last round, and what changed in it are the rows of that round
and those of the round before, which are 0 again. So what changed, without the rows that are 0, is the sum.
"""

from __future__ import annotations

import torch

from kvps.store.handle import Handle
from kvps.store.kvstore import KVStore
from kvps.store.refreshing import Changes, Held


class RowSums:
    """The tables of one model whose gradients are sparse."""

    def __init__(self, kv: KVStore) -> None:
        self._kv = kv
        self._held: dict[str, Held] = {}

    def __contains__(self, name: str) -> bool:
        """Whether a sparse gradient of this key was summed before."""
        return name in self._held

    def begin(self, name: str, gradient: torch.Tensor, priority: int) -> Handle:
        """Push a sparse gradient, and ask for the sum; :meth:`end` takes what the handle returns."""
        self._kv.push(name, gradient, priority=priority)
        held = self._held.get(name)
        handle = self._kv.pull_changed(name, held, priority=priority, async_op=True)
        assert isinstance(handle, Handle)
        return handle

    def end(self, name: str, changes: Changes, like: torch.Tensor) -> torch.Tensor:
        """Return the sum as a sparse tensor, of the shape of ``like`` and where that is."""
        self._held[name] = changes.held
        return sparse_of(changes.row_ids, changes.rows, like)


def sparse_of(ids: torch.Tensor, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor of those ``rows`` that are not 0, as sparse optimizers want it."""
    some = rows.flatten(1).ne(0).any(1)
    if not some.all():
        ids, rows = ids[some], rows[some]
    return torch.sparse_coo_tensor(
        ids[None].to(like.device),
        rows.to(like.device),
        like.shape,
        is_coalesced=True,
        check_invariants=False,
    )
