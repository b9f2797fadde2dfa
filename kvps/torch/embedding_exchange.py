"""The rows of forward passes, and their gradients at the end of each backward pass.

The rows of a forward are leaves of autograd, made for it alone: one tensor for each group of tables. When
backward has accumulated the gradient of a leaf, the exchange takes it; at the end of the pass it pushes the
gradients of all forwards at once. So each backward makes one push, however often the modules were called
before, and a forward without gradients makes none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch

from kvps.errors import EpochChanged
from kvps.store.embedding import EmbeddingTable
from kvps.store.table_batch import TableBatch, Tables
from kvps.tensors import TORCH
from kvps.torch.embedding_ahead import RowsAhead
from kvps.torch.sync.parameter_hooks import PassEnd, when_accumulated

log = logging.getLogger("kvps")
T = TypeVar("T")


class RowExchange:
    """The exchange of rows and gradients with some tables of one store.

    Args:
        tables: distinct ones, at least one.
        op: ``"average"`` divides sums of a synchronous store by the number of workers.
    """

    def __init__(self, tables: Iterable[EmbeddingTable], op: str) -> None:
        self._given = tuple(tables)
        self.tables = Tables(self._given)
        """The tables, in the order of requests."""
        self._op = op
        self._gathered: dict[TableBatch, list[torch.Tensor | None]] = {}
        """The gradients of each group, of each forward that this backward has come to."""
        self._end = PassEnd()
        self._ahead = RowsAhead(self.tables)

    def __deepcopy__(self, memo: object) -> RowExchange:
        """Return an exchange with the same tables, for the copy of a module."""
        return RowExchange(self._given, self._op)

    def rows(
        self, ids: Sequence[torch.Tensor], device: torch.device, *, is_trained: bool
    ) -> tuple[TableBatch, list[torch.Tensor]]:
        """Return the batch of ids, int64 [k] for each table, and the rows of each group on ``device``."""
        with torch.inference_mode(False), torch.no_grad():
            batch, pulled = self._again(partial(self._pull, ids))
            rows = [leaf.to(device) for leaf in pulled]
        if is_trained:
            for group, leaf in enumerate(rows):
                leaf.requires_grad_()
                when_accumulated(leaf, partial(self._gather, batch, group))
        return batch, rows

    def prefetch(self, ids: Sequence[torch.Tensor]) -> None:
        """Ask for the rows of ids, int64 [k] for each table, which :meth:`rows` will want."""
        self._again(partial(self._ahead.ask, ids))

    def _pull(self, ids: Sequence[torch.Tensor]) -> tuple[TableBatch, list[torch.Tensor]]:
        found = self._ahead.take(ids)
        if found is None:
            batch = self.tables.batch(ids)
            found = batch, batch.pull()
        return found

    def _gather(self, batch: TableBatch, group: int, leaf: torch.Tensor) -> None:
        """Take a complete gradient; the first one schedules a push at the end of the pass."""
        assert leaf.grad is not None
        if self._end.wait(self._push):
            self._gathered = {}  # of a pass that failed nothing is pushed
        self._gathered.setdefault(batch, [None] * len(self.tables.groups))[group] = leaf.grad.cpu()
        leaf.grad = None

    def _push(self) -> None:
        gathered, self._gathered = self._gathered, {}
        batch, gradients = self._merged(gathered)
        divisor = self._divisor
        if divisor > 1:
            gradients = [rows / divisor for rows in gradients]
        try:
            batch.push(gradients)
            self._ahead.pushed(batch)
        except EpochChanged as error:
            self._returned(error)  # gradients of rows that nobody has any more

    def _merged(
        self, gathered: dict[TableBatch, list[torch.Tensor | None]]
    ) -> tuple[TableBatch, list[torch.Tensor]]:
        """Return one batch and its gradients, where no group lacks them."""
        if len(gathered) == 1:
            ((batch, found),) = gathered.items()
            complete = [rows for rows in found if rows is not None]
            if len(complete) == len(found):
                return batch, complete
        ids: list[list[torch.Tensor]] = [[] for _ in self.tables.all]
        rows: list[list[torch.Tensor]] = [[] for _ in self.tables.all]
        for batch, found in gathered.items():
            for group, gradient in zip(self.tables.groups, found, strict=True):
                if gradient is None:
                    continue
                for at, some in enumerate(batch.cut(group, gradient), group.first):
                    ids[at].append(batch.ids[at])
                    rows[at].append(some)
        none = torch.empty(0, dtype=torch.int64)
        merged = self.tables.batch([torch.cat([none, *some]) for some in ids])
        gradients = []
        for dtype, dim, first, stop in self.tables.groups:
            begin = torch.empty((0, dim), dtype=TORCH[dtype])
            gradients += [torch.cat([begin, *some]) for some in rows[first:stop]]
        return merged, merged.summed(gradients)

    @property
    def _divisor(self) -> int:
        store = self.tables.store
        is_summed = store.type.startswith("dist_sync") and not store.average
        return store.num_workers if self._op == "average" and is_summed else 1

    def _again(self, call: Callable[[], T]) -> T:
        """Return what ``call`` does, once the servers have returned to a checkpoint if they do."""
        while True:
            try:
                return call()
            except EpochChanged as error:
                self._returned(error)

    def _returned(self, error: EpochChanged) -> None:
        """The servers have returned to a checkpoint: rows that were asked for are of no use."""
        log.warning("%s", error)
        self._ahead.forget()
