"""The rows of a table: made by pushes, and dropped."""

from typing import Any

import numpy as np
import pytest
import torch

from kvps.core.embedding import alike as module
from kvps.core.embedding import arena, evicted
from kvps.core.embedding.alike import AlikeTables, PushedRows
from kvps.core.embedding.arena import Slots
from kvps.core.embedding.id_hash import Ids
from kvps.core.embedding.id_index import Indexes
from kvps.core.embedding.spec import EmbeddingSpec, recipe_of
from kvps.core.embedding.table import AGE_STEPS, BEHIND, EmbeddingRows
from kvps.dtypes import summed_in
from kvps.tensors import TORCH


def recipe(**given: Any) -> EmbeddingSpec:
    plain: dict[str, Any] = {
        "name": "t",
        "dim": 2,
        "init": ("uniform", 0.5),
        "optimizer": "sgd",
        "admit": 1,
        "evict": None,
        "dtype": "float32",
        "seed": 5,
    }
    given = {"lr": 1.0} | given if "optimizer" not in given else given
    return recipe_of(**(plain | given))


class Driven:
    """A table with its version counted."""

    def __init__(self, servers: int = 1, **given: Any) -> None:
        self.table = EmbeddingRows(recipe(**given), servers)
        self.alike = AlikeTables((self.table,))
        self.version = 0
        self.now = 100.0

    def push(self, *ids: int, value: float = 1.0, after_s: float = 0.0) -> None:
        self.version += 1
        self.now += after_s
        gradients = torch.full((len(ids), 2), value, dtype=TORCH[summed_in(self.table.recipe.dtype)])
        numbers = np.array(sorted(ids), np.int64)
        pushed = [PushedRows(numbers, (len(ids),), gradients)]
        self.alike.push(pushed, [self.version], self.version, now=self.now)
        self.table.check()

    def rows(self, *ids: int) -> list[list[float]]:
        out = torch.empty((len(ids), 2), dtype=TORCH[self.table.recipe.dtype])
        self.alike.pull(np.array(ids, np.int64), (len(ids),), out)
        return out.tolist()

    def ids(self, since: int = 0) -> list[int]:
        """Return the ids that have rows, pushed to after a version."""
        return self.changes(since)[0]

    def changes(self, since: int) -> tuple[list[int], list[int]]:
        """Return the ids whose rows were pushed to after a version, and those that have none any more."""
        found: tuple[list[int], list[int]] = [], []
        start = 0
        while True:
            block = self.table.block(start, 3, since)
            is_there = block.stamps > 0
            for some, mask in zip(found, (is_there, ~is_there), strict=True):
                some += block.ids[mask].tolist()
            start = block.next
            if not start:
                return sorted(found[0]), sorted(found[1])


def test_updates_equal_those_of_torch() -> None:
    driven = Driven(optimizer="adagrad", lr=0.1, initial_accumulator_value=0.5)
    weight = torch.nn.Parameter(torch.tensor(driven.rows(4, 9)))
    # Fused, as the servers are: on some CPUs the plain one rounds the last bit otherwise.
    optimizer = torch.optim.Adagrad([weight], lr=0.1, initial_accumulator_value=0.5, fused=True)
    for value in (1.0, -3.0):
        driven.push(4, 9, value=value)
        weight.grad = torch.full((2, 2), value)
        optimizer.step()
    assert torch.equal(torch.tensor(driven.rows(4, 9)), weight.detach())


@pytest.mark.parametrize("lr", [0.5, 2.0])
def test_updates_go_on_by_another_rate(lr: float) -> None:
    driven = Driven(optimizer="sgd", lr=1.0, init="zeros")
    driven.push(1)
    driven.table.set_rate(lr)
    driven.push(1)
    assert driven.rows(1) == [[-1.0 - lr, -1.0 - lr]]


