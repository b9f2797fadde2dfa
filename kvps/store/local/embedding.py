"""An embedding table within one process: the servers' own, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvps.core.embedding.id_hash import Ids
from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.embedding.table import EmbeddingRows, ExportBatch
from kvps.core.server.snapshot.capture_tables import filled
from kvps.core.server.snapshot.model import TableSnapshot
from kvps.errors import Mismatch
from kvps.runtime.ticket import Handle, finished
from kvps.store.embedding.table import EmbeddingTable, Owner
from kvps.store.local import checkpoint


class LocalEmbedding(EmbeddingTable):
    """A table of a ``local`` or ``device`` store."""

    def __init__(self, store: Owner, name: str, recipe: EmbeddingSpec) -> None:
        super().__init__(store, name, recipe)
        self._begin = store._begin
        self.here = EmbeddingRows(recipe)
        self.pushes = 0
        """The number of pushes that were applied: the version."""

    def __len__(self) -> int:
        """Return how many rows there are."""
        self._begin()
        return len(self.here)

    def version(self, *, timeout: float | None = None) -> int:
        """Return how many pushes were applied."""
        self._begin()
        return self.pushes

    def resume(self, *, timeout: float | None = None) -> int:
        """Return the version; a local store never forgets a push."""
        return self.version()

    def demand_recipe(self, recipe: EmbeddingSpec) -> None:
        """Check that it is made by ``recipe``.

        Raises:
            Mismatch: if it is not.
        """
        if difference := self.recipe.difference(recipe):
            raise Mismatch(
                f"table {self.name!r} of store {self.store.name!r} has another {difference}: in the "
                "checkpoint, or where it was made first; make it as it was made then"
            )

    def snapshot(self) -> TableSnapshot:
        """Return it as a checkpoint has it."""
        return checkpoint.table_snapshot(self.name, self.here, self.pushes)

    def restore(self, snapshot: TableSnapshot) -> None:
        """Be what it was in a checkpoint."""
        self.here, self.pushes = filled(snapshot), snapshot.history.version

    def _pull(self, ids: Ids, timeout: float | None) -> torch.Tensor:
        self._begin()
        return self.here.pull(ids)

    @torch.no_grad()
    def _push(
        self, ids: Ids, gradients: torch.Tensor, async_op: bool, timeout: float | None
    ) -> Any:
        self._begin()
        self.pushes += 1
        self.here.push(
            ids, gradients.to(self.here.summed_in), version=self.pushes, step=self.pushes
        )
        return Handle(finished(), lambda: None) if async_op else None

    def _set_rate(self, lr: float, timeout: float | None) -> None:
        self._begin()
        self.here.set_rate(lr)

    def _blocks(self, since: int, rows: int, with_state: bool) -> Iterator[ExportBatch]:
        self._begin()
        start = 0
        while True:
            block = self.here.block(start, rows, since, with_state=with_state)
            yield block
            start = block.next
            if not start:
                return
