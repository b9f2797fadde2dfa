"""Tables that are handled in one pass: each as if it were alone, to the bit."""

from typing import Any

import numpy as np
import pytest
import torch

from kvps.core.embedding import alike, arena
from kvps.core.embedding.alike import AlikeTables, PushedRows, alike_runs, summed
from kvps.core.embedding.spec import EmbeddingSpec, recipe_of
from kvps.core.embedding.table import EmbeddingRows
from kvps.core.row_gradients import RowGradient, added
from kvps.tensors import TORCH, accumulator
from tests.support.table_messages import pull_rows

COUNT, DIM = 5, 16  # adam rounds the elements at the end of a tensor otherwise, if they fill no vector


def recipe(name: str = "t", **given: Any) -> EmbeddingSpec:
    plain: dict[str, Any] = {"init": ("uniform", 0.5), "optimizer": "adagrad", "admit": 1, "evict": None}
    return recipe_of(name, DIM, **{**plain, "dtype": "float32", "seed": None, "lr": 0.1, **given})


class Beside:
    """The same tables together, and each alone."""

    def __init__(self, **given: Any) -> None:
        self.random = np.random.default_rng(7)
        recipes = [recipe(f"table {number}", **given) for number in range(COUNT)]
        (self.together,) = alike_runs([EmbeddingRows(each) for each in recipes])
        self.alone = [EmbeddingRows(each) for each in recipes]
        self.version = 0

    def ids(self, among: int = 4000) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
        """Return some ids for each table, none for the second."""
        sizes = [0 if at == 1 else int(self.random.integers(1, 400)) for at in range(COUNT)]
        return [np.unique(self.random.integers(-among, among, size)) for size in sizes]

    def step(self, *ranks: list[np.ndarray[Any, np.dtype[np.int64]]]) -> None:
        """Push rows for the ids that each rank has for each table."""
        self.version += 1
        pushed, alone = [], [list[PushedRows]() for _ in self.alone]
        for ids in ranks:
            sizes = tuple([len(some) for some in ids])
            rows = torch.from_numpy(self.random.standard_normal((sum(sizes), DIM), np.float32))
            pushed.append(PushedRows(np.concatenate(ids), sizes, rows))
            for some, part, own in zip(ids, rows.split(list(sizes)), alone, strict=True):
                own.append(PushedRows(some, (len(some),), part))
        now = float(self.version)
        self.together.push(pushed, [self.version] * COUNT, self.version, len(ranks), now)
        for table, own in zip(self.alone, alone, strict=True):
            AlikeTables((table,)).push(own, [self.version], self.version, len(ranks), now)

    def look(self, ids: list[np.ndarray[Any, np.dtype[np.int64]]]) -> None:
        """Pull the rows of ids from the tables together."""
        sizes = tuple([len(some) for some in ids])
        self.together.pull(np.concatenate(ids), sizes, torch.empty(sum(sizes), DIM))

    def agree(self, ids: list[np.ndarray[Any, np.dtype[np.int64]]]) -> None:
        """Check that pulls of these ids, and all rows and states, are equal."""
        sizes = tuple([len(some) for some in ids])
        found = torch.empty((sum(sizes), DIM), dtype=TORCH[self.alone[0].recipe.dtype])
        self.together.pull(np.concatenate(ids), sizes, found)
        alone = zip(self.alone, ids, strict=True)
        expected = [pull_rows(table, some) for table, some in alone]
        assert torch.equal(found, torch.cat(expected))
        for mine, other in zip(self.together.tables, self.alone, strict=True):
            mine.check()
            ours, theirs = (table.block(0, 1 << 20, with_state=True) for table in (mine, other))
            assert np.array_equal(ours.ids, theirs.ids)
            assert np.array_equal(ours.stamps, theirs.stamps)
            assert {name: column.tolist() for name, column in ours.columns.items()} == {
                name: column.tolist() for name, column in theirs.columns.items()
            }


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"optimizer": "adam", "lr": 0.01},
        {"optimizer": "rowwise_adagrad"},
        {"dtype": "float64", "init": ("normal", 0.1)},
        {"dtype": "bfloat16", "admit": 2},
        {"dtype": "float16", "optimizer": "adam"},
        {"admit": 2},
        {"evict": {"rows": 300}},
        {"evict": {"age": 4}, "admit": 3},
        {"evict": {"seconds": 4}, "admit": 0.5},
        {"evict": {"rows": 300, "half_life": 2}, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_tables_together_are_those_alone(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    monkeypatch.setattr(arena, "ARENA_BYTES_MIN", 4096)
    beside = Beside(**given)
    beside.agree(beside.ids())
    for _ in range(8):
        ids = beside.ids()
        beside.agree(ids)
        beside.step(ids)
        beside.step(beside.ids())
        beside.agree(beside.ids())
    beside.step([np.empty(0, np.int64)] * COUNT)
    beside.agree(beside.ids())


def test_a_snapshot_of_one_table_keeps_its_rows() -> None:
    beside = Beside()
    ids = beside.ids(300)
    beside.step(ids)
    kept, release = beside.together.tables[2].keep()
    before = [held.columns["weight"].clone() for held in kept.arenas]
    for _ in range(3):
        beside.step(beside.ids(300))
    for held, weight in zip(kept.arenas, before, strict=True):
        assert torch.equal(held.columns["weight"], weight)
    release()
    beside.step(ids)
    beside.agree(beside.ids(300))


def test_runs_end_where_more_than_the_seed_differs() -> None:
    kinds = ["adagrad", "adagrad", "sgd", "adagrad"]
    tables = [EmbeddingRows(recipe(str(at), optimizer=kind)) for at, kind in enumerate(kinds)]
    assert [run.tables for run in alike_runs(tables)] == [tuple(tables[:2]), (tables[2],), (tables[3],)]


def test_a_pull_of_the_same_ids_of_other_tables_serves_no_push() -> None:
    first, second = (EmbeddingRows(recipe(name)) for name in "ab")
    (together,) = alike_runs((first, second))
    ids, rows = np.array([1, 2, 3]), torch.ones(3, DIM)
    together.push([PushedRows(ids, (3, 0), rows)], [1, 1], 1)
    together.pull(ids, (3, 0), torch.empty(3, DIM))
    together.push([PushedRows(ids, (2, 1), rows)], [2, 2], 2)
    assert (len(first), len(second)) == (3, 1)
    assert second.block(0, 9).ids.tolist() == [3]


@pytest.mark.parametrize("high", [50, 2**62])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_several_ranks_are_those_of_each_table(high: int, dtype: torch.dtype) -> None:
    random = np.random.default_rng(high % 97)
    parts = [
        [RowGradient(torch.from_numpy(ids), torch.randn(len(ids), 3).to(dtype), 1) for ids in some]
        for some in [
            [np.unique(random.integers(-high if high > 50 else 0, high, size)) for size in sizes]
            for sizes in ((40, 30), (0, 0), (7, 0), (0, 9), (20, 60))
        ]
    ]
    pushed = [
        PushedRows(
            torch.cat([part.ids for part in some]).numpy(),
            tuple([len(part.ids) for part in some]),
            accumulator(torch.cat([part.rows for part in some])),
        )
        for some in zip(*parts, strict=True)
    ]
    (ids, sizes, rows), first = summed(pushed)
    assert first is not None
    assert np.array_equal(np.concatenate([some.ids for some in pushed])[first], ids)
    sums = [added(some) for some in parts]
    assert sizes == tuple([len(each.ids) for each in sums])
    assert ids.tolist() == [number for each in sums for number in each.ids.tolist()]
    assert torch.equal(rows, torch.cat([each.rows for each in sums]))
    (nothing, none, empty), _ = summed([PushedRows(np.empty(0, np.int64), (0, 0), torch.empty(0, 3))] * 2)
    assert (len(nothing), none, empty.shape) == (0, (0, 0), (0, 3))


@pytest.mark.parametrize("given", [{}, {"optimizer": "sgd"}, {"admit": 2}, {"evict": {"rows": 300}}])
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_pushes_of_several_ranks_after_their_pulls_move_what_each_alone_moves(
    given: dict[str, Any], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alike, "FIRST_BYTES_MAX", kept)
    beside = Beside(**given)
    for _ in range(6):
        ranks = [beside.ids(900) for _ in range(2)]
        for ids in (*ranks, beside.ids(900)):
            beside.look(ids)
        beside.step(beside.ids(900))  # makes rows that the pulls did not find
        beside.step(*ranks)
        beside.look(ranks[1])
        beside.step(beside.ids(900), ranks[1])  # one of these was not pulled
    beside.agree(beside.ids(900))


def test_first_values_that_pulls_have_computed_are_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside = Beside()
    ranks = [beside.ids() for _ in range(2)]
    for ids in ranks:
        beside.look(ids)
    with monkeypatch.context() as patched:
        patched.setattr(beside.together.tables[0].recipe.first.__class__, "values", None)
        beside.together.push(
            [
                PushedRows(np.concatenate(ids), tuple(map(len, ids)), torch.ones(sum(map(len, ids)), DIM))
                for ids in ranks
            ],
            [1] * COUNT,
            1,
        )
    assert [len(table) for table in beside.together.tables] == [
        len(np.union1d(*both)) for both in zip(*ranks, strict=True)
    ]
