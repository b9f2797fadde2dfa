"""The model of a snapshot: the contents of a server's stores at one moment.

A snapshot has the value and the history of every element. The history recognises a push that comes again: a
server that goes on from a snapshot must refuse exactly the pushes that are in it. Open rounds, requests and
readers are no part of a snapshot: a *cut* is taken while there are none (:mod:`kvps.core.scheduler.cut`), and
the snapshots of all servers together are one cut.

Tensors of a snapshot are the server's own, held so that no update writes to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.embedding.stored import StoredRows
from kvps.core.optim.hyperparams import HyperParams
from kvps.dtypes import Spec
from kvps.protocol.stores import Open


class SpanHistory(NamedTuple):
    """The history of some elements, taken from a :class:`~kvps.core.server.chunks.rounds.Span`."""

    version: int
    """Closed rounds, or applied pushes, since init."""
    step: int
    """Number of optimizer updates."""
    pushed: dict[int, int]
    """Rank -> pushes taken in."""
    head_start: dict[int, int]
    """Replaced rank -> the pushes by which its clock is ahead."""
    clock_from: dict[int, int]
    """Rank -> the pushes that its clock leaves out."""


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Neighbouring elements of a key, and their history."""

    start: int
    """Index of its first element in the whole key."""
    history: SpanHistory
    weight: torch.Tensor
    """Flat."""
    state: dict[str, torch.Tensor]
    """State name -> the optimizer's state, flat and as long as the weight. Empty before the first update."""


@dataclass(frozen=True, slots=True)
class KeySnapshot:
    """The part of one key on one server; the key has a value."""

    name: str
    spec: Spec
    """Type and shape of the whole key."""
    call: int
    """The last DECLARE whose value is loaded: 0 for init, k for the k-th broadcast."""
    portions: tuple[SnapshotPart, ...]
    """Parts in order, without overlap."""


@dataclass(frozen=True, slots=True)
class RowsSnapshot:
    """Rows of an embedding table on one server."""

    ids: torch.Tensor
    """int64 [n]; undefined where the stamp is 0."""
    stamps: torch.Tensor
    """int64 [n]: the version that each row's last push made; 0 where there is no row."""
    columns: dict[str, tuple[torch.Tensor | StoredRows, ...]]
    """``weight`` and the optimizer's states: tensors [_, dim] that have n rows together."""
    counts: torch.Tensor
    """Count-min sketch of the pushes of ids without a row, uint8 [depth, width]; [0, 0] where they
    are not counted."""
    counted: int
    """Pushes counted since the sketch was last halved."""


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """One embedding table, on one server or on all servers of a cut."""

    key: str
    recipe: EmbeddingSpec
    lr: float
    """The learning rate that was set last."""
    history: SpanHistory
    parts: tuple[RowsSnapshot, ...]

    def tensors(self) -> Iterator[torch.Tensor | StoredRows]:
        """Yield all tensors."""
        for part in self.parts:
            yield from (part.ids, part.stamps, part.counts)
            for column in part.columns.values():
                yield from column


class JoinsSnapshot(NamedTuple):
    """The ranks that had run out of data, taken from a
    :class:`~kvps.core.server.participation.JoinTracker`."""

    over: int
    last: dict[int, int]
    made: dict[int, int]


NO_JOINS = JoinsSnapshot(0, {}, {})


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """One store on one server."""

    opened: Open
    hyper: HyperParams | None
    """The present optimizer, with the learning rate that was set last."""
    sent_hyper: HyperParams | None
    """The optimizer that was given to set_optimizer."""
    sent_lr: float
    optimize_calls: int
    rate_calls: int
    keys: tuple[KeySnapshot, ...]
    optimize_after: int = 0
    rate_after: int = 0
    """Rounds that rank 0 had pushed before its last set_learning_rate."""
    joins: JoinsSnapshot = NO_JOINS
    tables: tuple[TableSnapshot, ...] = ()

    @property
    def name(self) -> str:
        """The store's name."""
        return self.opened.store

    @property
    def versions(self) -> tuple[int, int]:
        """The lowest and the highest version among the elements; zeros where there is none."""
        versions = [portion.history.version for key in self.keys for portion in key.portions]
        versions += [table.history.version for table in self.tables]
        return min(versions, default=0), max(versions, default=0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All stores of one server."""

    server: int
    servers: int
    """Number of servers, which decides the placement of keys."""
    stores: tuple[StoreSnapshot, ...]

    def tensors(self) -> Iterator[torch.Tensor | StoredRows]:
        """Yield all tensors in a fixed order: the weight of each portion, then its state."""
        for store in self.stores:
            for table in store.tables:
                yield from table.tensors()
            for key in store.keys:
                for portion in key.portions:
                    yield portion.weight
                    yield from portion.state.values()

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum([tensor.numel() * tensor.element_size() for tensor in self.tensors()])
