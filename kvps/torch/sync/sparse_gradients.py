"""Sparse gradients of a model's tables, pushed as rows; rows come back, too.

Where the store has the optimizer, the weight is refreshed by the rows that any rank's gradient has
changed. Where it has none, a key is the sum of the last round. What changed in it are the rows of
that round and those of the round before, which are 0 again. A row of that round may be 0, too:
then its first element is -0, and the optimizer here has to update it. So what changed, without the
rows that are 0 and not -0, is the sum.

Gradients that leave when a step is made: weights come back for them, or their sums.

Gradients that leave during backward are :mod:`kvps.torch.sync.gradient_sync`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from kvps.store.base import Store
from kvps.store.kvstore import KVStore
from kvps.store.row_copies import Holding, RowChanges
from kvps.store.rows import has_rows
from kvps.torch.sync.gradient_memory import GradientMemory


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
        assert pushed is not None
        held = self._held.get(name)
        if self._brings_weights:
            asked = self._kv.refresh(name, param, held, priority=priority, async_op=True)
        else:
            asked = self._kv.pull_changed(name, held, priority=priority, async_op=True)

        def wait() -> torch.Tensor:
            pushed.wait()  # a push that was refused is never applied: the answer would not come
            if self._brings_weights:
                self._held[name] = asked.wait()
                return param
            changes: RowChanges = asked.wait()
            self._held[name] = changes.held
            return sparse_of(changes.row_ids, changes.rows, param)

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


LEVELS = 8
"""The number of priorities of parameters, in their order."""
Waits = dict[str, Callable[[], torch.Tensor]]


class StepExchange:
    """The gradients of a model, pushed by one call for all parameters.

    Args:
        kv: the store; None if there is nothing to exchange.
        params: name -> parameter; the store knows these keys.
        brings_weights: whether the store has the optimizer.
        lends: whether servers may read gradients in place.
    """

    def __init__(
        self, kv: Store | None, params: Mapping[str, torch.Tensor], *, brings_weights: bool, lends: bool
    ) -> None:
        self._kv = kv
        self._params = params
        self._brings_weights = brings_weights
        self._tables = SparseGradients.of(kv, brings_weights=brings_weights)
        self._memory = GradientMemory(kv if lends else None, params)
        self._memory.watch()

    def update(self, names: Sequence[str], factor: float) -> None:
        """Push gradients times ``factor``, and take the weights that the store has updated."""
        gradients = [self._gradient(name) for name in names]
        if factor != 1.0:
            with torch.no_grad():
                gradients = [gradient * factor for gradient in gradients]
        with self._memory.lent(names):
            self._pushpull(names, gradients, [self._params[name].detach() for name in names])

    def sum_up(self, names: Sequence[str]) -> None:
        """Replace gradients with their sums over all workers; sparse gradients travel as rows, if
        possible."""
        gradients = {name: self._gradient(name) for name in names}
        waits = self._begin_tables(names, list(gradients.values()), [0] * len(names))
        dense = {
            name: dense_of(gradient) if gradient.is_sparse else gradient
            for name, gradient in gradients.items()
            if name not in waits
        }
        if dense:
            with self._memory.lent(names):
                self._pushpull(list(dense), list(dense.values()), list(dense.values()))
        sums = {name: wait() for name, wait in waits.items()}
        for name, gradient in gradients.items():
            param = self._params[name]
            if name in sums:
                param.grad = sums[name]
            elif gradient.is_sparse:
                param.grad = sum_of(dense[name], param, is_marked=adds_plainly(self._kv))

    def _gradient(self, name: str) -> torch.Tensor:
        """Return the gradient of a parameter, 0 where there is none."""
        place, param = self._memory.sent(name), self._params[name]
        if place is not None:
            return place
        if param.grad is None:
            return torch.zeros_like(param, requires_grad=False)
        return param.grad.detach()

    def _pushpull(
        self, names: Sequence[str], values: Sequence[torch.Tensor], out: Sequence[torch.Tensor]
    ) -> None:
        assert self._kv is not None
        if not isinstance(self._kv, KVStore):
            for index, name in enumerate(names):  # a plug-in need not take lists
                value = values[index].to_dense() if values[index].is_sparse else values[index]
                self._kv.pushpull(name, value, out=out[index], priority=-index)
            return
        # The first layers are needed first, in the next forward pass. Within one level chunks
        # go to all servers in turns.
        levels = [-(LEVELS * index // len(names)) for index in range(len(names))]
        waits = self._begin_tables(names, values, levels) if self._brings_weights else {}
        rest = [index for index, name in enumerate(names) if name not in waits]
        if rest:
            self._kv.pushpull(
                [names[index] for index in rest],
                [_dense_unless_rows(values[index]) for index in rest],
                out=[out[index] for index in rest],
                priority=[levels[index] for index in rest],
            )
        for wait in waits.values():
            wait()

    def _begin_tables(
        self, names: Sequence[str], values: Sequence[torch.Tensor], levels: Sequence[int]
    ) -> Waits:
        """Push sparse gradients as rows, if possible; return a wait for each."""
        if self._tables is None:
            return {}
        return {
            name: self._tables.begin(name, value, level, self._params[name])
            for name, value, level in zip(names, values, levels, strict=True)
            if has_rows(value)
        }


def _dense_unless_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the form that a store takes."""
    return gradient.to_dense() if gradient.is_sparse and not has_rows(gradient) else gradient
