"""Messages about one embedding table, which is the only part of each, and calls of its rows."""

from __future__ import annotations

import torch

from kvps.core.embedding.alike import AlikeTables, PushedRows
from kvps.core.embedding.id_hash import Ids
from kvps.core.embedding.table import EmbeddingRows
from kvps.protocol.values import PulledTables, PullTables, PushTables, TableGroup, TablePart, TableStand
from kvps.tensors import TORCH


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


def push_rows(table: EmbeddingRows, ids: Ids, gradients: torch.Tensor, *, version: int, step: int) -> None:
    """Push to a table alone, without a message."""
    AlikeTables((table,)).push([PushedRows(ids, (len(ids),), gradients)], [version], step)


def pull_rows(table: EmbeddingRows, ids: Ids) -> torch.Tensor:
    """Pull from a table alone, without a message."""
    out = torch.empty((len(ids), table.recipe.dim), dtype=TORCH[table.recipe.dtype])
    AlikeTables((table,)).pull(ids, (len(ids),), out)
    return out
