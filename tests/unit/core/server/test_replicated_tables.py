"""A server copies the rows of its embedding tables to its standby: rows, what was evicted, and what was counted."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvps import protocol as p
from kvps.core.embedding import spec
from kvps.core.embedding.spec import message_of
from kvps.core.embedding.table import EmbeddingRows
from kvps.core.embedding.tiered import Tier
from kvps.core.server.replicas import primary, tables
from kvps.core.server.server import LOOK_EVERY_S
from kvps.errors import StorageError
from tests.support.memory_disk import MemoryDisk
from tests.support.server_harness import heard
from tests.support.table_messages import pull_table, push_table
from tests.unit.core.server.rules.test_table import KEY, recipe
from tests.unit.core.server.test_replicas import LIFE, Pair

DIM = 2


class Tables:
    """A primary with a table, and its standby."""

    def __init__(self, tiers: tuple[Callable[[], Tier], ...] = (), mode: str = "async", **given: Any) -> None:
        self.pair = Pair(tiers=tiers)
        self.dice = np.random.default_rng(3)
        self.pair.primary.open(mode)
        self.recipe = recipe(**given)
        self.embed()
        self.number = 0

    def embed(self) -> None:
        self.pair.do(0, message_of("kv", KEY, self.recipe))
        (self.piece,) = self.pair.primary.server.context.stores["kv"].shards[KEY].pieces

    def push(self, count: int = 20, among: int = 60) -> None:
        """Push some rows of chance."""
        ids = np.sort(self.dice.choice(among, count, replace=False)).astype(np.int64)
        message = push_table(self.piece.chunk, 1, (0,), self.number, DIM, count)
        rows = torch.from_numpy(self.dice.normal(size=count * DIM).astype(np.float32))
        self.pair.do(0, message, torch.from_numpy(ids), rows)
        self.number += 1

    def ends(self) -> tuple[EmbeddingRows, EmbeddingRows]:
        found = []
        for stage in (self.pair.primary, self.pair.standby):
            rows = stage.server.context.stores["kv"].chunk_at(self.piece).table
            rows.check()
            found.append(rows)
        return found[0], found[1]

    def check(self) -> None:
        """Both ends have the same rows at the same slots, and the same history."""
        embedding_rows, other = self.ends()
        assert (len(embedding_rows), embedding_rows.lr, embedding_rows.recipe) == (
            len(other),
            other.lr,
            other.recipe,
        )
        blocks = [rows.block(0, 10_000, with_state=True) for rows in (embedding_rows, other)]
        for ours, theirs in zip(*[(block.ids, block.stamps) for block in blocks], strict=True):
            assert np.array_equal(ours, theirs)
        assert all(torch.equal(ours, blocks[1].columns[name]) for name, ours in blocks[0].columns.items())
        if embedding_rows.admission is not None:
            assert other.admission is not None
            assert np.array_equal(embedding_rows.admission.counts, other.admission.counts)
            assert embedding_rows.admission.counted == other.admission.counted
        chunks = [stage.server.context.chunks for stage in (self.pair.primary, self.pair.standby)]
        (span,), (copy,) = [known.by_number[self.piece.chunk].spans for known in chunks]
        assert (span.version, span.step, span.pushed) == (copy.version, copy.step, copy.pushed)
        assert chunks[0].table_bytes == chunks[1].table_bytes
        counts = [known.by_number[self.piece.chunk].buffer.tensor[0] for known in chunks]
        assert counts[0] == counts[1] == len(embedding_rows)


@pytest.fixture(params=[1, 64, 4 << 20], ids=["row by row", "some rows", "all rows"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", request.param)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.spec("R445", "R446")
@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": "adagrad"},
        {"evict": {"rows": 24}, "optimizer": "adam"},
        {"evict": {"age": 3}, "admit": 2, "momentum": 0.5},
        {"dtype": "float16", "admit": 3},
        {"evict": {"rows": 24, "half_life": 2, "seconds": 60}, "admit": 0.7},
    ],
    ids=str,
)
def test_a_standby_has_the_rows_of_its_server(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "WIDTH", 64)
    monkeypatch.setattr(spec.Admission.__init__, "__defaults__", (64,))  # so that counts are halved
    table = Tables(**given)
    for _ in range(5):
        table.push()
    table.pair.level()
    table.check()
    for _ in range(12):
        table.push()
        table.pair.pump()
        table.check()
    for _ in range(3):  # several before the standby has heard of the first
        table.push()
    table.pair.do(0, p.TableRate(table.piece.chunk, 0.25))
    table.pair.pump()
    table.check()
    again = list(range(60))
    said = [
        heard(stage.say(1, pull_table(table.piece.chunk, 0, 60), torch.tensor(again)), p.PulledTables)
        for stage in (table.pair.primary, _promoted(table.pair))
    ]
    assert said[0][0].stands == said[1][0].stands


def _promoted(pair: Pair) -> Any:
    pair.promote()
    return pair.standby


@pytest.mark.spec("R648")
def test_the_server_tells_of_hot_rows_and_its_standby_does_not() -> None:
    table = Tables(evict={"rows": 99, "half_life": 9})
    table.pair.level()
    table.push()
    table.pair.pump()
    told = []
    for stage in (table.pair.primary, table.pair.standby):
        stage.now += LOOK_EVERY_S
        said = stage.take(stage.server.on_timer(stage.now))
        told.append([len(each.message.hot_rows) for each in said if isinstance(each.message, p.Measured)])
    assert all(table.ends())
    assert told == [[1], []]


@pytest.mark.spec("R447")
def test_rows_that_have_not_all_come_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", 1)
    table = Tables(mode="sync")
    table.pair.level()
    for rank in range(2):
        ids = torch.tensor([3, 5, 9])
        message = push_table(table.piece.chunk, 1, (rank,), 0, DIM, 3)
        table.pair.do(rank, message, ids, torch.ones(6))
    table.pair.primary.sent.pop()
    table.pair.pump()
    embedding_rows, other = table.ends()
    assert (len(embedding_rows), len(other)) == (3, 0)
    (span,) = table.pair.standby.server.context.chunks.by_number[table.piece.chunk].spans
    assert (span.version, span.pushed) == (0, {})


@pytest.mark.spec("R445")
def test_tables_come_and_go_while_there_is_a_standby() -> None:
    table = Tables()
    table.pair.level()
    table.push()
    table.pair.pump()
    table.check()
    context = table.pair.primary.server.context
    store, chunk = context.stores["kv"], context.chunks.by_number[table.piece.chunk]
    rows = EmbeddingRows(table.recipe)
    rows.put(np.array([4, 7]), np.array([1, 1]), {"weight": torch.ones(2, DIM)})
    store.grow((2 - len(table.ends()[0])) * rows.arenas.counted_row_bytes)
    store.replace_rows(chunk, rows)  # as a store that returns to a cut does
    chunk.writable()[0] = 2
    replicator = table.pair.primary.server._replicator
    assert replicator is not None
    replicator.note_all(values=True)
    table.pair.primary.take(table.pair.primary.server._flush())
    table.pair.pump()
    table.check()
    for rank in range(2):
        table.pair.do(rank, p.Close((p.StoreLife("kv", 0),)))
    table.pair.do(0, p.Open("second", "async", 0, False, "wait", 9))
    table.pair.pump()
    assert not replicator._tables
    assert not table.pair.standby.server.context.chunks.by_number
    table.pair.name(0)


@pytest.mark.spec("R445")
def test_rows_on_a_disk_are_copied_to_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvps.core.embedding.arena.ARENA_BYTES_MIN", 64)
    monkeypatch.setattr("kvps.core.embedding.tiered.ROW_BYTES", 0)
    monkeypatch.setattr(primary, "WINDOW_BYTES", 64)
    disks = MemoryDisk(), MemoryDisk()
    table = Tables((disks[0].tier, disks[1].tier), evict={"rows": 50}, optimizer="adagrad")
    for _ in range(4):
        table.push()
    table.pair.level()
    for _ in range(4):
        table.push()
        table.pair.pump(200)
    assert all(disk.written for disk in disks)
    table.check()
    disks[0].read_error = errno.EIO
    table.pair.name(0)
    table.pair.name(51)
    table.pair.standby.server.member.incarnation = 51
    table.pair.primary.hear(b"q", table.pair.standby.server.member.packet(p.Follow()))
    table.pair.primary.now += 2
    table.pair.primary.take(table.pair.primary.server.on_timer(table.pair.primary.now))
    assert "rows of embedding tables cannot be moved" in table.pair.primary.standings[-1].reason


@pytest.mark.spec("R501")
def test_rows_that_cannot_be_read_keep_the_copy_from_being_level(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "rows of a table cannot be read"

    def fail(*_: object, **__: object) -> None:
        raise StorageError(why)

    table = Tables()
    pair = table.pair
    pair.level()
    pair.said.clear()
    monkeypatch.setattr(tables.TableChanges, "messages", fail)
    table.push()
    pair.pump()
    assert not heard(pair.said, p.Ack), "the scheduler may still give the seat to the standby"
    assert why in pair.primary.standings[-1].reason
    assert pair.primary.standings[-1].dismiss == LIFE
    pair.name(0)
    assert heard(pair.said, p.Ack)
    pair.primary.now += 2
    pair.primary.take(pair.primary.server.on_timer(pair.primary.now))
    assert why in pair.primary.standings[-1].reason, "a loss is told with it"
    pair.name(LIFE + 1)
    again = pair.standby.server.member
    again.incarnation = LIFE + 1
    pair.primary.hear(b"q", again.packet(p.Follow()))
    assert not any(isinstance(packet.message, p.CopyLevel) for packet in pair.primary.sent)
    pair.primary.sent.clear()
    table.push()
    assert not pair.primary.sent, "bytes for a copy that never becomes level"


@pytest.mark.spec("R445")
def test_a_table_that_is_made_while_the_copy_is_level_is_copied_at_once() -> None:
    known = Tables()
    known.pair.level()
    known.pair.do(0, message_of("kv", f"{KEY}-2", known.recipe))
    known.pair.pump()
    shards = [stage.server.context.stores["kv"].shards for stage in (known.pair.primary, known.pair.standby)]
    assert shards[0][f"{KEY}-2"].pieces == shards[1][f"{KEY}-2"].pieces
