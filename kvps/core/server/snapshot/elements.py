"""The state of neighbouring elements of a chunk, as a snapshot and a standby have it: values, the optimizer's
states, what compressed values lack, and the history.

Pushes of open rounds are no part of it: their ranks push again.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import torch

from kvps.core.server.chunks.rounds import Span
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.snapshot.model import SpanHistory
from kvps.core.server.store import ServerStore

REST = "kvps.rest"
"""Residuals of values that are published compressed, beside the optimizer's states."""


def states_of(chunk: Chunk, start: int, stop: int) -> dict[str, torch.Tensor]:
    """Return the optimizer's states of elements, and their residuals if there are some; views."""
    states = {name: tensor[start:stop] for name, tensor in (chunk.state or {}).items()}
    if chunk.back is not None and chunk.back.owes(start, stop):
        states[REST] = chunk.back.residual[start:stop]
    return states


def history_of(span: Span) -> SpanHistory:
    """Return the history of a span, with the pushes that are in its values."""
    pushed = dict(span.pushed)
    for round_ in reversed(span.rounds):
        pushed.update({**dict.fromkeys(round_.ranks, round_.number), **round_.moved})
    for update in reversed(span.due):
        ranks = update.ranks or chain.from_iterable(update.whose)
        pushed.update({**dict.fromkeys(ranks, update.number), **update.moved})
    return SpanHistory(span.version, span.step, pushed, dict(span.head_start), dict(span.clock_from))


def put_history(span: Span, history: SpanHistory) -> None:
    """Give a span another history; what was pushed to its values is void."""
    span.rounds.clear()
    span.due.clear()
    span.version, span.step = history.version, history.step
    span.pushed, span.head_start = dict(history.pushed), dict(history.head_start)
    span.clock_from = dict(history.clock_from)


def put(
    store: ServerStore,
    chunk: Chunk,
    start: int,
    stop: int,
    weight: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    history: SpanHistory,
) -> None:
    """Let whole pieces be as another copy of them is; ``states`` are those of :func:`states_of`.

    Raises:
        Mismatch: if the states are those of another optimizer.
    """
    chunk.overwritable(start, stop).part(start, stop).copy_(weight)
    rows = {name: row for name, row in states.items() if name != REST}
    if (chunk.state or {}).keys() - rows.keys():
        store.forget_state(chunk, start, stop)
    if store.updater is not None and rows:
        store.restore(chunk, start, stop, history.step, rows)
    if chunk.back is not None:  # its last steps are no part: a worker with older values pulls all
        chunk.back.forget(start, stop)
    if REST in states:
        chunk.publish()
        assert chunk.back is not None, "only float32 values have residuals"
        for _, begin, end in chunk.pieces(start, stop):
            chunk.back.revive(begin, states[REST][begin - start : end - start])
    for span in chunk.cut(start, stop):
        put_history(span, history)
