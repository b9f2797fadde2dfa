"""Sparse gradients of a model's tables, pushed as rows; rows come back, too.

Where the store has the optimizer, the weight is refreshed by the rows that any rank's gradient has
changed. Where it has none, a key is the sum of the last round. What changed in it are the rows of
that round and those of the round before, which are 0 again. A row of that round may be 0, too:
then its first element is -0, and the optimizer here has to update it. So what changed, without the
rows that are 0 and not -0, is the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvps.store.base import Store
from kvps.store.kvstore import KVStore
from kvps.store.row_copies import Holding


class SparseGradients:
    """The tables of one model whose gradients are sparse, in a store that knows what changed.

    Args:
        kv: the store.
        brings_weights: it has the optimizer.
    """

    def __init__(self, kv: KVStore, *, brings_weights: bool) -> None:
        self._kv = kv
        self._brings_weights = brings_weights
        self._held: dict[str, Holding] = {}
        """Table -> the copy that the store gave last."""

    @classmethod
    def of(cls, kv: Store | None, *, brings_weights: bool) -> SparseGradients | None:
        """Return them for a store; None for one in which sparse gradients have to be made dense."""
        if isinstance(kv, KVStore) and kv.knows_changes:
            return cls(kv, brings_weights=brings_weights)
        return None

    def __contains__(self, name: str) -> bool:
        """Whether a sparse gradient of this table has left before."""
        return name in self._held

    def begin(
        self, name: str, gradient: torch.Tensor, priority: int, param: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """Push a gradient that has rows; it must not change before its answer is there.

        Returns:
            A function that waits for the answer. It returns ``param`` with the new rows written to it, or the
            sum, a sparse tensor where ``param`` is.
        """
        pushed = self._kv.push(name, gradient, priority=priority, async_op=True)

        def ask() -> Any:
            held = self._held.get(name)
            if self._brings_weights:
                return self._kv.refresh(name, param, held, priority=priority, async_op=True)
            return self._kv.pull_changed(name, held, priority=priority, async_op=True)

        asked = ask()

        def wait() -> torch.Tensor:
            nonlocal pushed, asked
            asked = asked or ask()
            try:
                if pushed is not None:
                    pushed.wait()  # a push that was refused is never applied: the answer would not come
                found = asked.wait()
            except BaseException:
                pushed = asked = None  # the push counts: the next wait asks again
                raise
            if self._brings_weights:
                self._held[name] = found
                return param
            self._held[name] = found.held
            return sparse_of(found.row_ids, found.rows, param)

        return wait


def sparse_of(ids: torch.Tensor, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor of those ``rows`` that some rank has used, as sparse optimizers want it.

    A row of zeros was used if its first element is -0.
    """
    ids = ids.to(rows.device)
    flat = rows.unsqueeze(-1).flatten(1)
    some = flat.ne(0).any(1) | flat[:, :1].signbit().any(1)
    if not some.all():
        ids, rows = ids[some], rows[some]
    return _sparse(ids, rows, like)


def _sparse(ids: torch.Tensor, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        ids[None].to(like.device),
        rows.to(like.device),
        like.shape,
        is_coalesced=True,
        check_invariants=False,
        device=like.device,
    )


def adds_plainly(kv: Store | None) -> bool:
    """Whether a store's sum of whole tensors is that of their elements, so that -0 and -0 give -0."""
    return isinstance(kv, KVStore) and kv.type.startswith("allreduce")


def dense_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient as a dense one, for stores that add up whole tensors.

    A row that it does not have begins with -0, and any other row of zeros with +0. In a sum of
    several ranks, -0 is left only where no rank has the row.
    """
    dense = gradient.to_dense()
    has = torch.zeros(len(dense), dtype=torch.bool, device=dense.device)
    has[gradient._indices()[0]] = True
    first = dense.unsqueeze(-1).flatten(1)[:, :1]
    first.copy_(torch.where(has[:, None], first + 0.0, -0.0))
    return dense


def sum_of(dense: torch.Tensor, like: torch.Tensor, *, is_marked: bool) -> torch.Tensor:
    """Return a sum of such gradients as a sparse tensor.

    Args:
        dense: the sum.
        like: the parameter.
        is_marked: whether the store adds as the processor does; if not, rows of zeros are left out.
    """
    flat = dense.unsqueeze(-1).flatten(1)
    some = flat.ne(0).any(1)
    if is_marked:
        some |= ~flat[:, :1].signbit().any(1)
    return _sparse(some.nonzero()[:, 0], dense[some], like)
