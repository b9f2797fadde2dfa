"""The embedding table that users call: rows by 64-bit ids, pulled and pushed by the list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kvps.core.embedding import published
from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.embedding.table import ExportBatch
from kvps.core.placement import EMBEDDING
from kvps.core.worker import calls
from kvps.errors import ConfigError, KeyNotFound, Mismatch
from kvps.store import table_batch
from kvps.store.embedding_export import write
from kvps.store.table_batch import Owner, Tables
from kvps.tensors import TORCH

BLOCK_BYTES = 8 << 20
"""Approximate bytes of an export that are in memory at once."""

Rows = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of ids [n] and their rows [n, dim]."""


class EmbeddingTable:
    """A table of rows that grows with its ids, from :meth:`kvps.KVStore.embedding`.

    An id is any 64-bit number. The first *push* of an id creates its row (or a later push, see ``admit``). A
    pull creates no row: an id without a row has its initial value, which depends only on the table's seed,
    the id and the column. It is the same on every server and after every restart.

    Attributes:
        name: the table's name in its store.
        dim: elements of a row.
        dtype: their type.

    Example:
        >>> import torch, kvps
        >>> kv = kvps.create("local")
        >>> words = kv.embedding("words", 2, init="zeros", optimizer="sgd", lr=0.5)
        >>> words.push([7, 9, 7], torch.ones(3, 2))
        >>> words.pull([9, 7, 8])
        tensor([[-0.5000, -0.5000],
                [-1.0000, -1.0000],
                [ 0.0000,  0.0000]])
        >>> len(words), words.version()
        (2, 1)
    """

    def __deepcopy__(self, memo: object) -> EmbeddingTable:
        """Return the table itself: its rows are in the store, and a copy of a module looks at the same."""
        return self

    def __init__(self, store: Owner, name: str, recipe: EmbeddingSpec) -> None:
        self.store = store
        self.name = name
        self.recipe = recipe
        """The specification of the table; all workers must agree on it."""
        self.key = EMBEDDING + name
        """The key that stands for it in requests."""
        self.pull_dtype = ""
        """``"int8"`` if rows are pulled so."""
        self.changes = 0
        """Pushes that this process has made, and restorations."""
        self.dim = recipe.dim
        self.dtype = TORCH[recipe.dtype]
        self.alone = Tables((self,))
        """The table as the only one of a request."""

    def demand(self, recipe: EmbeddingSpec) -> None:
        """Check that a second call for this table has the arguments of the first.

        Raises:
            Mismatch: naming the argument that differs.
        """
        if difference := self.recipe.difference(recipe):
            raise Mismatch(
                f"table {self.name!r} of store {self.store.name!r} already exists with another {difference}; "
                "give the same arguments, or give the second table another name"
            )

    def pull(self, ids: object, *, timeout: float | None = None) -> torch.Tensor:
        """Return the rows of ``ids``, after this rank's own pushes of the table.

        In a synchronous store, they have exactly the version after these pushes. In other stores, rows of
        different servers may have different versions.

        Args:
            ids: whole numbers, in a tensor, an array or (nested) lists; they may be repeated.
            timeout: seconds to wait, instead of the store's.

        Returns:
            A new tensor of shape ``ids.shape + (dim,)``, on the device of ``ids``.

        Raises:
            Mismatch: if the ids are not integers.
            Timeout, WorkerLost: as for :meth:`kvps.KVStore.pull`.

        Example:
            >>> import kvps
            >>> table = kvps.create("local").embedding("t", 3)
            >>> table.pull([[1, 2], [3, 4]]).shape
            torch.Size([2, 2, 3])
        """
        (rows,) = table_batch.pull((self,), (ids,), timeout)
        return rows

    def push(
        self, ids: object, gradients: object, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Push the gradients of some rows; gradients of duplicate ids are summed.

        It counts as a push even without ids: in a synchronous store a round closes when every worker has
        pushed, so a worker without gradients calls ``push([], [])``. Returns when the values are copied; with
        ``async_op``, returns a handle, whose ``wait()`` returns when the servers have them.

        Args:
            ids: whole numbers, of any shape.
            gradients: a tensor or array of shape ``ids.shape + (dim,)``.
            async_op: return a handle.
            timeout: seconds until the call fails with Timeout, instead of the store's.

        Raises:
            Mismatch: for another shape, or gradients that are not floating point.

        Example:
            >>> import numpy as np, kvps
            >>> table = kvps.create("local").embedding("t", 2, init="zeros", optimizer="sgd", lr=1)
            >>> table.push(np.array([5, -1]), np.array([[1.0, 2.0], [3.0, 4.0]]))
            >>> table.pull(-1)
            tensor([-3., -4.])
        """
        return table_batch.push((self,), ((ids, gradients),), async_op=async_op, timeout=timeout)

    def set_learning_rate(self, lr: float, *, timeout: float | None = None) -> None:
        """Set the table's learning rate; rank 0's call counts, and other ranks may call, too.

        In a synchronous store it takes effect with rank 0's next push.

        Args:
            lr: the learning rate, within the optimizer's range.
            timeout: seconds to wait, instead of the store's.

        Raises:
            ConfigError: for a bad value.

        Example:
            >>> import torch, kvps
            >>> table = kvps.create("local").embedding("t", 1, init="zeros", optimizer="sgd", lr=1)
            >>> table.set_learning_rate(0.25)
            >>> table.push([3], torch.ones(1, 1))
            >>> table.pull(3)
            tensor([-0.2500])
        """
        checked = self.recipe.hyper.with_lr(lr).number("lr")
        self.store._begin()
        if self.store.rank == 0:
            self._make(calls.SetTableRate(self.store.name, self.key, checked), timeout)

    def export(self, path: str | Path | None = None, *, with_state: bool = False) -> Rows | int:
        """Export all rows: as an iterator over blocks, or to a safetensors file.

        The file has ``ids`` [n] and ``versions`` [n] of int64, and ``rows`` [n, dim]; ``versions`` has the
        version of each row's last push. A block is a few MiB, regardless of the table's size. Training may
        continue during the export. Then each row has the value after some push, and rows that are created
        after the start may be missing. Between two barriers, all rows have the same version.

        Args:
            path: the file, which is replaced when the export is complete; None for an iterator.
            with_state: also write the optimizer's states, as ``state.NAME`` [n, dim].

        Returns:
            An iterator over (ids, rows); or the number of rows written.

        Raises:
            StorageError: if the file cannot be written.

        Example:
            >>> import torch, kvps
            >>> table = kvps.create("local").embedding("t", 1, init="zeros", optimizer="sgd", lr=1)
            >>> table.push([3, 4], torch.ones(2, 1))
            >>> [(ids.tolist(), rows.tolist()) for ids, rows in table.export()]
            [([3, 4], [[-1.0], [-1.0]])]
        """
        return self._export(0, path, with_state)

    def changed_since(self, version: int, path: str | Path | None = None) -> Rows | int:
        """Export the rows that were pushed after ``version``, as :meth:`export` does.

        Call :meth:`version` before an export; later, this call brings the copy up to date. Ids whose rows
        were evicted since have their initial values again. The iterator names them in blocks ``(ids [n],
        rows [0, dim])``, after the rows; in a file they have version 0, and their initial values.

        Raises:
            ConfigError: for a version that is not a whole number of 0 or more, or if a server does not know
                any more which rows were evicted since: it keeps about as many ids as it has rows, and none
                from before it was started or restored. Make the copy anew then.

        Example:
            >>> import torch, kvps
            >>> table = kvps.create("local").embedding("t", 1, init="zeros", optimizer="sgd", lr=1)
            >>> table.push([3, 4], torch.ones(2, 1))
            >>> before = table.version()
            >>> table.push([4], torch.ones(1, 1))
            >>> [ids.tolist() for ids, _ in table.changed_since(before)]
            [[4]]
        """
        if type(version) is not int or version < 0:
            raise ConfigError(f"version={version!r:.40}: give a whole number, 0 or more")
        return self._export(version, path, with_state=False)

    def _export(self, since: int, path: str | Path | None, with_state: bool) -> Rows | int:
        blocks = self._blocks(since, max(1, BLOCK_BYTES // (self.dim * self.dtype.itemsize)), with_state)
        if path is None:
            return (
                (torch.from_numpy(block.ids), block.columns["weight"][: None if block.stamps[0] else 0])
                for block in blocks
                if len(block.ids)
            )
        return write(Path(path), blocks, self.recipe)

    def published(self) -> dict[str, torch.Tensor]:
        """Return the tensors by which a version has this table; on ranks over 0 their names, and no rows."""
        blocks = self._export(0, None, with_state=False) if self.store.rank == 0 else ()
        assert not isinstance(blocks, int)
        return published.tensors_of(self.name, blocks, self.recipe)

    def __bool__(self) -> bool:
        """Return True, even for an empty table."""
        return True

    def __repr__(self) -> str:
        return f"<EmbeddingTable {self.name!r} of {self.dtype}[{self.dim}] in {self.store!r}>"

    # --- calls ------------------------------------------------------------------------------------

    def make(self, limit_s: float) -> None:
        """Have the servers make the table, or check that theirs has the same arguments."""
        call = calls.MakeTable(self.store.name, self.key, self.recipe, self.store.rank)
        self.store.session.call(call, limit_s).wait()

    def __len__(self) -> int:
        """Return how many rows there are, on all servers, after this rank's own pushes."""
        counts = torch.empty(self._servers, dtype=torch.int64, device="cpu")
        self._make(calls.PullValues(self.store.name, (self.key,), (counts,), 0, 0), None)
        return int(counts.sum())

    def version(self, *, timeout: float | None = None) -> int:
        """Return the closed rounds (sync) or applied pushes (async), after this rank's pushes."""
        return int(self._make(calls.Versions(self.store.name, (self.key,)), timeout)[0])

    def resume(self, *, timeout: float | None = None) -> int:
        """Number the next pushes from the lowest one that this rank still owes; return it."""
        take = calls.TakePlace(self.store.name, (self.key,), replays=False, tells=True)
        return int(self._make(take, timeout).owed)

    def _blocks(self, since: int, rows: int, with_state: bool) -> Iterator[ExportBatch]:
        self.version()  # this rank's own pushes are in it then
        for server in range(self._servers):
            start = 0
            while True:
                call = calls.ExportBlock(
                    self.store.name, self.key, server, self.dim, start, rows, since, with_state
                )
                block: ExportBatch = self._make(call, None)
                yield block
                start = block.next
                if not start:
                    break

    @property
    def _servers(self) -> int:
        return self.store.session.info.servers

    def _make(self, call: calls.Call, timeout: float | None) -> Any:
        self.store._begin()
        return self.store.session.call(call, self.store._limit(timeout)).wait()


def tables_of(
    store: object, name: str, known: Mapping[str, EmbeddingTable], given: Iterable[object]
) -> list[EmbeddingTable]:
    """Return the tables of ``store`` that a call names: each by itself, or by its name.

    Raises:
        KeyNotFound, ConfigError, Mismatch: for a table that is unknown, of another store, or named twice.
    """
    found: dict[str, EmbeddingTable] = {}
    for wanted in given:
        table = known.get(wanted) if isinstance(wanted, str) else wanted
        if table is None:
            raise KeyNotFound(
                f"store {name!r} has no table {wanted!r:.80} in this process; call "
                f"embedding({wanted!r:.80}, ...) first"
            )
        if not isinstance(table, EmbeddingTable):
            raise ConfigError(
                "name a table by the result of kv.embedding(...) or by its name, not by a "
                f"{type(table).__name__}"
            )
        if table.store is not store:
            raise ConfigError(f"{table!r} is not a table of store {name!r}")
        if table.name in found:
            raise Mismatch(f"table {table.name!r} is named twice; name each table once")
        found[table.name] = table
    return [*found.values()]