def test_halves_are_summed_in_float32_and_may_have_masters() -> None:
    driven = Driven(optimizer="sgd", lr=1.0, multi_precision=True, dtype="bfloat16", init="zeros")
    driven.push(1, value=256.0)
    driven.push(1, value=0.25)
    driven.push(1, value=0.75)
    block = driven.table.block(0, 5, with_state=True)
    assert block.columns["master"].tolist() == [[-257.0, -257.0]]
    assert block.columns["weight"].dtype == torch.bfloat16


@pytest.mark.spec("R530")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_halves_move_by_steps_too_small_for_them_as_float32_does(dtype: str, optimizer: str) -> None:
    ids, random = np.arange(4096), np.random.default_rng(3)
    given = {"optimizer": optimizer, "lr": 2e-5 if optimizer == "adam" else 1e-4, "dim": 2, "init": "zeros"}
    half, again, full = (
        AlikeTables((EmbeddingRows(recipe(**given, dtype=kind)),)) for kind in (dtype, dtype, "float32")
    )
    for step in range(1, 41):
        scale = 1000.0 if step == 1 else 1.0  # from here on, steps are below the distance of two halves
        rows = scale + 0.5 * torch.from_numpy(random.standard_normal((len(ids), 2), np.float32))
        for tables in (half, again, full):
            tables.push([PushedRows(ids, (len(ids),), rows)], [step], step)
    found, twice, expected = (
        tables.tables[0].block(0, 4096, with_state=True).columns for tables in (half, again, full)
    )
    assert all(torch.equal(found[name], twice[name]) for name in found)
    moved, wanted = found["weight"].double(), expected["weight"].double()
    assert moved.isfinite().all()
    assert moved.mean().item() == pytest.approx(wanted.mean().item(), rel=2e-3)
    assert {str(found[name].dtype).removeprefix("torch.") for name in found} - {dtype} <= (
        {"float32"} if optimizer == "rowwise_adagrad" else {"bfloat16"}
    )


def test_old_rows_are_looked_for_now_and_then() -> None:
    driven = Driven(evict={"age": 32})
    driven.push(1)
    for _ in range(33):
        driven.push(2)
    assert driven.ids() == [2]  # version 34: looked at 2, 4, ..., 34
    driven.push(3)
    for _ in range(32):
        driven.push(2)
    assert driven.ids() == [2, 3]  # version 67: looked at 66, when 35 was not below 66 - 32
    driven.push(2)
    assert driven.ids() == [2]


def test_a_push_of_more_rows_than_there_may_be_keeps_the_most() -> None:
    driven = Driven(evict={"rows": 4}, servers=2)  # 2 of them here
    driven.push(*range(9))
    assert driven.ids() == [7, 8]


def test_versions_may_need_more_than_32_bits() -> None:
    driven = Driven()
    driven.push(1, 2, 3)
    driven.version = 2**31 - 2
    driven.push(1)
    assert driven.table.block(0, 9).stamps.tolist() == [2**31 - 1, 1, 1]
    driven.push(2)
    block = driven.table.block(0, 9, with_state=True)
    assert block.stamps.tolist() == [2**31 - 1, 2**31, 1]
    assert driven.ids(since=2**31 - 1) == [2]
    other = EmbeddingRows(driven.table.recipe)
    other.put(block.ids, block.stamps, block.columns)
    assert other.block(0, 9).stamps.tolist() == block.stamps.tolist()
    other.put(block.ids[:0], block.stamps[:0], {name: rows[:0] for name, rows in block.columns.items()})
    assert other.keep()[0].stamps.tolist() == block.stamps.tolist()


def test_states_that_an_image_lacks_begin_anew() -> None:
    driven = Driven(optimizer="adagrad", initial_accumulator_value=0.5)
    driven.push(1, 2, 3)
    block = driven.table.block(0, 9, with_state=True)
    other = EmbeddingRows(driven.table.recipe)
    weights = next(iter(block.columns))
    other.put(block.ids, block.stamps, {weights: block.columns[weights]})
    found = other.block(0, 9, with_state=True).columns
    assert torch.equal(found[weights], block.columns[weights])
    (states,) = found.keys() - {weights}
    assert found[states].unique().tolist() == [0.5]


