"""The embedding table that users call: rows by 64-bit ids, pulled and pushed by the list.

Arguments are checked and put in order here: ids are sorted, each named once, and gradients of the same id
are added up. A kind of store only has to pull, push and hand out blocks.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from kvps.core.embedding.id_hash import Ids
from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.embedding.table import ExportBatch
from kvps.errors import ConfigError, Mismatch
from kvps.store.embedding.export import write
from kvps.tensors import TORCH, as_tensor

BLOCK_BYTES = 8 << 20
"""About how much of an export is in memory at once."""

Rows = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of ids [n] and their rows [n, dim]."""


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
        """Whether a round is the mean of what its workers pushed."""

    def _begin(self) -> None: ...


class EmbeddingTable(abc.ABC):
    """Rows of a table that grows as ids come; get it from :meth:`kvps.KVStore.embedding`.

    An id is any 64-bit number. A row is made by the first *push* of its id (or a later one, see
    ``admit``). A pull makes none: an id without a row has its first value, which depends on the
    table's seed, the id and the column alone, and is the same on every server and after every restart.

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

    def __init__(self, store: Owner, name: str, recipe: EmbeddingSpec) -> None:
        self.store = store
        self.name = name
        self.recipe = recipe
        """The description that it is made from: all workers must agree on it."""
        self.dim = recipe.dim
        self.dtype = TORCH[recipe.dtype]

    def pull(self, ids: object, *, timeout: float | None = None) -> torch.Tensor:
        """Return the rows of ``ids``, after this rank's own pushes of the table.

        In a synchronous store they are those of exactly the version after these pushes. In others
        each row is as its last push left it, and rows of different servers may be of different
        versions.

        Args:
            ids: whole numbers, in a tensor, an array or (nested) lists; they may be repeated.
            timeout: seconds to wait, instead of the store's.

        Returns:
            A new tensor of shape ``ids.shape + (dim,)``, on the device of ``ids``.

        Raises:
            Mismatch: if the ids are no whole numbers.
            Timeout, WorkerLost: as for :meth:`kvps.KVStore.pull`.

        Example:
            >>> import kvps
            >>> table = kvps.create("local").embedding("t", 3)
            >>> table.pull([[1, 2], [3, 4]]).shape
            torch.Size([2, 2, 3])
        """
        given = _ids_of(ids)
        flat = given.reshape(-1).cpu().numpy()
        unique, place = np.unique(flat, return_inverse=True)
        rows = self._pull(unique, timeout)[torch.from_numpy(place)]
        return rows.view(*given.shape, self.dim).to(given.device)

    def push(
        self,
        ids: object,
        gradients: object,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Push the gradients of some rows; those of an id that is named twice are added up.

        It counts as one push, also without any ids: in a synchronous store a round closes when
        every worker has pushed, and one that has nothing to say says so by ``push([], [])``.
        Returns when the values are copied; with ``async_op`` a handle, whose ``wait()`` returns
        when the servers have them.

        Args:
            ids: whole numbers, of any shape.
            gradients: a tensor or array of shape ``ids.shape + (dim,)``.
            async_op: return a handle.
            timeout: seconds until the call fails with Timeout, instead of the store's.

        Raises:
            Mismatch: for another shape, or gradients that are no floating point numbers.

        Example:
            >>> import numpy as np, kvps
            >>> table = kvps.create("local").embedding("t", 2, init="zeros", optimizer="sgd", lr=1)
            >>> table.push(np.array([5, -1]), np.array([[1.0, 2.0], [3.0, 4.0]]))
            >>> table.pull(-1)
            tensor([-3., -4.])
        """
        given = _ids_of(ids)
        rows = self._rows_of(gradients, tuple(given.shape))
        unique, place = np.unique(given.reshape(-1).cpu().numpy(), return_inverse=True)
        total = torch.zeros((len(unique), self.dim), dtype=rows.dtype)
        total.index_add_(0, torch.from_numpy(place), rows)
        return self._push(unique, total.to(self.dtype), async_op, timeout)

    def set_learning_rate(self, lr: float, *, timeout: float | None = None) -> None:
        """Set the table's learning rate; rank 0's call counts, and others may make it, too.

        In a synchronous store it holds from rank 0's next push on.

        Args:
            lr: within the optimizer's range.
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
        self._set_rate(checked, timeout)

    def export(self, path: str | Path | None = None, *, with_state: bool = False) -> Rows | int:
        """Hand out all rows: as an iterator over blocks, or into a safetensors file.

        The file has ``ids`` [n] and ``versions`` [n] of int64, and ``rows`` [n, dim]; ``versions``
        are those that each row's last push made. A block is a few MiB, whatever the table's size.
        Training may go on meanwhile: each row is then as some push left it, and rows that are made
        after the beginning may be missing. Between two barriers it is one version.

        Args:
            path: of the file, which takes its place when it is complete; None for an iterator.
            with_state: the file has the optimizer's states, too, as ``state.NAME`` [n, dim].

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
        """Hand out the rows that were pushed to after ``version``, as :meth:`export` does.

        Take :meth:`version` before an export, and this later brings the copy up to date. Rows that
        were dropped since (see ``evict``) are not named.

        Raises:
            ConfigError: for a version that is no whole number from 0 on.

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
        blocks = self._blocks(since, max(1, BLOCK_BYTES // self._row_bytes), with_state)
        if path is None:
            return (
                (torch.from_numpy(block.ids), block.columns["weight"])
                for block in blocks
                if len(block.ids)
            )
        return write(Path(path), blocks, self.recipe)

    @property
    def _row_bytes(self) -> int:
        return self.dim * self.dtype.itemsize

    def _rows_of(self, gradients: object, shape: tuple[int, ...]) -> torch.Tensor:
        """Return gradients as rows, in the type that they are added up in."""
        if isinstance(gradients, list | tuple) and not len(gradients):
            gradients = torch.empty((*shape, self.dim))
        if not isinstance(gradients, torch.Tensor | np.ndarray):
            raise Mismatch(
                f"table {self.name!r}: gradients are a tensor or an array, got "
                f"{type(gradients).__name__}"
            )
        tensor = as_tensor(gradients)
        if tuple(tensor.shape) != (*shape, self.dim) or not tensor.is_floating_point():
            raise Mismatch(
                f"table {self.name!r}: gradients of ids {list(shape)} are floating point numbers "
                f"{[*shape, self.dim]}, got {tensor.dtype} {list(tensor.shape)}"
            )
        wide = torch.float64 if self.dtype is torch.float64 else torch.float32
        return tensor.cpu().to(wide).reshape(-1, self.dim)

    def __bool__(self) -> bool:
        """Return True: an empty table is one, too."""
        return True

    def __repr__(self) -> str:
        return f"<EmbeddingTable {self.name!r} of {self.dtype}[{self.dim}] in {self.store!r}>"

    # --- hooks ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return how many rows there are, on all servers."""

    @abc.abstractmethod
    def version(self, *, timeout: float | None = None) -> int:
        """Return the closed rounds (sync) or applied pushes (async) of the table."""

    @abc.abstractmethod
    def resume(self, *, timeout: float | None = None) -> int:
        """Number the next pushes from the lowest one that this rank still owes; return it.

        For a worker that replaces a lost one, as :meth:`kvps.KVStore.resume` is.
        """

    @abc.abstractmethod
    def _pull(self, ids: Ids, timeout: float | None) -> torch.Tensor: ...

    @abc.abstractmethod
    def _push(
        self, ids: Ids, gradients: torch.Tensor, async_op: bool, timeout: float | None
    ) -> Any: ...

    @abc.abstractmethod
    def _set_rate(self, lr: float, timeout: float | None) -> None: ...

    @abc.abstractmethod
    def _blocks(self, since: int, rows: int, with_state: bool) -> Iterator[ExportBatch]: ...


def _ids_of(ids: object) -> torch.Tensor:
    """Return ids as a tensor of int64.

    Raises:
        Mismatch: if they are no whole numbers of 64 bits.
    """
    if isinstance(ids, torch.Tensor):
        tensor = ids.detach()
    else:
        try:
            array = np.asarray(ids)
            if array.dtype == np.uint64:
                array = array.view(np.int64)
            tensor = torch.from_numpy(array.astype(np.int64) if array.size == 0 else array.copy())
        except (TypeError, ValueError, OverflowError) as error:
            raise Mismatch(f"ids are whole numbers of 64 bits, got {ids!r:.60}: {error}") from error
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise Mismatch(f"ids are whole numbers, got {tensor.dtype}")
    return tensor.to(torch.int64)
