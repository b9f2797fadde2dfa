"""Embedding tables in images: back on the same server, on others, out of a file, and by hand."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvps.checkpoint import atomic_file, snapshot_writer
from kvps.checkpoint.reshard import regroup
from kvps.core.embedding import arena
from kvps.core.embedding.id_hash import servers_of
from kvps.core.embedding.spec import EmbeddingSpec, message_of, recipe_of
from kvps.core.placement import home
from kvps.core.server.snapshot import capture_tables
from kvps.core.server.snapshot.model import Snapshot
from kvps.core.server.snapshot.storage import Loaded, Read
from kvps.dtypes import BY_ID
from kvps.errors import Mismatch
from kvps.protocol.checkpoint import Restore, Restored, Revive, Revived
from kvps.protocol.stores import Declared
from kvps.protocol.values import PulledTables
from kvps.tensors import from_frame
from tests.support.server_harness import Said, ServerStage, acked, heard, weight_bytes
from tests.support.snapshots import holdings
from tests.support.table_messages import pull_table, push_table

KEY = "kvps.embedding:t"
ALL = np.arange(100)


def recipe(**more: Any) -> EmbeddingSpec:
    plain: dict[str, Any] = {"optimizer": "sgd", "admit": 1, "evict": None, "lr": 1.0, "dtype": "float32"}
    given = plain | more
    if given["optimizer"] == "sgd":
        given["momentum"] = 0.5
    return recipe_of("t", 3, ("normal", 0.5), seed=5, **given)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "ARENA_BYTES_MIN", 8 * 24)
    monkeypatch.setattr(arena, "ARENA_BYTES_MAX", 16 * 24)
    monkeypatch.setattr(capture_tables, "BLOCK_BYTES", 5 * 24)


def write(path: Path, image: Snapshot) -> None:
    atomic_file.put(path, snapshot_writer.stream(image).write)


class Tabled:
    """One server of several, with a table."""

    def __init__(self, server: int, servers: int, image: Snapshot | None = None, **more: Any) -> None:
        self.stage = ServerStage(1, servers=servers, rank=server, every_s=0.0)
        self.server, self.servers, self.version = server, servers, 0
        if image is None:
            self.stage.open()
            if home("w", servers) == server:
                self.stage.init("w", [1.0, 2.0])
            said = self.stage.say(0, message_of("kv", KEY, recipe(**more)))
            (answer,) = heard(said, Declared)
            self.chunk = answer.places[0].pieces[0].chunk
        else:
            self.stage.restore(image)
            store = self.stage.server.context.stores["kv"]
            self.chunk = store.shards[KEY].pieces[0].chunk
            self.version = self.stage.chunk(self.chunk).spans[0].version
            self.stage.server.check()

    def later(self) -> list[Said]:
        """The server goes on with what it has begun."""
        return self.stage.take(self.stage.server.on_timer(self.stage.now))

    def mine(self, ids: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(ids[servers_of(ids, self.servers) == self.server])

    def push(self, first: int, last: int, value: float = 1.0) -> None:
        ids = self.mine(np.arange(first, last))
        message = push_table(self.chunk, 1, (0,), self.version, 3, len(ids))
        rows = (ids, torch.full((3 * len(ids),), value)) if len(ids) else ()
        assert acked(self.stage.say(0, message, *rows))
        self.version += 1

    def rows(self) -> dict[int, list[float]]:
        ids = self.mine(ALL)
        (said,) = self.stage.say(0, pull_table(self.chunk, 0, len(ids)), ids)
        assert isinstance(said.message, PulledTables)
        found = from_frame(said.payload[0], BY_ID[said.message.groups[0].dtype].name).view(-1, 3)
        return dict(zip(ids.tolist(), found.tolist(), strict=True))

    @property
    def count(self) -> int:
        rows = self.stage.chunk(self.chunk).embedding
        assert rows is not None
        rows.check()
        assert int(self.stage.chunk(self.chunk).buffer.tensor[0]) == len(rows)
        return len(rows)

    def image(self) -> Snapshot:
        found, release = self.stage.server.control.snapshot()
        release()
        return found


def trained(server: int = 0, servers: int = 1, **more: Any) -> Tabled:
    tabled = Tabled(server, servers, **more)
    for first, last in ((0, 40), (20, 60), (10, 30)):
        tabled.push(first, last)
    return tabled


def together(some: list[Tabled]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for item in some:
        found |= item.rows()
    return found


@pytest.mark.spec("R195", "R530")
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"admit": 2},
        {"evict": {"rows": 30}},
        {"evict": {"age": 2}},
        {"evict": {"rows": 30, "half_life": 2, "seconds": 60}},
        {"admit": 0.5},
        {"optimizer": "rowwise_adagrad"},
        {"optimizer": "adagrad", "dtype": "float16"},
    ],
)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 2), (2, 3), (3, 1)])
def test_rows_come_back_on_any_number_of_servers(
    before: int, after: int, more: dict[str, Any], tmp_path: Path
) -> None:
    old = [trained(server, before, **copy.deepcopy(more)) for server in range(before)]
    wanted, count = together(old), sum(item.count for item in old)
    files = []
    for item in old:
        path = tmp_path / f"{item.server}.safetensors"
        write(path, item.image())
        files.append(snapshot_writer.read(path))
    new = [Tabled(server, after, regroup(files, server, after)) for server in range(after)]
    assert together(new) == wanted
    if "evict" not in more or before == after:
        assert sum(item.count for item in new) == count
    if not more or "dtype" in more or before == after:  # how ids are counted and dropped is up to each server
        for some in (old, new):
            for item in some:
                item.push(0, 50)
        assert together(new) == together(old)
    assert [item.version for item in new] == [old[0].version] * after


def test_captured_tables_stay_as_they_were_while_training_goes_on() -> None:
    tabled = trained()
    image, release = tabled.stage.server.control.snapshot()
    former = [tensor.clone() for tensor in image.tensors()]
    tabled.push(0, 90, 5.0)
    for now, then in zip(image.tensors(), former, strict=True):
        assert torch.equal(now, then)
    release()
    assert image.size_bytes == sum(item.nbytes for item in former)


def test_a_table_is_no_key_of_an_image() -> None:
    image = trained().image()
    assert [key.name for key in image.stores[0].keys] == ["w"]
    assert [table.key for table in image.stores[0].tables] == [KEY]
    assert image.stores[0].versions == (0, 3)
    assert holdings(image)["kv"].keys == 2
    cuts = [holdings(trained(server, 3).image())["kv"].keys for server in range(3)]
    assert sum(cuts) == 2


def test_a_store_goes_back_to_what_it_was() -> None:
    tabled = trained()
    image, _ = tabled.stage.server.control.snapshot()  # held
    wanted = tabled.rows()
    tabled.push(0, 99)
    assert tabled.rows() != wanted
    tabled.stage.revive(image)
    assert tabled.rows() == wanted
    held = weight_bytes(tabled.stage.server.context.chunks)
    assert held == 8 + 2 * 4 + 60 * 3 * 4  # the table's element, the key, the rows
    tabled.version = 3
    tabled.push(0, 10)
    assert tabled.count == 60


def test_another_table_of_this_name_is_refused() -> None:
    tabled = trained()
    before = tabled.rows()
    with pytest.raises(Mismatch, match="table 't' of store 'kv' has another lr in the"):
        tabled.stage.revive(trained(lr=2.0).image())
    assert tabled.rows() == before


def test_a_server_beats_and_answers_between_the_blocks_of_a_restoration() -> None:
    tabled = trained()
    image, _ = tabled.stage.server.control.snapshot()
    wanted = tabled.rows()
    tabled.push(0, 99)
    changed = tabled.rows()
    assert tabled.stage.say(0, Revive("kv", "best", 7)) == []
    (read,) = tabled.stage.orders()
    assert isinstance(read, Read)
    assert tabled.stage.disk(Loaded(image, read.for_whom)) == []
    blocks = 0
    while not heard(said := tabled.later(), Revived):
        blocks += 1
        assert tabled.rows() == changed  # in place of them all at once
        assert tabled.stage.server.deadline() <= tabled.stage.now
    assert blocks >= 5
    assert tabled.rows() == wanted
    assert tabled.stage.server.deadline() > tabled.stage.now
    assert [answer.cuts for answer in heard(said, Revived)] == [(7,)]


def test_a_restoration_of_which_the_caller_is_gone_changes_nothing() -> None:
    tabled = trained()
    image, _ = tabled.stage.server.control.snapshot()
    tabled.push(0, 99)
    tabled.stage.say(0, Revive("kv", "best", 7))
    (read,) = tabled.stage.orders()
    tabled.stage.disk(Loaded(image, read.for_whom))
    assert isinstance(read, Read)
    tabled.later()
    tabled.stage.server.context.begin(0, 99)
    for _ in range(40):
        assert not heard(tabled.later(), Revived)
    assert tabled.count == 99


def test_a_server_that_returns_tells_when_all_blocks_are_back() -> None:
    image, other = trained().image(), Tabled(0, 1)
    other.stage.scheduler(Restore(1, 5))
    (read,) = other.stage.orders()
    assert isinstance(read, Read)
    other.stage.disk(Loaded(image, read.for_whom))
    other.stage.scheduler(Restore(2, 4))  # another cut, before the first is back
    for _ in range(40):
        assert not heard(other.later(), Restored)
    (again,) = other.stage.orders()
    assert isinstance(again, Read)
    said = other.stage.disk(Loaded(image, again.for_whom))
    while not heard(said, Restored):
        said = other.later()
    assert heard(said, Restored) == [Restored(2, 4)]
    store = other.stage.server.context.stores["kv"]
    assert len(store.chunk_at(store.shards[KEY].pieces[0]).table) == 60


# --- files that lie --------------------------------------------------------------------------------
