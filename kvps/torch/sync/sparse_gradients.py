"""Sparse gradients of a model's tables, pushed as rows; rows come back, too.

Where the store has the optimizer, the weight is refreshed by the rows that any rank's gradient has
changed. Where it has none, a key is the sum of the last round. What changed in it are the rows of
that round and those of the round before, which are 0 again. A row of that round may be 0, too:
then its first element is -0, and the optimizer here has to update it. So what changed, without the
rows that are 0 and not -0, is the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvps.store.base import Store
from kvps.store.kvstore import KVStore
from kvps.store.row_copies import Holding


class SparseBucket:
    """A sparse gradient that has left as rows; rows of its sum, or of the weight, come back.

    After a Timeout or an interrupt the push counts, and the next :meth:`wait` asks again for the answer.

    Args:
        kv: a store that knows what changed.
        held: table -> the copy that the store gave last; this answer takes its place.
        name: of the parameter.
        gradient: has rows, and must not change before its answer is there.
        param: takes the new rows of its weight, if these come back; else a sum comes, like it.
        priority: of the calls.
        divisor: a sum is divided by it.
        brings_weights: the store has the optimizer.
    """

    def __init__(
        self,
        kv: KVStore,
        held: dict[str, Holding],
        name: str,
        gradient: torch.Tensor,
        param: torch.Tensor,
        priority: int,
        divisor: int,
        *,
        brings_weights: bool,
    ) -> None:
        self.values = {name: param if brings_weights else gradient}
        """Name -> the parameter, where its weight comes back; else the gradient that has left."""
        self._kv, self._held, self._name, self._param = kv, held, name, param
        self._priority, self._divisor, self._brings_weights = priority, divisor, brings_weights
        self._found: torch.Tensor | None = None
        self._pushed: Any = kv.push(name, gradient, priority=priority, async_op=True)
        self._asked: Any = self._ask()

    def _ask(self) -> Any:
        held = self._held.get(self._name)
        if self._brings_weights:
            return self._kv.refresh(self._name, self._param, held, priority=self._priority, async_op=True)
        return self._kv.pull_changed(self._name, held, priority=self._priority, async_op=True)

    def wait(self) -> None:
        """Wait until it is back.

        Raises:
            KvpsError: if it has failed.
        """
        if self._found is not None:
            return
        self._asked = self._asked or self._ask()
        try:
            if self._pushed is not None:
                self._pushed.wait()  # a push that was refused is never applied: the answer would not come
            found = self._asked.wait()
        except BaseException:
            self._pushed = self._asked = None
            raise
        if self._brings_weights:
            self._held[self._name], self._found = found, self._param
            return
        self._held[self._name] = found.held
        self._found = sparse_of(found.row_ids, found.rows, self._param)
        if self._divisor != 1:
            self._found._values().div_(self._divisor)

    def gradient(self, name: str) -> torch.Tensor:
        """Return the sum."""
        assert self._found is not None
        return self._found

    def bring(self, names: Iterable[str], params: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: the rows of a weight were written when they came."""


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