def test_a_push_takes_the_slots_that_a_pull_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(init="zeros", evict={"rows": 8})
    looked: list[list[int]] = []
    find = Indexes.find

    def found(indexes: Indexes, ids: Ids, sizes: tuple[int, ...]) -> Slots:
        looked.append(ids.tolist())
        return find(indexes, ids, sizes)

    monkeypatch.setattr(Indexes, "find", found)
    monkeypatch.setattr(EmbeddingRows, "check", lambda table: None)

    def looks_of(*ids: int) -> list[list[int]]:
        looked.clear()
        driven.push(*ids)
        return looked

    driven.push(1, 2)
    driven.rows(1, 2, 5)
    driven.push(5)
    assert looks_of(1, 2, 5) == [[5]], "the pull found no row of 5, and a push has made one since"
    assert looks_of(1, 2, 5) == [[1, 2, 5]], "what a pull has found serves one push"
    assert driven.rows(1, 3, 5) == [[-3.0, -3.0], [0.0, 0.0], [-3.0, -3.0]]
    assert looks_of(1, 4, 5) == [[1, 4, 5]]
    driven.rows(1, 2)
    driven.push(*range(20, 30))  # evicts rows, whose slots others get
    assert looks_of(1, 2) == [[1, 2]]
    assert driven.rows(1, 2) == [[-1.0, -1.0], [-1.0, -1.0]]
    assert looks_of() == [[]]
    driven.rows(1, 2)
    for first in range(module.PULLS_MAX):
        driven.rows(first, 28)
    assert looks_of(1, 28) == []
    assert looks_of(1, 2) == [[1, 2]], "the oldest pull is forgotten"


def test_counts_are_taken_in_where_there_are_some() -> None:
    driven, other = Driven(admit=2), Driven(admit=2)
    driven.push(4)
    kept, release = driven.table.keep()
    release()
    assert kept.counts is not None
    other.table.count_in(kept.counts, kept.counted)
    other.push(4)
    assert other.ids() == [4]
    plain = Driven()
    plain.table.count_in(kept.counts, kept.counted)
    assert plain.table.keep()[0].counts is None


def test_table_reports_its_size() -> None:
    driven, counting = Driven(), Driven(admit=2)
    driven.push(*range(100))
    assert 100 * 24 < driven.table.size_bytes < 2 << 20
    assert counting.table.size_bytes > 4 << 20


# --- rows that come by chance, and go ---------------------------------------------------------------


@pytest.mark.spec("R579")
def test_rows_come_by_chance_which_a_repetition_does_not_change() -> None:
    one, other = (Driven(admit=0.25, seed=seed) for seed in (5, 6))
    again = Driven(admit=0.25, seed=5)
    for driven in (one, other, again):
        driven.push(*range(2000))
    assert one.ids() == again.ids() != other.ids()
    assert 400 < len(one.table) < 600
    for _ in range(40):
        one.push(*range(2000))
    assert len(one.table) == 2000


@pytest.mark.spec("R580")
def test_rows_go_that_were_not_pushed_to_for_some_seconds() -> None:
    driven = Driven(evict={"seconds": 16.0})
    driven.push(1, 2)
    for _ in range(15):
        driven.push(2, after_s=1.0)
    assert driven.ids() == [1, 2]
    driven.push(2, after_s=1.0)
    assert driven.ids() == [2]
    driven.push(2, after_s=0.5)
    driven.push(3, after_s=15.5)
    assert driven.ids() == [2, 3]
    driven.push(3, after_s=0.5)
    assert driven.ids() == [3]
    driven.push(4, after_s=1000.0)
    assert driven.ids() == [4]


def test_many_updates_within_a_second_remember_few_times() -> None:
    driven = Driven(evict={"seconds": 16.0})
    for _ in range(3000):
        driven.push(1, after_s=0.01)
    assert AGE_STEPS < len(driven.table._marks) <= 2 * AGE_STEPS + 2


