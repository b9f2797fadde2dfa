"""Rows beyond the limit of memory: the same bits as rows in memory, on a disk that may be full."""

import errno
from typing import Any

import numpy as np
import pytest
import torch

from kvps.core.embedding import arena, tiered
from kvps.core.embedding.alike import AlikeTables, PushedRows
from kvps.core.embedding.spec import recipe_of
from kvps.core.embedding.stored import loaded
from kvps.core.embedding.table import EmbeddingRows
from kvps.core.embedding.tiered import PIECE_BYTES, ROW_BYTES, Tier
from kvps.core.server.chunks.slab import Chunks
from kvps.core.server.snapshot.capture_tables import rows_of
from kvps.core.server.snapshot.model import Snapshot, SpanHistory, StoreSnapshot, TableSnapshot
from kvps.errors import StorageError
from kvps.protocol.stores import Open
from kvps.tensors import TORCH
from tests.support.memory_disk import MemoryDisk
from tests.support.server_harness import filled_tables

DIM = 16
ROOM = 64 * DIM * 4 * 2
"""Bytes of 64 rows with a state."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "ARENA_BYTES_MIN", 8 * DIM * 4 * 2)
    monkeypatch.setattr(tiered, "BLOCK_COUNT", 24 * DIM)
    monkeypatch.setattr("kvps.core.optim.sparse_update.BLOCK_COUNT", 24 * DIM)


def make(tier: Tier | None, names: str = "abc", **given: Any) -> AlikeTables:
    plain = {"optimizer": "adagrad", "lr": 0.1, "admit": 1, "evict": None, "dtype": "float32"} | given
    recipes = [recipe_of(name, DIM, ("uniform", 0.5), seed=None, **plain) for name in names]
    return AlikeTables([EmbeddingRows(recipe, tier=tier) for recipe in recipes])


class Pair:
    """Tables with a tier, and the same in memory."""

    def __init__(self, room: float = ROOM, **given: Any) -> None:
        self.disk = MemoryDisk()
        self.tier = self.disk.tier(room)
        self.cold, self.plain = make(self.tier, **given), make(None, **given)
        self.random = np.random.default_rng(7)
        self.version = 0

    def ids(self, most: int = 40) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
        parts = [np.unique(self.random.zipf(1.1, most) % 400) for _ in self.cold.tables]
        return np.concatenate(parts), tuple(map(len, parts))

    def push(self, most: int = 40) -> None:
        ids, sizes = self.ids(most)
        rows = torch.from_numpy(self.random.standard_normal((len(ids), DIM), np.float32))
        self.version += 1
        for tables in (self.cold, self.plain):
            tables.push([PushedRows(ids, sizes, rows)], [self.version] * len(sizes), self.version)

    def agree(self) -> None:
        ids, sizes = self.ids(60)
        ids = np.concatenate([ids, ids[-3:]])
        sizes = (*sizes[:-1], sizes[-1] + 3)
        outs = [torch.empty(len(ids), DIM, dtype=TORCH[self.cold.tables[0].recipe.dtype]) for _ in "ab"]
        for tables, out in zip((self.cold, self.plain), outs, strict=True):
            tables.pull(ids, sizes, out)
        assert torch.equal(*outs)
        for tables in (self.cold, self.plain):
            for table in tables.tables:
                table.check()


def test_rows_of_which_none_is_in_memory_are_read() -> None:
    pair = Pair()
    for _ in range(25):
        pair.push()
    for cold, plain in zip(pair.cold.tables, pair.plain.tables, strict=True):
        arenas, slots = cold.arenas, np.arange(len(cold))
        cold_slots = slots[arenas.at(slots) < 0]
        assert len(cold_slots)
        found, expected = arenas.read(cold_slots), plain.arenas.read(cold_slots)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"optimizer": "adam"},
        {"optimizer": "rowwise_adagrad", "dtype": "float16"},
        {"admit": 2},
        {"evict": {"rows": 150}},
        {"dtype": "bfloat16"},
    ],
)
def test_rows_have_the_bits_of_rows_in_memory(given: dict[str, Any]) -> None:
    pair = Pair(**given)
    for _ in range(25):
        pair.push()
        pair.agree()
        pair.tier.settle()
        assert pair.tier.hot_bytes <= ROOM
    assert pair.disk.written > 100
    for cold, plain in zip(pair.cold.tables, pair.plain.tables, strict=True):
        mine, theirs = (table.block(0, 1000, with_state=True) for table in (cold, plain))
        assert np.array_equal(mine.ids, theirs.ids)
        assert all(torch.equal(mine.columns[name], column) for name, column in theirs.columns.items())


def test_rows_in_use_stay_in_memory() -> None:
    pair = Pair(names="a")
    pair.cold.push([PushedRows(np.arange(400), (400,), torch.ones(400, DIM))], [1], 1)
    often = np.arange(0, 400, 10)
    out = torch.empty(len(often), DIM)
    for _ in range(4):
        pair.cold.pull(often, (len(often),), out)
        pair.cold.pull(np.arange(5, 25), (20,), out[:20])
    (table,) = pair.cold.tables
    assert isinstance(table.arenas, tiered.TieredArenas)
    written = pair.disk.written
    pair.cold.pull(often, (len(often),), out)
    assert pair.disk.written == written


def test_hottest_rows_are_found_in_memory() -> None:
    pair = Pair(names="a", evict={"rows": 1000, "half_life": 9})
    for _ in range(25):
        pair.push()
    (cold,), (plain,) = pair.cold.tables, pair.plain.tables
    assert pair.disk.written
    cold.drop(cold.index.find(np.array([1])))
    plain.drop(plain.index.find(np.array([1])))
    found = cold.hottest(4, pair.version)
    assert len(found) == 4
    assert found == plain.hottest(4, pair.version)


def test_a_table_that_lacks_room_gets_some_from_the_largest() -> None:
    pair = Pair(names="ab")
    pair.cold.push([PushedRows(np.arange(300), (300, 0), torch.ones(300, DIM))], [1, 1], 1)
    large, small = (table.arenas for table in pair.cold.tables)
    for step in range(2, 40):
        pair.cold.push([PushedRows(np.arange(60), (0, 60), torch.ones(60, DIM))], [step, step], step)
        pair.tier.settle()
    assert large.size_bytes <= 2 * small.size_bytes
    assert pair.tier.index_bytes == 360 * ROW_BYTES
    assert pair.tier.hot_bytes <= ROOM


def test_a_full_disk_refuses_the_next_push_and_loses_nothing() -> None:
    pair = Pair()
    for _ in range(6):
        pair.push()
    pair.disk.error = errno.ENOSPC
    pair.push(200)  # an update that has begun is finished
    assert pair.tier.hot_bytes > ROOM
    before = pair.tier.hot_bytes
    with pytest.raises(StorageError, match=r"/disk: No space left.*--table-dir"):
        pair.tier.settle()
    pair.agree()
    with pytest.raises(StorageError, match="No space left"):
        pair.cold.tables[0].keep()
    assert pair.tier.hot_bytes == before
    pair.disk.error = None
    pair.tier.settle()
    assert pair.tier.hot_bytes <= ROOM
    pair.agree()


def test_a_disk_that_cannot_be_read_is_named() -> None:
    pair = Pair()
    for _ in range(9):
        pair.push()
    pair.disk.read_error = errno.EIO
    with pytest.raises(StorageError, match="/disk: Input/output error"):
        pair.agree()
    pair.disk.read_error = None
    pair.agree()


def test_a_snapshot_is_read_piece_by_piece_while_rows_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered, "PIECE_BYTES", 20 * DIM * 8)
    assert PIECE_BYTES > 1 << 20
    pair = Pair(names="a", admit=2)
    for _ in range(9):
        pair.push()
    (cold,), (plain,) = pair.cold.tables, pair.plain.tables
    kept, release = cold.keep()
    again, release_again = cold.keep()
    theirs, release_theirs = plain.keep()
    before = filled(snapshot(plain, theirs))
    release_theirs()
    for _ in range(9):
        pair.push()
    assert max(len(part.columns["weight"]) for part in kept.arenas) <= 20
    for state in (kept, again):
        tier = pair.disk.tier(ROOM)
        came = filled(snapshot(cold, state), tier=tier)
        assert tier.hot_bytes <= ROOM
        ids = np.sort(came.block(0, 1000).ids)
        assert np.array_equal(ids, np.sort(before.block(0, 1000).ids))
        for table in (came, before):
            table.check()
        rows = [table.arenas.read(table.index.find(ids)) for table in (came, before)]
        assert all(torch.equal(rows[0][name], rows[1][name]) for name in rows[1])
    flat = kept.arenas[0].columns["weight"].reshape(-1)
    assert loaded(flat).shape == (flat.numel(),)
    assert flat.element_size() == 4
    cold.check()
    release()
    cold.check()
    release_again()
    pair.push()
    pair.agree()


def test_a_snapshot_does_not_come_back_to_a_full_disk() -> None:
    pair = Pair(names="a")
    for _ in range(9):
        pair.push()
    kept, release = pair.plain.tables[0].keep()
    pair.disk.error = errno.ENOSPC
    with pytest.raises(StorageError, match="No space left"):
        filled(snapshot(pair.plain.tables[0], kept), tier=pair.disk.tier(ROOM / 8))
    release()


def filled(table: TableSnapshot, tier: Tier | None = None) -> EmbeddingRows:
    store = StoreSnapshot(
        Open("kv", "async", 0, False, "fail", 1), None, None, 0.0, 0, 0, (), tables=(table,)
    )
    (rows,) = filled_tables(Snapshot(0, 1, (store,)), Chunks(tier=tier)).values()
    return rows


def snapshot(table: EmbeddingRows, state: Any) -> TableSnapshot:
    history = SpanHistory(0, 0, {}, {}, {})
    return TableSnapshot("t", table.recipe, table.lr, history, (rows_of(table, state),))
