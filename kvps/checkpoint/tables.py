"""Embedding tables in the file of a snapshot: rows as columns, everything else as JSON.

The file has these flat tensors for table j of store i, and one JSON record for everything else::

    i/table/j/ids/int64, i/table/j/stamps/int64    [n]
    i/table/j/weight/TYPE                          [n * dim]
    i/table/j/state.NAME/TYPE                      [n * dim], or [n] of a state that a row has one of
    i/table/j/counts/uint8                         [depth * width]; where pushes are counted

A stamp of 0 marks a free slot: readers of the file skip that row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kvps.checkpoint import validation
from kvps.checkpoint.safetensors_writer import Column
from kvps.core.embedding.spec import DEPTH, WEIGHT, EmbeddingSpec, columns_of
from kvps.core.embedding.stored import StoredRows
from kvps.core.server.snapshot.model import RowsSnapshot, SpanHistory, TableSnapshot
from kvps.tensors import NAMES

Cut = Callable[[str, Sequence[int]], Sequence[torch.Tensor]]
"""Function that returns a column of the file in pieces of these sizes."""

_TERMS: dict[str, Callable[[str, object], Any]] = {
    **dict.fromkeys(
        ("dim", "dtype", "init", "scale", "seed", "admit", "max_age", "max_rows"), validation.natural
    ),
    **dict.fromkeys(("dtype", "init"), validation.text),
    "optimizer": partial(validation.text, least=1),
    "numbers": lambda _, numbers: numbers,
    **dict.fromkeys(("scale", "chance", "max_idle_s"), validation.finite),
    "half_life": validation.natural,
}
"""Checks of the terms of a recipe, in order."""
_ENTRIES = ("key", "recipe", "lr", "history", "rows", "width", "counted")


def row_of(name: str, table: TableSnapshot, columns: dict[str, Column]) -> dict[str, object]:
    """Return the JSON of a table of one server, and add its tensors to ``columns``."""
    (part,) = table.parts
    recipe = table.recipe
    columns[f"{name}/ids/int64"] = Column("int64", [part.ids])
    columns[f"{name}/stamps/int64"] = Column("int64", [part.stamps])
    for title, rows in part.columns.items():
        if rows:
            dtype = NAMES[rows[0].dtype]
            flat = [row.reshape(-1) for row in rows]
            columns[f"{name}/{_column(title)}/{dtype}"] = Column(dtype, flat)
    if part.counts.numel():
        columns[f"{name}/counts/uint8"] = Column("uint8", [part.counts.reshape(-1)])
    return {
        "key": table.key,
        "recipe": [recipe.dim, recipe.dtype, *recipe.terms, recipe.hyper.to_wire(), *recipe.later],
        "lr": table.lr,
        "history": row_of_history(table.history),
        "rows": len(part.ids),
        "width": part.counts.shape[1],
        "counted": part.counted,
    }


def table_of(name: str, given: object, cut: Cut) -> TableSnapshot:
    """Return the table that JSON and the columns of a file describe.

    Raises:
        ValueError: if they do not describe a table.
        KvpsError: if its specification is invalid.
    """
    row = validation.record("a table", given, *_ENTRIES)
    key = validation.text("a table's key", row["key"], least=1)
    try:
        recipe = _recipe(row["recipe"])
        count = validation.natural("rows", row["rows"])
        counters = validation.natural("width", row["width"])

        def column(title: str, dtype: str, size: int) -> torch.Tensor:
            (found,) = cut(f"{name}/{title}/{dtype}", (size,))
            return found

        columns: dict[str, tuple[torch.Tensor | StoredRows, ...]] = {
            title: (column(_column(title), NAMES[dtype], count * width).view(count, width),) if count else ()
            for title, (dtype, width) in columns_of(recipe).items()
        }
        counts = torch.empty((0, 0), dtype=torch.uint8)
        if counters:
            counts = column("counts", "uint8", DEPTH * counters).view(DEPTH, counters)
        part = RowsSnapshot(
            column("ids", "int64", count),
            column("stamps", "int64", count),
            columns,
            counts,
            validation.natural("counted", row["counted"]),
        )
        lr = validation.finite("lr", row["lr"])
        recipe.hyper.with_lr(lr)  # refuses an invalid learning rate
        return TableSnapshot(key, recipe, lr, history_of(row["history"]), (part,))
    except ValueError as error:
        raise ValueError(f"table {key!r}: {error}") from error


def _column(title: str) -> str:
    return title if title == WEIGHT else f"state.{title}"


def _recipe(given: object) -> EmbeddingSpec:
    is_former = isinstance(given, list) and len(given) == 10  # of a version without the last three
    fields = validation.array("a recipe", given, 10 if is_former else 13)
    return EmbeddingSpec.of(*[_TERMS[name](name, value) for name, value in zip(_TERMS, fields, strict=False)])


def row_of_history(history: SpanHistory) -> tuple[object, ...]:
    """Return the JSON of a history; equal ones have equal JSON."""
    maps = [history.pushed, history.head_start]
    if history.clock_from:
        maps.append(history.clock_from)
    return history.version, history.step, *(tuple(sorted(by_rank.items())) for by_rank in maps)


def history_of(given: object) -> SpanHistory:
    """Return the history that JSON describes."""
    has_clocks = isinstance(given, list) and len(given) == 5
    entries = validation.array("a history", given, 5 if has_clocks else 4)
    version, step, pushed, head_start = entries[:4]
    return SpanHistory(
        validation.natural("version", version),
        validation.natural("step", step),
        by_rank("pushed", pushed),
        by_rank("head_start", head_start),
        by_rank("clock_from", entries[4]) if has_clocks else {},
    )


def by_rank(what: str, given: object) -> dict[int, int]:
    """Return the map rank -> number that JSON describes as pairs."""
    found: dict[int, int] = {}
    for pair in validation.array(what, given):
        rank, count = validation.array(what, pair, 2)
        found[validation.natural("a rank", rank, validation.RANK_MAX)] = validation.natural(what, count)
    if len(found) < len(validation.array(what, given)):
        raise ValueError(f"{what} has a rank twice")
    return found
