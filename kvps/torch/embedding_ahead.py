"""Rows that are asked for before the forward that needs them.

A pull that was begun ahead may be answered before a push that this worker makes meanwhile is applied. So
after each push, the rows that it named are asked for again, behind the push. What a forward then gets is
exact if no other worker has pushed to these rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvps.runtime.ticket import Ticket
from kvps.store.table_batch import TableBatch, Tables

AHEAD_MAX = 8
"""Most batches that are asked for ahead, and most pushes for which a batch is asked for again; of more, the
oldest are forgotten."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A batch that was asked for."""

    given: torch.Tensor
    """The ids of all tables, as they were given."""
    batch: TableBatch
    ticket: Ticket
    changes: list[int]
    """For each table, the number of changes that are in the rows, with those of ``again``."""
    again: list[tuple[list[torch.Tensor], Ticket]] = field(default_factory=list)
    """For each push since, the places of its rows in each group, and the pull of their newest values."""


class RowsAhead:
    """The batches of some tables that were asked for, and not used yet."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._asked: deque[_Asked] = deque(maxlen=AHEAD_MAX)

    def ask(self, ids: Sequence[torch.Tensor]) -> None:
        """Ask for the rows of ids, int64 [k] for each table."""
        batch = self._tables.batch(ids)
        changes = [table.changes for table in self._tables.all]
        self._asked.append(_Asked(torch.cat([*ids]), batch, batch.ask(), changes))

    def take(self, ids: Sequence[torch.Tensor]) -> tuple[TableBatch, list[torch.Tensor]] | None:
        """Return the batch of ids that were asked for, and the rows of each group; None if they were not, or
        the tables were pushed to without :meth:`pushed`, or restored."""
        if not self._asked:
            return None
        given, sizes = torch.cat([*ids]), [len(some) for some in ids]
        for asked in self._asked:
            if torch.equal(asked.given, given) and sizes == [len(at) for at in asked.batch.split.places]:
                self._asked.remove(asked)
                return self._received(asked)
        return None

    def _received(self, asked: _Asked) -> tuple[TableBatch, list[torch.Tensor]] | None:
        if asked.changes != [table.changes for table in self._tables.all]:
            return None
        rows: Any = asked.ticket.wait()
        for places, ticket in asked.again:
            newest: Any = ticket.wait()
            for own, at, some in zip(rows, places, newest, strict=True):
                own.index_copy_(0, at, some)
        return asked.batch, rows

    def pushed(self, pushed: TableBatch) -> None:
        """Ask again for the rows of a push that was just made, if a forward may still want them."""
        for asked in [*self._asked]:
            if len(asked.again) == AHEAD_MAX:
                self._asked.remove(asked)
                continue
            asked.changes = [count + 1 for count in asked.changes]
            ids, places = [], []
            edges = asked.batch.split.edges
            for group in self._tables.groups:
                found = []
                for at in range(group.first, group.stop):
                    own, other = asked.batch.ids[at].numpy(), pushed.ids[at].numpy()
                    where = own.searchsorted(other)
                    same = (
                        own.take(where, mode="clip") == other if len(own) else np.zeros(len(other), np.bool_)
                    )
                    ids.append(torch.from_numpy(other[same]))
                    found.append(where[same] + edges[at] - edges[group.first])
                places.append(torch.from_numpy(np.concatenate(found)))
            if any(len(some) for some in ids):
                asked.again.append((places, self._tables.batch(ids).ask()))

    def forget(self) -> None:
        """Forget all that was asked for: the servers have returned to a checkpoint."""
        self._asked.clear()
