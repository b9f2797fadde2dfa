"""Embedding tables of a store as modules: forward pulls rows, backward pushes their gradients.

A module reads its input into :class:`~kvps.torch.embedding_bags.Bags`; a
:class:`~kvps.torch.embedding_exchange.RowExchange` gets rows, and takes gradients. A collection does this for
all of its tables at once.
"""

from __future__ import annotations

import torch

from kvps.errors import ConfigError, Mismatch
from kvps.store.embedding import EmbeddingTable
from kvps.torch.embedding_bags import MODES, Bags, bags_read, ids_read, pooled
from kvps.torch.embedding_exchange import RowExchange

OPS = ("average", "sum")


class _Lookup(torch.nn.Module):
    """A module that looks up rows of one table."""

    mode = "none"

    def __init__(self, table: EmbeddingTable, padding_idx: int | None, op: str) -> None:
        super().__init__()
        if not isinstance(table, EmbeddingTable):
            raise ConfigError(f"table: give the result of kv.embedding(...), got {type(table).__name__}")
        if padding_idx is not None and (type(padding_idx) is not int or not -(2**63) <= padding_idx < 2**63):
            raise ConfigError(f"padding_idx={padding_idx!r:.40}: give a whole number of 64 bits or None")
        self.table = table
        self.padding_idx = padding_idx
        self.op = checked_op(op)
        self._exchange = RowExchange((table,), op)

    def extra_repr(self) -> str:
        """Return the text between the brackets of its ``repr``."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table.name!r}, {self.table.dim}{padding}, op={self.op!r}"

    def _look_up(self, bags: Bags) -> torch.Tensor:
        is_trained = self.training and torch.is_grad_enabled()
        batch, (leaf,) = self._exchange.rows((bags.ids,), bags.device, is_trained=is_trained)
        return pooled(leaf, batch, 0, [[(self, bags)]])[0]


class Embedding(_Lookup):
    """Rows of a table by their ids, like :class:`torch.nn.Embedding`.

    It has no parameters: rows live in the store, whose optimizer updates them. A Trainer or
    DistributedOptimizer trains the other parameters of the model. ``state_dict`` does not contain the table;
    checkpoints and :meth:`kvps.EmbeddingTable.export` save it. Under ``torch.no_grad()``, and in ``eval()``,
    it only pulls. A backward pass updates the rows, also if the script then makes no step: look at the loss
    of a bad batch before ``backward()``, and use ``eval()`` where a loss must not train the table.
    In a synchronous store every rank must push equally often: if a backward did not reach the module, call
    ``table.push([], [])``. A deep copy of the module, as in torch's ``AveragedModel``, has the same table:
    it shows the newest rows, not their average.

    Args:
        table: from :meth:`kvps.KVStore.embedding`.
        padding_idx: an id whose row is always 0.
        op: ``"average"`` divides the sums of a synchronous store by the number of workers, unless the store
            itself computes means; ``"sum"`` does not. (Without rounds each push is applied by itself, and
            there is nothing to divide.)

    Raises:
        ConfigError: for an invalid argument.

    Example:
        >>> import torch, kvps, kvps.torch
        >>> kv = kvps.create("local")
        >>> words = kvps.torch.Embedding(kv.embedding("words", 2, init="zeros", lr=0.1))
        >>> words(torch.tensor([[5, 7]])).sum().backward()
        >>> words(torch.tensor([7, 8])).detach()
        tensor([[-0.1000, -0.1000],
                [ 0.0000,  0.0000]])
    """

    def __init__(self, table: EmbeddingTable, padding_idx: int | None = None, op: str = "average") -> None:
        super().__init__(table, padding_idx, op)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids``, of shape ``ids.shape + (dim,)``, on their device.

        Raises:
            Mismatch: if the ids are not integers. Timeout, WorkerLost: as the store's pull.
        """
        return self._look_up(self.read(f"table {self.table.name!r}", ids))

    def read(self, where: str, ids: object) -> Bags:
        """Return the checked ids; ``where`` names them in errors."""
        return ids_read(where, ids, self.padding_idx)


class EmbeddingBag(_Lookup):
    """Sums, means or maxima of the rows of bags of ids, like :class:`torch.nn.EmbeddingBag`.

    What :class:`Embedding` says of parameters, training, and synchronous stores holds here, too. Sums and
    their gradients, also those of ``per_sample_weights``, equal torch's bit for bit.

    Args:
        table: from :meth:`kvps.KVStore.embedding`.
        mode: ``"sum"``, ``"mean"`` or ``"max"``. (torch's default is ``"mean"``.)
        padding_idx: an id whose row is no part of any bag: it is neither pulled nor pushed.
        include_last_offset: offsets end with the number of ids.
        op: as in :class:`Embedding`.

    Raises:
        ConfigError: for an invalid argument.

    Example:
        >>> import torch, kvps, kvps.torch
        >>> kv = kvps.create("local")
        >>> words = kvps.torch.EmbeddingBag(kv.embedding("words", 2, init="zeros", optimizer="sgd", lr=0.5))
        >>> words(torch.tensor([5, 7, 7]), torch.tensor([0, 1])).sum().backward()
        >>> words(torch.tensor([[5, 7], [7, 8]])).detach()
        tensor([[-1.5000, -1.5000],
                [-1.0000, -1.0000]])
    """

    def __init__(
        self,
        table: EmbeddingTable,
        mode: str = "sum",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        op: str = "average",
    ) -> None:
        super().__init__(table, padding_idx, op)
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r:.40}: use one of {', '.join(MODES)}")
        self.mode = mode
        self.include_last_offset = bool(include_last_offset)

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the pooled rows of each bag, [bags, dim], on the device of ``input``.

        Args:
            input: ids; each row of two dimensions is a bag, and ids of one dimension have ``offsets``.
            offsets: where each bag begins: from 0, ascending. An empty bag gives zeros.
            per_sample_weights: the factor of each row, of the shape of ``input`` and the type of the rows;
                only with ``mode="sum"``.

        Raises:
            Mismatch: naming what does not fit. Timeout, WorkerLost: as the store's pull.
        """
        return self._look_up(self.read(f"table {self.table.name!r}", input, offsets, per_sample_weights))

    def read(self, where: str, ids: object, offsets: object = None, weights: object = None) -> Bags:
        """Return the checked bags; ``where`` names them in errors."""
        if weights is not None and self.mode != "sum":
            raise Mismatch(f"{where}: per_sample_weights need mode='sum', and this is {self.mode!r}")
        return bags_read(
            where,
            ids,
            offsets,
            weights,
            padding_idx=self.padding_idx,
            has_last=self.include_last_offset,
            dtype=self.table.dtype,
        )

    def extra_repr(self) -> str:
        """Return the text between the brackets of its ``repr``."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


def checked_op(op: str) -> str:
    """Return ``op``.

    Raises:
        ConfigError: if it is none of :data:`OPS`.
    """
    if op not in OPS:
        raise ConfigError(f"op={op!r:.40}: use one of {', '.join(OPS)}")
    return op
