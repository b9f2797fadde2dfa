"""An embedding table of a store as a module: forward pulls rows, backward pushes their gradients.

The rows of a forward are a leaf of autograd, made for it alone. When backward has accumulated the gradient of
the leaf, the module takes it; at the end of the pass it pushes the gradients of all forwards at once. So each
backward makes one push, however often the module was called before, and a forward without gradients makes
none.
"""

from __future__ import annotations

import logging

import torch
from torch.nn.functional import embedding as looked_up

from kvps.errors import ConfigError, EpochChanged
from kvps.store.embedding import EmbeddingTable
from kvps.torch.sync.parameter_hooks import PassEnd, when_accumulated

log = logging.getLogger("kvps")
OPS = ("average", "sum")


class Embedding(torch.nn.Module):
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
        super().__init__()
        if not isinstance(table, EmbeddingTable):
            raise ConfigError(f"table: give the result of kv.embedding(...), got {type(table).__name__}")
        if padding_idx is not None and type(padding_idx) is not int:
            raise ConfigError(f"padding_idx={padding_idx!r:.40}: give a whole number or None")
        if op not in OPS:
            raise ConfigError(f"op={op!r:.40}: use one of {', '.join(OPS)}")
        self.table = table
        self.padding_idx = padding_idx
        self.op = op
        self._gathered: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Ids and gradients of this backward."""
        self._end = PassEnd()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids``, of shape ``ids.shape + (dim,)``, on their device.

        Raises:
            Mismatch: if the ids are not integers. Timeout, WorkerLost: as the store's pull.
        """
        unique, place = torch.unique(ids, return_inverse=True)
        rows = self._pull(unique)
        if self.padding_idx is not None:
            rows[unique == self.padding_idx] = 0
        if self.training and torch.is_grad_enabled():
            rows.requires_grad_()
            when_accumulated(rows, lambda leaf: self._gather(unique, leaf))
        return looked_up(place, rows)

    def extra_repr(self) -> str:
        """Return the text between the brackets of its ``repr``."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table.name!r}, {self.table.dim}{padding}, op={self.op!r}"

    def _gather(self, ids: torch.Tensor, leaf: torch.Tensor) -> None:
        """Take a complete gradient; the first one schedules a push at the end of the pass."""
        assert leaf.grad is not None
        if self._end.wait(self._push):
            self._gathered = []  # of a pass that failed nothing is pushed
        gradients = leaf.grad
        if self.padding_idx is not None:
            others = ids != self.padding_idx
            ids, gradients = ids[others], gradients[others]
        self._gathered.append((ids, gradients))
        leaf.grad = None

    def _push(self) -> None:
        gathered, self._gathered = self._gathered, []
        ids = torch.cat([own_ids for own_ids, _ in gathered])
        gradients = torch.cat([gradient for _, gradient in gathered])
        divisor = self._divisor
        if divisor > 1:
            gradients = gradients / divisor
        try:
            self.table.push(ids, gradients)
        except EpochChanged as error:
            log.warning("%s", error)  # gradients of rows that nobody has any more

    def _pull(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            while True:
                try:
                    return self.table.pull(ids)
                except EpochChanged as error:
                    log.warning("%s", error)

    @property
    def _divisor(self) -> int:
        store = self.table.store
        is_summed = store.type.startswith("dist_sync") and not store.average
        return store.num_workers if self.op == "average" and is_summed else 1
