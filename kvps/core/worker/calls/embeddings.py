"""The calls on embedding tables: requests by id to each server.

A table is a key with one piece on every server, so its pushes are numbered, waited for and counted
anew as those of any key. The caller has sorted ids already and split them by server
(:mod:`kvps.core.embedding.id_split`): a push is one message to each, even if it has no ids for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvps import protocol as p
from kvps.core.embedding.id_hash import Ids
from kvps.core.embedding.spec import EmbeddingSpec, message_of, spec_of
from kvps.core.embedding.table import ExportBatch
from kvps.core.worker.calls.base import (
    Call,
    OnTimeout,
    Operation,
    PushCall,
    Values,
    demand_numbered_rounds,
    number_push,
    numbered,
    settle,
)
from kvps.core.worker.connection import Request
from kvps.core.worker.plan import Key, PieceLocation
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_ID
from kvps.errors import KvpsError, Mismatch, ProtocolError
from kvps.protocol.envelope import Packet
from kvps.tensors import TORCH, Memory, dtype_of, from_frame

PULL_BYTES = 4 << 20
"""About how many bytes one answer to a pull has; larger pulls have several answers."""
PUSH_BYTES_MAX = 64 << 20
"""Most bytes of a push to one server: it has one number, so it is one message."""


@dataclass(frozen=True, slots=True)
class MakeTable(Call):
    """Have every server make the table of ``key``, unless it has."""

    title = "embedding()"
    creates = True

    key: str
    recipe: EmbeddingSpec
    creator: int
    """The rank that calls; the first call of any rank makes it."""

    def is_creating(self, rank: int) -> bool:
        """Whether ``rank`` changes values by this call."""
        return rank == self.creator

    def is_redundant(self, store: WorkerStore) -> bool:
        """Whether the table is there already."""
        return self.key in store.keys

    def run(self, store: WorkerStore, values: Values) -> Operation:
        message = message_of(store.name, self.key, self.recipe)
        answers = yield [Request(server, message) for server in range(store.servers)]
        pieces = []
        for server, answer in enumerate(answers):
            assert isinstance(answer.message, p.Declared)
            (place,) = answer.message.places
            (piece,) = place.pieces
            pieces.append(PieceLocation(server, piece.chunk, piece.start, piece.size, server))
        store.place([(self.key, spec_of(store.servers), pieces)])
        return None


@dataclass(frozen=True, slots=True)
class PushTableRows(PushCall):
    """Push rows of a table, the only one of ``keys``: to each server its own, also where there are none."""

    title = "push() of rows"

    eager: bool
    """The caller goes on as soon as the push is under way."""
    dim: int
    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """(ids, rows) for each server: ids [n], ascending and each once, and rows [n, dim]; unchanged
    until the call ends."""

    def returns_early(self, store: WorkerStore) -> bool:
        """Whether the caller goes on at once; a table has an optimizer of its own."""
        return self.eager

    def run(self, store: WorkerStore, values: Values) -> Operation:
        demand_numbered_rounds(store)
        plan, (number,), _ = yield from number_push(store, self.keys)
        (key,) = plan.keys
        try:
            yield [_push(store, piece, number, *self.parts[piece.server], self.dim) for piece in key.pieces]
        except KvpsError:
            plan.refuse()
            raise
        return None


def _push(
    store: WorkerStore, held: PieceLocation, number: int, ids: torch.Tensor, rows: torch.Tensor, dim: int
) -> Request:
    dtype, count = dtype_of(rows).id, len(ids)
    message = p.PushIds(held.chunk, dtype, (store.rank,), number, dim, count)
    # An empty push counts, too: over 0, it is never dropped.
    size = max(1, sum(message.payload_sizes()))
    fill = partial(_fill, store.memory, ids, rows)
    return Request(held.server, message, fill=fill, payload_bytes=size, lane=held.chunk)


def _fill(memory: Memory, ids: torch.Tensor, rows: torch.Tensor, route: str) -> tuple[torch.Tensor, ...]:
    """Return the payload of a push, in one block that the server can read."""
    if not len(ids):
        return ()
    block = memory.empty(ids.nbytes + rows.nbytes, "uint8")
    numbers, values = block[: ids.nbytes].view(torch.int64), block[ids.nbytes :].view(rows.dtype)
    numbers.copy_(ids)
    values.view_as(rows).copy_(rows)
    return numbers, values


def check_size(key: str, parts: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> None:
    """Check that each server's share of a push fits in a message.

    Raises:
        Mismatch: if one does not.
    """
    for server, (_, rows) in enumerate(parts):
        if rows.nbytes > PUSH_BYTES_MAX:
            raise Mismatch(
                f"{key}: {rows.nbytes} bytes of a push are for server {server}, and one push has "
                f"{PUSH_BYTES_MAX} at most for each; push half as many rows at once"
            )


@dataclass(frozen=True, slots=True)
class PullTableRows(Call):
    """Pull rows of a table, the only one of ``keys``, after this rank's own pushes.

    Finishes with a tensor [n, dim].
    """

    title = "pull() of rows"
    on_timeout = OnTimeout.RETRY

    keys: tuple[str, ...]
    recipe: EmbeddingSpec
    ids: Ids
    """Ids [n], by server."""
    edges: tuple[int, ...]
    """The ids of server s are those from ``edges[s]`` up to ``edges[s + 1]``."""

    def run(self, store: WorkerStore, values: Values) -> Operation:
        plan = yield from numbered(store, self.keys)
        (key,) = plan.keys
        recipe = self.recipe
        rows = torch.empty((len(self.ids), recipe.dim), dtype=TORCH[recipe.dtype])
        at_once = max(1, PULL_BYTES // (recipe.dim * rows.element_size()))
        answers: list[p.PulledIds] = []
        requests = []
        for held in key.pieces:
            first, stop = self.edges[held.server], self.edges[held.server + 1]
            for begin in range(first, max(stop, first + 1), at_once):
                some = slice(begin, min(begin + at_once, stop))
                requests.append(_pull(held, key, self.ids[some], rows[some], answers))
        yield requests
        counted = [answer.version if store.ordered else answer.owed for answer in answers]
        key.applied = max(key.applied, min(counted))
        key.version = max([key.version, *[answer.version for answer in answers]])
        return rows


def _pull(held: PieceLocation, key: Key, ids: Ids, rows: torch.Tensor, answers: list[p.PulledIds]) -> Request:
    def take(packet: Packet, wanted: bool) -> None:
        answer = packet.message
        assert isinstance(answer, p.PulledIds)
        if (answer.count, answer.dim, BY_ID[answer.dtype].name) != (
            len(ids),
            rows.shape[1],
            dtype_of(rows).name,
        ):
            raise ProtocolError(
                f"server {held.server} answered {answer.count} rows of {answer.dim} elements; asked "
                f"for were {len(ids)} of {rows.shape[1]}"
            )
        answers.append(answer)
        if wanted and len(ids):
            rows.copy_(from_frame(packet.payload[0], dtype_of(rows).name).view_as(rows))

    return Request(
        held.server,
        p.PullIds(held.chunk, key.number, 0, len(ids)),
        lane=held.chunk,
        on_reply=take,
        payload=(torch.from_numpy(ids),) if len(ids) else (),
    )


@dataclass(frozen=True, slots=True)
class SetTableRate(Call):
    """Set the learning rate of a table (rank 0), when this rank's pushes so far are applied.

    In a synchronous store no later round has closed by then, and none does before this rank's next push.
    """

    title = "set_learning_rate() of a table"
    creates = True

    key: str
    lr: float

    def run(self, store: WorkerStore, values: Values) -> Operation:
        key = store.key(self.key)
        yield from settle(store, (key.name,))
        yield [Request(held.server, p.TableRate(held.chunk, self.lr)) for held in key.pieces]
        return None


@dataclass(frozen=True, slots=True)
class ExportBlock(Call):
    """Read some rows of a table that one server has; finishes with an ExportBatch."""

    title = "export()"
    on_timeout = OnTimeout.RETRY

    key: str
    server: int
    dim: int
    start: int
    count: int
    since: int
    with_state: bool

    def run(self, store: WorkerStore, values: Values) -> Operation:
        held = store.key(self.key).pieces[self.server]
        message = p.Export(held.chunk, self.start, self.count, self.since, self.with_state)
        (answer,) = yield [Request(held.server, message, lane=held.chunk)]
        exported = answer.message
        assert isinstance(exported, p.Exported)
        frames = iter(answer.payload)
        ids, stamps = [_numbers(frames) for _ in range(2)]
        columns = {}
        for column in exported.fields:
            dtype = BY_ID[column.dtype].name
            flat = from_frame(next(frames) if exported.count else memoryview(b""), dtype)
            columns[column.name] = flat.view(exported.count, self.dim)
        return ExportBatch(ids, stamps, columns, exported.next)


def _numbers(frames: Iterator[memoryview]) -> Ids:
    frame = next(frames, None)
    return np.empty(0, np.int64) if frame is None else from_frame(frame, "int64").numpy()
