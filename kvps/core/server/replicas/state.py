"""The state of a store, a key and a span as a standby is told of it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

from kvps import protocol as p
from kvps.core.refusals import RefusedCall
from kvps.core.server.chunks.rounds import Span
from kvps.core.server.participation import StoreLife
from kvps.core.server.snapshot.elements import history_of
from kvps.core.server.snapshot.model import SpanHistory
from kvps.core.server.store import ServerStore
from kvps.dtypes import BY_NAME

REFUSALS_MAX = 64


def settings_of(store: ServerStore, life: StoreLife | None, outside: frozenset[int]) -> p.CopyStore:
    """Return the settings of a store as the standby is told them."""
    joins, optimizer, rate, hyper = store.joins, store.sent_optimizer, store.sent_rate, store.hyper
    sent = optimizer.value or hyper
    maps = ({}, {}, {}) if sent is None else (dict(sent.values), dict(sent.lr_mult), dict(sent.wd_mult))
    return p.CopyStore(
        store.name,
        store.restored,
        store.stamps,
        by_text({} if life is None else life.closed),
        joins.over,
        by_text(joins.last),
        by_text(joins.made),
        "" if sent is None else sent.name,
        *maps,
        optimizer.calls,
        optimizer.after,
        0.0 if hyper is None else hyper.number("lr"),
        rate.value,
        rate.calls,
        rate.after,
        tuple([_refusal(*kept) for kept in store.refusals.kept(REFUSALS_MAX)]),
        tuple(sorted(outside)),
        by_text(store.entered),
    )


def _refusal(kind: Hashable, refused: RefusedCall) -> p.CopiedRefusal:
    what = kind if isinstance(kind, str) else str(cast("tuple[str]", kind)[0])
    return p.CopiedRefusal(what, isinstance(kind, str), *refused.attempt, refused.code, refused.text)


def copied_key(store: ServerStore, key: str) -> p.CopiedKey:
    """Return a key as the standby is told of it."""
    shard = store.shards[key]
    loading, (rank, incarnation) = shard.loading
    dtype, shape = BY_NAME[shard.spec.dtype].id, shard.spec.shape
    loaded = tuple([shard.empty.get(piece, -1) + 1 for piece in shard.pieces])
    return p.CopiedKey(
        key,
        dtype,
        shape,
        shard.start,
        shard.count,
        shard.call + 1,
        loading + 1,
        rank,
        incarnation,
        shard.stamp,
        shard.born,
        shard.pieces,
        shard.offsets,
        loaded,
    )


def told(span: Span) -> tuple[int, int, dict[str, int], dict[str, int], dict[str, int]]:
    """Return the history of a span as COPY-VALUES and COPY-ROWS have it."""
    version, step, *counts = history_of(span)
    pushed, head_start, clock_from = map(by_text, counts)
    return version, step, pushed, head_start, clock_from


def heard(message: p.CopyValues | p.CopyRows) -> SpanHistory:
    """Return the history that a message has."""
    counts = map(by_rank, (message.pushed, message.head_start, message.clock_from))
    return SpanHistory(message.version, message.step, *counts)


def by_text(numbers: dict[int, int]) -> dict[str, int]:
    """Return numbers of ranks as a message has them: its maps have text as keys."""
    return {str(rank): number for rank, number in numbers.items()}


def by_rank(numbers: dict[str, int]) -> dict[int, int]:
    """Return what :func:`by_text` was given."""
    return {int(rank): number for rank, number in numbers.items()}
