"""Several tables in one request: their distinct ids, and the rows and gradients of these ids.

Tables whose rows have the same type and width form a *group*: their rows are neighbours in one tensor. A
:class:`TableBatch` is made once for the ids of a batch of examples; it pulls their rows, and pushes their
gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, Protocol

import numpy as np
import torch

from kvps.core.embedding.id_split import SplitIds
from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.worker import calls
from kvps.core.worker.calls.embeddings import Group, check_size
from kvps.dtypes import summed_in
from kvps.errors import KvpsError, Mismatch
from kvps.runtime.ticket import Handle, Ticket
from kvps.store.base import Session
from kvps.tensors import TORCH, as_tensor, ids_of


class Owner(Protocol):
    """The store that a table belongs to."""

    @property
    def name(self) -> str:
        """The name of the store."""

    @property
    def type(self) -> str:
        """The kind of store."""

    @property
    def num_workers(self) -> int:
        """The number of workers that push to it."""

    @property
    def average(self) -> bool:
        """Whether a round is the mean of its pushes."""

    @property
    def session(self) -> Session:
        """This process's place in the cluster."""

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""

    _later: list[KvpsError]

    def _begin(self) -> None: ...
    def _limit(self, timeout: float | None) -> float: ...


class Table(Protocol):
    """A table of a store."""

    store: Owner
    name: str
    key: str
    recipe: EmbeddingSpec
    pull_dtype: str
    changes: int
    alone: Tables


