"""Sums of sparse gradients over workers: pushed as rows, and rows that come back.

Without an optimizer a key is the sum of the last round, and what changed in it are the rows of that round
and those of the round before, which are 0 again. So what changed, without the rows that are 0, is the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

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

    def begin(
        self, name: str, gradient: torch.Tensor, priority: int, *, like: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """Push a gradient that has rows, and ask for the sum.

        Returns:
            What waits for the sum and returns it as a sparse tensor, of the shape of ``like`` and where
            that is. The gradient must not change before.
        """
        pushed = self._kv.push(name, gradient, priority=priority, async_op=True)
        assert pushed is not None
        held = self._held.get(name)
        pulled = self._kv.pull_changed(name, held, priority=priority, async_op=True)

        def wait() -> torch.Tensor:
            pushed.wait()  # a push that was refused is never applied: the pull would wait for it
            changes: Changes = pulled.wait()
            self._held[name] = changes.held
            return sparse_of(changes.row_ids, changes.rows, like)

        return wait


def sparse_of(ids: torch.Tensor, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor of those ``rows`` that are not 0, as sparse optimizers want it."""
    ids = ids.to(rows.device)
    some = rows.unsqueeze(-1).flatten(1).ne(0).any(1)
    if not some.all():
        ids, rows = ids[some], rows[some]
    return torch.sparse_coo_tensor(
        ids[None].to(like.device),
        rows.to(like.device),
        like.shape,
        is_coalesced=True,
        check_invariants=False,
    )
