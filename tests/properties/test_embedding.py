"""A table under random use, beside a plain dict that does the same."""

import errno
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvps.core.embedding import arena
from kvps.core.embedding.spec import EmbeddingSpec, recipe_of
from kvps.core.embedding.stored import loaded
from kvps.core.embedding.table import BEHIND, EVICTED, EmbeddingRows
from kvps.errors import StorageError
from tests.support.memory_disk import MemoryDisk
from tests.support.table_messages import pull_rows, push_rows
from tests.support.tiers import examples

IDS = st.sets(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 30), max_size=12)
VALUES = st.integers(-3, 3)
DIM = 3


def recipe(max_rows: int, max_age: int) -> EmbeddingSpec:
    evict = {"rows": max_rows, "age": max_age}
    return recipe_of(
        "t",
        DIM,
        ("uniform", 1.0),
        "sgd",
        1,
        {name: value for name, value in evict.items() if value} or None,
        "float64",
        3,
        lr=1.0,
        momentum=0.5,
    )


class Row:
    """What one id has."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.momentum = torch.zeros(DIM, dtype=torch.float64)
        self.stamp = 0


class Model(RuleBasedStateMachine):
    """Pushes, pulls and images; rows go for both reasons."""

    MAX_ROWS, MAX_AGE = 20, 16

    def __init__(self) -> None:
        super().__init__()
        self.recipe = recipe(self.MAX_ROWS, self.MAX_AGE)
        self.table = self.make()
        self.rows: dict[int, Row] = {}
        self.version = 0
        self.evicted: list[tuple[int, int]] = []
        """Versions, and the ids that were evicted by them."""
        self.kept: list[tuple[object, object, list[torch.Tensor]]] = []

    def make(self) -> EmbeddingRows:
        return EmbeddingRows(self.recipe)

    def first(self, number: int) -> torch.Tensor:
        values = self.recipe.first.values(np.array([number], np.int64), DIM, self.recipe.seed)
        return torch.from_numpy(values)[0]

    @rule(ids=IDS, value=VALUES)
    def push(self, ids: set[int], value: int) -> None:
        self.version += 1
        order, before = sorted(ids), {*self.rows, *ids}
        gradients = torch.full((len(order), DIM), float(value), dtype=torch.float64)
        push_rows(self.table, np.array(order, np.int64), gradients, version=self.version, step=self.version)
        for item in order:
            row = self.rows.setdefault(item, Row(self.first(item)))
            row.momentum = 0.5 * row.momentum + value
            row.weight = row.weight - row.momentum
            row.stamp = self.version
        if self.MAX_AGE:
            self.rows = {
                item: row for item, row in self.rows.items() if row.stamp >= self.version - self.MAX_AGE
            }
        if self.MAX_ROWS and len(self.rows) > self.MAX_ROWS:
            by_age = sorted(self.rows, key=lambda item: (self.rows[item].stamp, item))
            keep = self.MAX_ROWS - self.MAX_ROWS // EVICTED
            self.rows = {item: self.rows[item] for item in by_age[-keep:]}
        self.evicted += [(self.version, item) for item in before - self.rows.keys()]

    @rule(ids=IDS)
    def pull(self, ids: set[int]) -> None:
        order = list(ids)
        found = pull_rows(self.table, np.array(order, np.int64))
        assert found.shape == (len(order), DIM)
        for item, values in zip(order, found, strict=True):
            wanted = self.rows[item].weight if item in self.rows else self.first(item)
            assert torch.equal(values, wanted)

    @rule(since=st.integers(0, 60), count=st.integers(1, 9))
    def export(self, since: int, count: int) -> None:
        found: dict[int, tuple[list[float], int]] = {}
        gone: set[int] = set()
        start = 0
        while True:
            block = self.table.block(start, count, since)
            assert len(block.ids) <= count
            if start >= BEHIND:
                assert not block.stamps.any()
                gone.update(block.ids.tolist())
                start = block.next
                if not start:
                    break
                continue
            for item, stamp, row in zip(
                block.ids.tolist(), block.stamps.tolist(), block.columns["weight"], strict=True
            ):
                assert item not in found
                found[item] = row.tolist(), stamp
            start = block.next
            if not start:
                break
        wanted = {
            item: (row.weight.tolist(), row.stamp) for item, row in self.rows.items() if row.stamp > since
        }
        assert found == wanted
        if since >= self.table.evicted.known_from(self.version):
            evicted = {item for version, item in self.evicted if version > since}
            assert gone == (evicted - self.rows.keys() if since else set())

    @rule()
    def keep(self) -> None:
        kept, release = self.table.keep()
        copies = [loaded(arena.columns["weight"]).clone() for arena in kept.arenas]
        self.kept.append((kept, release, copies))

    @precondition(lambda self: self.kept)
    @rule()
    def let_go(self) -> None:
        _, release, _ = self.kept.pop(0)
        release()  # type: ignore[operator]

    @rule()
    def move(self) -> None:
        """Another table takes all over, as after a restart."""
        other = self.make()
        start = 0
        while True:
            block = self.table.block(start, 4, with_state=True)
            other.put(block.ids, block.stamps, block.columns)
            start = block.next
            if not start:
                break
        self.table = other
        self.kept.clear()

    @invariant()
    def it_is_sound(self) -> None:
        self.table.check()
        assert len(self.table) == len(self.rows)
        for kept, _, copies in self.kept:
            for item, copy in zip(kept.arenas, copies, strict=True):  # type: ignore[attr-defined]
                used = max(0, len(kept.ids) - item.start)  # type: ignore[attr-defined]
                assert torch.equal(loaded(item.columns["weight"][:used]), copy[:used])


class Unbounded(Model):
    """Nothing goes."""

    MAX_ROWS = MAX_AGE = 0


class Tiered(Model):
    """Memory holds few rows, and the disk is full now and then."""

    MAX_ROWS = 60

    def __init__(self) -> None:
        self.disk = MemoryDisk()
        super().__init__()

    def make(self) -> EmbeddingRows:
        self.tier = self.disk.tier(room=12 * 2 * DIM * 8)
        return EmbeddingRows(self.recipe, tier=self.tier)

    @rule(error=st.sampled_from([0, 0, errno.ENOSPC]))
    def fill_disk(self, error: int) -> None:
        self.disk.error = error

    @rule()
    def keep(self) -> None:
        try:
            super().keep()
        except StorageError:
            assert self.disk.error

    @rule()
    def settle(self) -> None:
        if self.disk.error:
            with suppress(StorageError):
                self.tier.settle()
        else:
            self.tier.settle()
            assert self.tier.hot_bytes <= self.tier.room() or len(list(self.table.arenas)) == 1

    @rule()
    def move(self) -> None:
        self.disk.error = None
        super().move()


@pytest.fixture(autouse=True)
def _small_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "ARENA_BYTES_MIN", 3 * 2 * DIM * 8)
    monkeypatch.setattr(arena, "ARENA_BYTES_MAX", 6 * 2 * DIM * 8)


TestBounded = Model.TestCase
TestBounded.settings = examples(40, stateful_step_count=40)
TestTiered = Tiered.TestCase
TestTiered.settings = examples(60, stateful_step_count=40)
TestUnbounded = Unbounded.TestCase
TestUnbounded.settings = examples(25, stateful_step_count=40)
