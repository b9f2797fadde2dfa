"""The figures of a server: its gauges, the numbers of its BEAT, and the answer to MEASURE, made of
all that it counts."""

from __future__ import annotations

import math

from kvps import protocol as p
from kvps.core.counts import Counts
from kvps.core.membership_client import BeatFigures
from kvps.core.placement import EMBEDDING
from kvps.core.server.chunks.slab import Chunks
from kvps.core.server.context import RequestContext
from kvps.core.server.control import Control
from kvps.core.server.memory_budget import MemoryBudget
from kvps.core.server.round_logs import Stall

COUNTS_MAX = 8192
"""Counters and gauges of an answer: with 1,000 workers there are 7,000 of workers. Gauges come first."""
STORES_MAX = TABLES_MAX = 64
SPANS_MAX = 10_000
"""Spans up to which open rounds are looked for at each MEASURE; where there are more, every 5 s."""
TELL_MAX = 256
"""Maximum stores, and maximum ranks of each, that the scheduler is told of."""
ROWS_LOOKED = 1 << 24
"""Rows after which no other table is looked at for hot rows: a million takes half a millisecond."""


def of_beat(counts: Counts, budget: MemoryBudget) -> BeatFigures:
    """Return the numbers of a server for its next BEAT."""
    return BeatFigures(
        in_bytes=counts.value("kvps_payload_bytes_total", "in"),
        out_bytes=counts.value("kvps_payload_bytes_total", "out"),
        memory_bytes=sum(budget.reserved()),
        limit_bytes=budget.limit_bytes or 0,
    )


def gauges(
    context: RequestContext, control: Control, epoch: int, oldest_round_s: float
) -> dict[tuple[str, str], float]:
    """Return the gauges of a server, by metric and label; the memory limit is infinite where there
    is none."""
    member, budget = context.member, control.budget
    values: dict[tuple[str, str], float] = {
        ("kvps_epoch", ""): epoch,
        ("kvps_view", ""): member.number,
        ("kvps_round_age_seconds", ""): oldest_round_s,
        ("kvps_stores", ""): len(context.stores),
        ("kvps_pending_requests", ""): sum([len(session.pending) for session in context.sessions.values()]),
        ("kvps_memory_limit_bytes", ""): (math.inf if budget.limit_bytes is None else budget.limit_bytes),
        ("kvps_memory_used_ratio", ""): budget.pressure.used_share,
        **context.more_gauges(),
    }
    for kind, size in budget.reserved()._asdict().items():
        values["kvps_memory_bytes", kind] = size
    if member.welcome is not None:
        values["kvps_incarnation", ""] = member.welcome.incarnation
    return values


def measure(
    number: int, context: RequestContext, control: Control, epoch: int, oldest_round_s: float, now: float
) -> tuple[p.Measured, float]:
    """Return the answer to a MEASURE, and the age of the oldest open round.

    Args:
        number: of the MEASURE.
        context: the stores and the counters.
        control: finds the oldest open rounds, and has the memory budget.
        epoch: how often the job was rolled back.
        oldest_round_s: that age when the rounds were looked at last.
        now: the time.
    """
    spans = sum([len(chunk.spans) for chunk in context.chunks.by_number.values()])
    rounds: list[p.OldRound] = []
    if spans <= SPANS_MAX:
        rounds = [old_round(context.member.rank, stall) for stall in control.oldest(now)]
        oldest_round_s = max([stalled.age_s for stalled in rounds], default=0.0)
    counted = {**gauges(context, control, epoch, oldest_round_s), **context.meter.values()}
    counts = [
        p.Count(name, label, float(value)) for (name, label), value in counted.items() if math.isfinite(value)
    ]
    histograms = [
        p.Histogram(name, duration.buckets, float(duration.total_s))
        for name, duration in context.meter.durations().items()
    ]
    versions = context.meter.versions
    stores = [
        p.StoreFigures(name, store.opened.mode, len(store.shards), versions.get(name, 0))
        for name, store in context.stores.items()
    ]
    answer = p.Measured(
        number,
        tuple(counts[:COUNTS_MAX]),
        tuple(histograms),
        tuple(stores[:STORES_MAX]),
        context.meter.hot(context.chunks),
        tuple(rounds[:TELL_MAX]),
    )
    return answer, oldest_round_s


def hot_rows(chunks: Chunks) -> tuple[p.HotRows, ...]:
    """Return the most used rows of the first tables that count uses and have rows."""
    found: list[p.HotRows] = []
    looked = 0
    for chunk in chunks.by_number.values():
        table = chunk.embedding
        if table is None or not (table.recipe.half_life and len(table)):
            continue
        uses = table.hottest(p.HOT_ROWS_MAX, chunk.spans[0].step)
        found.append(p.HotRows(chunk.store, chunk.keys[0].removeprefix(EMBEDDING), uses))
        looked += len(table)
        if looked >= ROWS_LOOKED or len(found) == TABLES_MAX:
            break
    return tuple(found)


def old_round(server: int, stall: Stall) -> p.OldRound:
    """Return an open round as the scheduler is told of it."""
    missing = stall.missing[:TELL_MAX]
    return p.OldRound(server, stall.store, stall.key, stall.number, missing, stall.age_s)
