"""The operations on optimizers and compression: settings, state and residuals."""

from __future__ import annotations

import torch

from kvps.core.placement import EMBEDDING
from kvps.core.worker import calls
from kvps.core.worker.calls.base import Conversation, settle
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import (
    AwaitAcks,
)
from kvps.core.worker.plan import (
    PieceLocation,
)
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_ID
from kvps.errors import KvpsError
from kvps.protocol.stores import (
    Field,
    GetState,
    Optimize,
    Rate,
    SetState,
    StateIs,
)
from kvps.tensors import dtype_of, from_frame


def set_optimizer(store: WorkerStore, call: calls.SetOptimizer) -> Conversation:
    """Give every server the optimizer, after the pushes that are on their way."""
    yield from settle(store, tuple(store.keys))
    hyper, before = call.hyper, store.optimized
    store.optimized = store.next_call(before)
    number, after, _ = store.optimized
    message = Optimize(
        store.name,
        number,
        store.rank == 0,
        hyper.name,
        dict(hyper.values),
        dict(hyper.lr_mult),
        dict(hyper.wd_mult),
        after,
        store.is_resumed and store.rank != 0,
        store.attempts.count(Optimize, number),
    )
    try:
        yield [Request(server, message) for server in range(store.servers)]
    except KvpsError:
        store.optimized = before
        store.attempts.refuse(Optimize, number)
        raise
    return None


def set_rate(store: WorkerStore, call: calls.SetRate) -> Conversation:
    """Give every server the learning rate: the rounds pushed so far are updated with the old."""
    yield from settle(store, tuple(store.keys))
    before = store.rated
    store.rated = store.next_call(before)
    number, after, _ = store.rated
    is_new = store.is_resumed and store.rank != 0
    refused = store.attempts.count(Rate, number)
    message = Rate(store.name, number, store.rank == 0, call.lr, after, is_new, refused)
    try:
        yield [Request(server, message) for server in range(store.servers)]
    except KvpsError:
        store.rated = before
        store.attempts.refuse(Rate, number)
        raise
    return None


def save_state(store: WorkerStore) -> Conversation:
    """Collect the optimizer's state of every key, after the pushes that are on their way.

    A key of which some part was never updated has no state yet.
    """
    yield from settle(store, tuple(store.keys))
    keys = [key for key in store.keys.values() if not key.name.startswith(EMBEDDING)]
    where = [(key, piece) for key in keys for piece in key.pieces]
    answers = yield [
        Request(piece.server, GetState(piece.chunk, piece.start, piece.size)) for _, piece in where
    ]
    steps: dict[str, list[int]] = {}
    parts: dict[tuple[str, str], list[tuple[PieceLocation, torch.Tensor]]] = {}
    for (key, piece), answer in zip(where, answers, strict=True):
        message = answer.message
        assert isinstance(message, StateIs)
        steps.setdefault(key.name, []).append(message.step)
        for one, frame in zip(message.fields, answer.payload, strict=True):
            values = from_frame(frame, BY_ID[one.dtype].name)
            parts.setdefault((key.name, one.name), []).append((piece, values))
    states: dict[str, tuple[int, dict[str, torch.Tensor]]] = {
        name: (min(found), {}) for name, found in steps.items()
    }
    for (name, title), found in parts.items():
        if len(found) == len(store.keys[name].pieces):
            row = torch.empty(store.keys[name].spec.count, dtype=found[0][1].dtype)
            for piece, values in found:
                row[piece.offset : piece.offset + piece.size] = values
            states[name][1][title] = row
    return states


def load_state(store: WorkerStore, call: calls.LoadState) -> Conversation:
    """Put states back where their keys lie."""
    requests = []
    for name, (step, rows) in call.states.items():
        for piece in store.key(name).pieces:
            cut = [row[piece.offset : piece.offset + piece.size] for row in rows.values()]
            fields = tuple(
                Field(title, dtype_of(row).id, piece.size)
                for title, row in zip(rows, cut, strict=True)
            )
            message = SetState(piece.chunk, piece.start, piece.size, step, fields)
            requests.append(Request(piece.server, message, payload=tuple(cut)))
    yield requests
    return None


def compress(store: WorkerStore, call: calls.Compress) -> Conversation:
    """Compress what is pushed from now on; no server is asked, as each push says how it is written."""
    yield []
    store.coding.use(call.rules)
    return None


def save_rests(store: WorkerStore) -> Conversation:
    """Return what compression left out, after the pushes that are on their way."""
    yield AwaitAcks()
    return {name: rest.to("cpu", copy=True) for name, rest in store.coding.rests.items()}


def load_rests(store: WorkerStore, call: calls.LoadRests) -> Conversation:
    """Put rests back, after the pushes that are on their way."""
    yield AwaitAcks()
    store.coding.rests = {name: rest.clone() for name, rest in call.rests.items()}
    return None
