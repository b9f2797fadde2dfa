"""The figures of a server: its gauges, and the answer to MEASURE, made of these and of all that it has counted."""

from __future__ import annotations

import math

from kvps.core.membership_client import MembershipClient
from kvps.core.server.context import RequestContext
from kvps.core.server.memory_budget import MemoryBudget
from kvps.protocol.membership import Count, Histogram, Measured, OldRound, StoreFigures

COUNTS_MAX = 8192
"""Counters and gauges of an answer: with 1,500 workers there are 6,000 of workers."""
STORES_MAX = 64


def gauges(
    member: MembershipClient,
    context: RequestContext,
    budget: MemoryBudget,
    epoch: int,
    oldest_round_s: float,
) -> dict[tuple[str, str], float]:
    """Return the gauges of a server, by metric and label; the memory limit is infinite where there is none."""
    values: dict[tuple[str, str], float] = {
        ("kvps_epoch", ""): epoch,
        ("kvps_view", ""): member.number,
        ("kvps_round_age_seconds", ""): oldest_round_s,
        ("kvps_stores", ""): len(context.stores),
        ("kvps_pending_requests", ""): sum([len(one.pending) for one in context.sessions.values()]),
        ("kvps_memory_limit_bytes", ""): (
            math.inf if budget.limit_bytes is None else budget.limit_bytes
        ),
    }
    for kind, size in budget.reserved()._asdict().items():
        values["kvps_memory_bytes", kind] = size
    if member.welcome is not None:
        values["kvps_incarnation", ""] = member.welcome.incarnation
    return values


def measured(
    number: int,
    context: RequestContext,
    values: dict[tuple[str, str], float],
    rounds: tuple[OldRound, ...],
) -> Measured:
    """Return the answer to MEASURE ``number``.

    Args:
        number: that of the question.
        context: the stores and the counters.
        values: the gauges.
        rounds: the oldest open round of each store.
    """
    counted = {**context.counts.values(), **values}
    counts = [
        Count(name, label, float(value))
        for (name, label), value in counted.items()
        if math.isfinite(value)
    ]
    histograms = [
        Histogram(name, one.buckets, float(one.total_s))
        for name, one in context.counts.durations().items()
    ]
    versions = context.tally.versions
    stores = [
        StoreFigures(name, one.opened.mode, len(one.shards), versions.get(name, 0))
        for name, one in context.stores.items()
    ]
    return Measured(
        number,
        tuple(counts[:COUNTS_MAX]),
        tuple(histograms),
        tuple(stores[:STORES_MAX]),
        context.tally.hot(context.chunks),
        rounds,
    )
