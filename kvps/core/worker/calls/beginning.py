"""The beginning of an added worker: one round, from which on its pushes count on all parts of all keys.

The servers hear one after the other that it takes part, and rounds close meanwhile. So some parts are rounds
ahead of others when all wait for it. It begins with the round of the foremost, and pushes nothing in the
rounds before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence

import torch

from kvps.core.placement import EMBEDDING
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import Parts, Step
from kvps.core.worker.plan import Key, PieceLocation, TransferPlan
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_NAME
from kvps.protocol.envelope import WINDOW, Packet
from kvps.protocol.values import Push, PushRows, PushTables, Run, TableGroup, TablePart
from kvps.tensors import TORCH

EmptyPush = Callable[[WorkerStore, Key, PieceLocation, int], Request]
"""Returns the push of nothing, of some number, to a piece of a key. It has no ``payload_bytes``: its caller's
values are not sent yet."""
LIGHT = sys.float_info.min
"""The weight of a push of nothing in a mean: it changes no sum of weights."""


def push_nothing(store: WorkerStore, key: Key, piece: PieceLocation, number: int) -> Request:
    """Return a push of zeros; of no rows to an embedding table."""
    dtype = BY_NAME[key.spec.dtype]
    if key.name.startswith(EMBEDDING):
        groups = (TableGroup(dtype.id, key.spec.width, 1),)
        table = PushTables((store.rank,), groups, (TablePart(piece.chunk, number, 0),))
        return Request(piece.server, table, lane=piece.chunk)
    runs = (Run(piece.start, piece.size, number),)
    message = Push(piece.chunk, dtype.id, (store.rank,), LIGHT, False, runs)
    zeros = torch.zeros(piece.size, dtype=TORCH[dtype.name])
    return Request(piece.server, message, lambda _: (zeros,), lane=piece.chunk)


def push_no_rows(store: WorkerStore, key: Key, piece: PieceLocation, number: int) -> Request:
    """Return a push of no rows to the part of a key that lies on the server of a piece."""
    dtype = BY_NAME[key.spec.dtype]
    message = PushRows(store.name, key.name, dtype.id, (store.rank,), number, key.spec.width, 0)
    return Request(piece.server, message, lane=piece.chunk)


def begin_alike(
    store: WorkerStore, plan: TransferPlan, found: Sequence[Parts], empty: EmptyPush
) -> Generator[Step, list[Packet], dict[str, int]]:
    """Return by key the number with which this rank begins; none of keys with which it has begun before.

    Args:
        store: one in which this rank takes part.
        plan: of keys that it pushes together.
        found: the version of each part of each key, and the number that the rank owes there.
        empty: makes a push of nothing.
    """
    new = [
        (key, parts)
        for key, parts in zip(plan.keys, found, strict=True)
        if key.is_refused and key.name not in store.begun
    ]
    ahead = {key.name: max((owed for _, owed in parts.values()), default=0) for key, parts in new}
    first = max(ahead.values(), default=0)
    # A key that is far behind is not pushed in each step.
    begun = {name: first if first - owed < WINDOW else owed for name, owed in ahead.items()}
    yield [
        empty(store, key, piece, number)
        for key, parts in new
        for piece, (_, owed) in parts.items()
        for number in range(owed, begun[key.name])
    ]
    store.begun |= begun.keys()
    return begun