@pytest.mark.spec("R581")
def test_rows_go_that_were_pushed_to_least_and_not_the_oldest() -> None:
    driven = Driven(evict={"rows": 8, "half_life": 10})
    for _ in range(3):
        driven.push(1, 2)
    for some in range(10, 16):
        driven.push(some)
    assert driven.ids() == [1, 2, *range(10, 16)]
    driven.push(20)
    assert driven.ids() == [1, 2, *range(12, 16), 20]
    for _ in range(60):
        driven.push(*range(12, 16), 20)
    driven.push(30, 31)
    assert driven.ids() == [*range(12, 16), 20, 30, 31]  # what was pushed long ago counts no more


@pytest.mark.spec("R581")
def test_uses_of_rows_come_back_with_their_states() -> None:
    driven, other = (Driven(evict={"rows": 8, "half_life": 4}, optimizer="rowwise_adagrad") for _ in "ab")
    for some in ([1, 2, 3], [1, 2], [1, 4, 5], range(10, 13)):
        driven.push(*some)
    block = driven.table.block(0, 99, with_state=True)
    other.table.put(block.ids, block.stamps, block.columns)
    other.version = driven.version
    for each in (driven, other):
        each.push(1, 20, 21)
    assert other.ids() == driven.ids()
    assert 3 not in other.ids()


def test_hottest_rows_are_those_with_most_uses_of_all_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "ARENA_BYTES_MIN", 64)
    driven, uses = Driven(evict={"rows": 1000, "half_life": 4}), np.zeros(200)
    assert driven.table.hottest(3, 0) == {}
    random = np.random.default_rng(3)
    for _ in range(30):
        pushed = np.unique(random.zipf(1.3, 40) % 200)
        driven.push(*pushed.tolist())
        uses *= 0.5**0.25
        uses[pushed] += 1.0
    assert len([*driven.table.arenas]) > 2
    for gone in (False, True):
        if gone:
            first = int(uses.argmax())
            driven.table.drop(driven.table.index.find(np.array([first])))
            uses[first] = 0.0
        found = driven.table.hottest(8, driven.version)
        assert found == pytest.approx({str(at): uses[at] for at in uses.argsort()[-8:]})
        assert [*found.values()] == sorted(found.values(), reverse=True)


def test_uses_that_no_table_can_have_are_shown_as_numbers() -> None:
    table = Driven(evict={"rows": 8, "half_life": 4}).table
    columns = table.new_columns(torch.zeros(3, 2))
    columns["uses"][:, 0] = torch.tensor([torch.inf, torch.nan, 1.0])
    table.put(np.array([5, 6, -7]), np.ones(3, np.int64), columns)
    assert table.hottest(8, 0) == {"5": 2.0**53, "-7": 2.0}


@pytest.mark.spec("R582")
def test_changes_name_the_ids_that_were_evicted() -> None:
    driven = Driven(evict={"rows": 8})
    driven.push(*range(8))
    driven.push(20)
    assert driven.changes(1) == ([20], [0, 1])
    driven.push(1, 2)
    driven.push(21, 22, 23)
    there = driven.ids()
    assert driven.changes(1) == ([1, 2, 20, 21, 22, 23], sorted({*range(8)} - {*there}))
    assert driven.changes(0) == (there, [])
    (first,) = driven.table.recipe.first_rows(np.array([0])).tolist()
    block = driven.table.block(BEHIND, 1, 1, with_state=True)
    assert (block.ids.tolist(), block.columns["weight"].tolist()) == ([0], [first])


@pytest.mark.spec("R582")
def test_evicted_ids_are_forgotten_when_they_are_more_than_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted, "LEAST", 0)
    driven = Driven(evict={"age": 1})
    assert driven.table.evicted.known_from(7) == 7  # nothing is known of what went before
    driven.push(1)
    assert driven.table.evicted.known_from(7) == 0
    for some in range(2, 7):
        driven.push(some)
    known = driven.table.evicted.known_from(7)
    assert 0 < known < driven.version
    assert driven.changes(known)[1] == list(range(known - 1, 5))
