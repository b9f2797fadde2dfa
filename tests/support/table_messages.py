"""Messages about one embedding table, which is the only part of each."""

from __future__ import annotations

from kvps.protocol.values import PulledTables, PullTables, PushTables, TableGroup, TablePart, TableStand


def push_table(
    chunk: int, dtype: int, ranks: tuple[int, ...], number: int, dim: int, size: int
) -> PushTables:
    """Return the push of ``size`` rows of a table."""
    return PushTables(ranks, (TableGroup(dtype, dim, 1),), (TablePart(chunk, number, size),))


def pull_table(chunk: int, after: int, size: int) -> PullTables:
    """Return the pull of ``size`` rows of a table, after so many pushes."""
    return PullTables((TablePart(chunk, after, size),))


def pulled_table(seq: int, dtype: int, dim: int, size: int, version: int, owed: int) -> PulledTables:
    """Return the answer to the pull of ``size`` rows of a table."""
    return PulledTables(seq, (TableGroup(dtype, dim, 1),), (size,), (TableStand(version, owed),))