class Tables:
    """Distinct tables of one store, in the order in which requests name them: group after group.

    Args:
        tables: at least one.
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        self.all: tuple[Table, ...] = tuple(sorted(tables, key=_kind))
        self.keys = tuple([table.key for table in self.all])
        self.names = [table.name for table in self.all]
        self.store = self.all[0].store
        groups: list[Group] = []
        for (dtype, dim), some in groupby(self.all, key=_kind):
            first = groups[-1].stop if groups else 0
            groups.append(Group(dtype, dim, first, first + len(list(some))))
        self.groups = tuple(groups)

    def batch(self, ids: Sequence[torch.Tensor]) -> TableBatch:
        """Return the batch of some ids, int64 [k] on the CPU for each table; ids may be repeated."""
        servers, stops = self.store.session.info.servers, [group.stop for group in self.groups]
        return TableBatch(self, SplitIds([some.numpy() for some in ids], servers, stops))


class TableBatch:
    """The distinct ids of some tables, as they stand for those of a batch of examples."""

    def __init__(self, tables: Tables, split: SplitIds) -> None:
        self.tables = tables
        self.split = split
        self.sizes = [high - low for low, high in pairwise(split.edges)]
        """For each table, the number of distinct ids."""

    @cached_property
    def ids(self) -> tuple[torch.Tensor, ...]:
        """For each table, its distinct ids, ascending."""
        return torch.split_with_sizes(torch.from_numpy(self.split.ids), self.sizes)

    def ask(self, timeout: float | None = None) -> Ticket:
        """Begin to pull the rows; the ticket's value is that of :meth:`pull`."""
        store = self.tables.store
        store._begin()
        # As int8 if all rows are pulled so; in other types, if that of one table is another.
        is_packed = all(table.pull_dtype == "int8" for table in self.tables.all)
        keys, groups = self.tables.keys, self.tables.groups
        call = calls.PullTableRows(store.name, keys, groups, self.split.shares, is_packed)
        return store.session.call(call, store._limit(timeout))

    def pull(self, timeout: float | None = None) -> list[torch.Tensor]:
        """Return the rows of each group, [size, dim], on the CPU."""
        rows: Any = self.ask(timeout).wait()
        return list(rows)

    def push(
        self, gradients: Sequence[torch.Tensor], *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Push the gradients of each group, [size, dim], of the type of its rows, on the CPU.

        Returns when they are copied; with ``async_op``, returns a handle at once.
        """
        store, groups = self.tables.store, self.tables.groups
        for server, share in enumerate(self.split.shares):
            check_size(self.tables.names, groups, share, server)
        store._begin()
        call = calls.PushTableRows(
            store.name, self.tables.keys, not async_op, groups, self.split.shares, tuple(gradients)
        )
        ticket = store.session.call(call, store._limit(timeout))
        for table in self.tables.all:
            table.changes += 1
        if async_op:
            return Handle(ticket, lambda: None)
        ticket.on_error(store._later.append)
        ticket.wait_copied()
        return None

    def cut(self, group: Group, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows of each table of a group."""
        return torch.split_with_sizes(rows, self.sizes[group.first : group.stop])

    def summed(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sums for each group of the gradients of each table's given ids, [k, dim] each."""
        wide = [
            rows.to(TORCH[summed_in(table.recipe.dtype)]).contiguous()
            for table, rows in zip(self.tables.all, gradients, strict=True)
        ]
        sums = self.split.summed(wide)
        return [total.to(TORCH[group.dtype]) for total, group in zip(sums, self.tables.groups, strict=True)]


def rows_of(table: Table, gradients: object, shape: tuple[int, ...]) -> torch.Tensor:
    """Return gradients of ids of this shape as rows [k, dim], in the type in which they are summed.

    Raises:
        Mismatch: if they are none.
    """
    dim = table.recipe.dim
    if isinstance(gradients, list | tuple) and not len(gradients) and 0 in shape:
        gradients = torch.empty((*shape, dim), device="cpu")
    if not isinstance(gradients, torch.Tensor | np.ndarray):
        raise Mismatch(
            f"table {table.name!r}: gradients are a tensor or an array, got {type(gradients).__name__}"
        )
    tensor = as_tensor(gradients)
    if tuple(tensor.shape) != (*shape, dim) or not tensor.is_floating_point() or tensor.is_meta:
        raise Mismatch(
            f"table {table.name!r}: gradients of ids {list(shape)} are floating point numbers "
            f"{[*shape, dim]}, got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    return tensor.cpu().to(TORCH[summed_in(table.recipe.dtype)]).reshape(-1, dim)


def pull(tables: Sequence[Table], ids: Sequence[object], timeout: float | None) -> list[torch.Tensor]:
    """Return, for each table, the rows of its ids, which may have any shape, on the device of the ids."""
    given = dict(zip(tables, map(ids_of, ids), strict=True))
    chosen = tables[0].alone if len(tables) == 1 else Tables(tables)
    batch = chosen.batch([given[table].reshape(-1).cpu() for table in chosen.all])
    pulled = batch.pull(timeout)
    found = {}
    for group, rows in zip(chosen.groups, pulled, strict=True):
        for at, table in enumerate(chosen.all[group.first : group.stop], group.first):
            shaped = rows.index_select(0, batch.split.places[at]).view(*given[table].shape, group.dim)
            found[table] = shaped.to(given[table].device)
    return [found[table] for table in tables]


def push(
    tables: Sequence[Table],
    gradients: Sequence[object],
    *,
    async_op: bool,
    timeout: float | None,
) -> Any:
    """Push (ids, gradients) of each table; see :meth:`TableBatch.push`."""
    given, rows = {}, {}
    for table, pair in zip(tables, gradients, strict=True):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise Mismatch(
                f"table {table.name!r}: give a pair of ids and gradients, not a {type(pair).__name__}"
            )
        given[table] = ids_of(pair[0])
        rows[table] = rows_of(table, pair[1], tuple(given[table].shape))
    chosen = tables[0].alone if len(tables) == 1 else Tables(tables)
    batch = chosen.batch([given[table].reshape(-1).cpu() for table in chosen.all])
    return batch.push(batch.summed([rows[table] for table in chosen.all]), async_op=async_op, timeout=timeout)


def _kind(table: Table) -> tuple[str, int]:
    return table.recipe.dtype, table.recipe.dim
