"""The operations on embedding tables: requests by id to each server.

The conversations (:mod:`kvps.core.worker.calls.base`) of tables. A table is a key with one piece on every
server, so that its pushes are numbered, waited for and counted anew as those of any key. The caller has
put ids in order already and split them by server: a push takes one message to each, with ids or without.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kvps.core.embedding.id_hash import Ids, servers_of
from kvps.core.embedding.spec import message_of, spec_of
from kvps.core.embedding.table import ExportBatch
from kvps.core.worker import calls
from kvps.core.worker.calls.base import (
    Conversation,
    demand_presence,
    make_room,
    numbered,
    settle,
)
from kvps.core.worker.connection import Request
from kvps.core.worker.plan import Key, PieceLocation
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_ID, BY_NAME
from kvps.errors import KvpsError, Mismatch, ProtocolError
from kvps.protocol.envelope import WINDOW, Packet
from kvps.protocol.stores import Declared
from kvps.protocol.values import Export, Exported, PulledIds, PullIds, PushIds, TableRate
from kvps.tensors import TORCH, dtype_of, from_frame

PULL_BYTES = 4 << 20
"""About how much one answer to a pull has: of larger ones there are several."""
PUSH_BYTES_MAX = 64 << 20
"""What one frame holds: a push is one message to each server, as its number is one."""


def split(ids: Ids, servers: int) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return for each server the places of its ids among ``ids``, in order."""
    if servers == 1:
        return [np.arange(len(ids))]
    owners = servers_of(ids, servers)
    order = np.argsort(owners, kind="stable")
    return np.split(order, np.searchsorted(owners[order], np.arange(1, servers)))


def embed(store: WorkerStore, call: calls.MakeTable) -> Conversation:
    """Have every server make the table, unless it has."""
    message = message_of(store.name, call.key, call.recipe)
    answers = yield [Request(server, message) for server in range(store.servers)]
    pieces = []
    for server, answer in enumerate(answers):
        assert isinstance(answer.message, Declared)
        (place,) = answer.message.places
        (piece,) = place.pieces
        pieces.append(PieceLocation(server, piece.chunk, piece.start, piece.size, server))
    store.place([(call.key, spec_of(store.servers), pieces)])
    return None


def push_ids(store: WorkerStore, call: calls.PushTableRows) -> Conversation:
    """Push each server's share of the gradients, also where that is none."""
    demand_presence(store)
    plan = yield from numbered(store, call.keys)
    (key,) = plan.keys
    number = key.number
    is_full = number - key.applied >= WINDOW
    key.number += 1
    requests = [
        _push(store, held, number, *call.parts[held.server], call.dim) for held in key.pieces
    ]
    try:
        if is_full:
            yield from make_room(store, [key])
        demand_presence(store)
        yield requests
    except KvpsError:
        key.is_refused = True
        raise
    return None


def _push(
    store: WorkerStore,
    held: PieceLocation,
    number: int,
    ids: torch.Tensor,
    rows: torch.Tensor,
    dim: int,
) -> Request:
    dtype, count = dtype_of(rows).id, len(ids)
    message = PushIds(held.chunk, dtype, (store.rank,), number, dim, count)
    payload = (ids, rows.view(-1)) if count else ()
    # An empty push counts, too: over 0, it is never dropped.
    size = max(1, sum(message.payload_sizes()))
    return Request(held.server, message, payload_bytes=size, lane=held.chunk, payload=payload)


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


def pull_ids(store: WorkerStore, call: calls.PullTableRows) -> Conversation:
    """Return the rows of the ids, after this rank's own pushes."""
    plan = yield from numbered(store, call.keys)
    (key,) = plan.keys
    recipe = call.recipe
    rows = torch.empty((len(call.ids), recipe.dim), dtype=TORCH[recipe.dtype])
    at_once = max(1, PULL_BYTES // (recipe.dim * rows.element_size()))
    places = split(call.ids, store.servers)
    stands: list[PulledIds] = []
    requests = []
    for held in key.pieces:
        mine = places[held.server]
        for begin in range(0, max(1, len(mine)), at_once):
            some = mine[begin : begin + at_once]
            requests.append(_pull(held, key, call.ids[some], rows, some, stands))
    yield requests
    counted = [one.version if store.ordered else one.owed for one in stands]
    key.applied = max(key.applied, min(counted))
    key.version = max([key.version, *[one.version for one in stands]])
    return rows


def _pull(
    held: PieceLocation,
    key: Key,
    ids: Ids,
    rows: torch.Tensor,
    places: Ids,
    stands: list[PulledIds],
) -> Request:
    def take(packet: Packet, wanted: bool) -> None:
        answer = packet.message
        assert isinstance(answer, PulledIds)
        if (answer.count, answer.dim, BY_ID[answer.dtype].name) != (
            len(ids),
            rows.shape[1],
            dtype_of(rows).name,
        ):
            raise ProtocolError(
                f"server {held.server} answered {answer.count} rows of {answer.dim} elements; asked "
                f"for were {len(ids)} of {rows.shape[1]}"
            )
        stands.append(answer)
        if wanted and len(ids):
            found = from_frame(packet.payload[0], dtype_of(rows).name)
            rows[torch.from_numpy(places)] = found.view(-1, rows.shape[1])

    return Request(
        held.server,
        PullIds(held.chunk, key.number, 0, len(ids)),
        lane=held.chunk,
        on_reply=take,
        payload=(torch.from_numpy(ids),) if len(ids) else (),
    )


def set_table_rate(store: WorkerStore, call: calls.SetTableRate) -> Conversation:
    """Give every server the learning rate, when this rank's pushes so far were applied.

    In a synchronous store no later round has closed by then, and none does before this rank's next push.
    """
    key = store.key(call.key)
    yield from settle(store, (key.name,))
    yield [Request(held.server, TableRate(held.chunk, call.lr)) for held in key.pieces]
    return None


def export(store: WorkerStore, call: calls.ExportBlock) -> Conversation:
    """Return some rows that one server has."""
    held = store.key(call.key).pieces[call.server]
    message = Export(held.chunk, call.start, call.count, call.since, call.with_state)
    (answer,) = yield [Request(held.server, message, lane=held.chunk)]
    found = answer.message
    assert isinstance(found, Exported)
    frames = iter(answer.payload)
    ids, stamps = [_numbers(frames) for _ in range(2)]
    columns = {}
    for one in found.fields:
        dtype = BY_ID[one.dtype].name
        flat = from_frame(next(frames), dtype) if found.count else _nothing(dtype)
        columns[one.name] = flat.view(found.count, call.dim)
    return ExportBatch(ids, stamps, columns, found.next)


def _numbers(frames: Iterator[memoryview]) -> Ids:
    frame = next(frames, None)
    return np.empty(0, np.int64) if frame is None else from_frame(frame, "int64").numpy()


def _nothing(dtype: str) -> torch.Tensor:
    return torch.empty(0, dtype=TORCH[BY_NAME[dtype].name])
