"""An embedding table over servers: calls of the worker core, and their ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from kvps.core.embedding.id_hash import Ids
from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.embedding.table import ExportBatch
from kvps.core.placement import EMBEDDING
from kvps.core.worker import calls
from kvps.core.worker.calls.embeddings import check_size, split
from kvps.errors import KvpsError
from kvps.runtime.ticket import Handle
from kvps.runtime.worker_session import WorkerSession
from kvps.store.embedding.table import EmbeddingTable, Owner


class SessionOwner(Owner, Protocol):
    """A store whose calls are those of a worker core."""

    _later: list[KvpsError]

    @property
    def session(self) -> WorkerSession:
        """This process's place in the cluster."""

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""

    def _limit(self, timeout: float | None) -> float: ...


class DistEmbedding(EmbeddingTable):
    """A table of a ``dist_*`` store."""

    def __init__(self, store: SessionOwner, name: str, recipe: EmbeddingSpec) -> None:
        super().__init__(store, name, recipe)
        self._key = EMBEDDING + name
        self._dist = store

    def make(self, limit_s: float) -> None:
        """Have the servers make it, or check that what they have is the same."""
        self._call(
            calls.MakeTable(self._dist.name, self._key, self.recipe, self._dist.rank), limit_s
        )

    def __len__(self) -> int:
        """Return how many rows there are, on all servers, after this rank's own pushes."""
        counts = torch.empty(self._servers, dtype=torch.int64)
        self._make(calls.PullValues(self._dist.name, (self._key,), (counts,), 0, 0), None)
        return int(counts.sum())

    def version(self, *, timeout: float | None = None) -> int:
        """Return the closed rounds (sync) or applied pushes (async), after this rank's pushes."""
        found = self._make(calls.Versions(self._dist.name, (self._key,)), timeout)
        assert isinstance(found, list)
        return int(found[0])

    def resume(self, *, timeout: float | None = None) -> int:
        """Number the next pushes from the lowest one that this rank still owes; return it."""
        owed = self._make(calls.ResumeKeys(self._dist.name, (self._key,)), timeout)
        assert isinstance(owed, int)
        return owed

    def _pull(self, ids: Ids, timeout: float | None) -> torch.Tensor:
        call = calls.PullTableRows(self._dist.name, (self._key,), self.recipe, ids)
        rows = self._make(call, timeout)
        assert isinstance(rows, torch.Tensor)
        return rows

    def _push(
        self, ids: Ids, gradients: torch.Tensor, async_op: bool, timeout: float | None
    ) -> Any:
        whole = torch.from_numpy(ids)
        places = [torch.from_numpy(one) for one in split(ids, self._servers)]
        parts = tuple([(whole[place], gradients[place]) for place in places])
        check_size(f"table {self.name!r}", parts)
        store = self._dist
        store._begin()
        call = calls.PushTableRows(store.name, (self._key,), not async_op, self.dim, parts)
        ticket = store.session.call(call, store._limit(timeout))
        if async_op:
            return Handle(ticket, lambda: None)
        ticket.on_error(store._later.append)
        ticket.wait_copied()
        return None

    def _set_rate(self, lr: float, timeout: float | None) -> None:
        self._dist._begin()
        if self._dist.rank == 0:
            self._make(calls.SetTableRate(self._dist.name, self._key, lr), timeout)

    def _blocks(self, since: int, rows: int, with_state: bool) -> Iterator[ExportBatch]:
        self.version()  # this rank's own pushes are in it then
        for server in range(self._servers):
            start = 0
            while True:
                call = calls.ExportBlock(
                    self._dist.name, self._key, server, self.dim, start, rows, since, with_state
                )
                block = self._make(call, None)
                assert isinstance(block, ExportBatch)
                yield block
                start = block.next
                if not start:
                    break

    @property
    def _servers(self) -> int:
        return self._dist.session.info.servers

    def _make(self, call: calls.Call, timeout: float | None) -> object:
        self._dist._begin()
        return self._call(call, self._dist._limit(timeout))

    def _call(self, call: calls.Call, limit_s: float) -> object:
        return self._dist.session.call(call, limit_s).wait()
