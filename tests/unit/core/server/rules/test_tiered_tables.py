"""Tables beyond the memory limit of a server: what it takes, refuses and saves."""

import errno

import pytest
import torch

from kvps.core.embedding import arena
from kvps.core.embedding.spec import message_of, recipe_of
from kvps.core.embedding.tiered import ROW_BYTES
from kvps.core.server.snapshot.storage import SnapshotWritten, Write
from kvps.protocol.checkpoint import ImageKept, ImageTaken, TakeImage
from kvps.protocol.stores import Declared
from kvps.protocol.values import PulledTables, PullTables, PushTables, TableGroup, TablePart
from kvps.tensors import from_frame
from kvps.tools.replay.digest import digest
from tests.support.memory_disk import MemoryDisk
from tests.support.server_harness import Said, ServerStage, acked, heard, refusal

DIM, ROWS, EACH = 64, 256, 16
HOT = 40 * DIM * 4
LIMIT = ROWS * ROW_BYTES + HOT + 64


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "ARENA_BYTES_MIN", 8 * DIM * 4)


class Served:
    def __init__(self, limit: int | None = LIMIT, *, is_tiered: bool = True) -> None:
        self.disk = MemoryDisk()
        tier = self.disk.tier if is_tiered else None
        self.stage = ServerStage(1, memory_limit=limit, every_s=60.0, tier=tier)
        self.stage.open("async")
        recipe = recipe_of("t", DIM, "zeros", "sgd", 1, None, "float32", 9, lr=1.0)
        (answer,) = heard(self.stage.say(0, message_of("kv", "kvps.embedding:t", recipe)), Declared)
        self.chunk = answer.places[0].pieces[0].chunk
        self.pushed = 0

    @property
    def used(self) -> int:
        return sum(self.stage.server.control.budget.reserved())

    def push(self, first: int) -> list[Said]:
        ids = torch.arange(first, first + EACH)
        groups, parts = (TableGroup(1, DIM, 1),), (TablePart(self.chunk, self.pushed, EACH),)
        rows = -ids.float().repeat_interleave(DIM)
        said = self.stage.say(0, PushTables((0,), groups, parts), ids, rows)
        self.pushed += bool(acked(said))
        return said

    def fill(self) -> None:
        for first in range(0, ROWS, EACH):
            assert acked(self.push(first))

    def rows(self) -> list[float]:
        found: list[float] = []
        for first in range(0, ROWS, EACH):
            ids = torch.arange(first, first + EACH)
            (said,) = self.stage.say(0, PullTables((TablePart(self.chunk, 0, EACH),)), ids)
            assert isinstance(said.message, PulledTables)
            found += from_frame(said.payload[0], "float32").view(EACH, DIM)[:, 3].tolist()
        return found


def test_a_table_beyond_the_limit_is_served_within_it() -> None:
    served = Served()
    served.fill()
    assert served.used <= LIMIT
    assert served.rows() == [float(item) for item in range(ROWS)]
    assert served.used <= LIMIT
    assert served.disk.written >= ROWS - 40
    unlimited = Served(limit=None)
    unlimited.fill()
    assert unlimited.disk.written == 0


def test_a_record_is_replayed_with_all_rows_in_memory() -> None:
    served, replayed = Served(), Served(is_tiered=False, limit=None)
    for each in (served, replayed):
        each.fill()
        each.rows()
    tables = [each.stage.server.context.chunks for each in (served, replayed)]
    assert digest(tables[0]) == digest(tables[1])


def test_keys_take_memory_from_rows_and_an_index_too_large_is_refused() -> None:
    served = Served()
    served.fill()
    served.stage.init("w", [0.0] * 600)
    none = ServerStage(1, memory_limit=LIMIT, tier=MemoryDisk().tier)
    none.open("async")
    none.init("w", [0.0] * 600)
    assert served.used <= LIMIT
    for first in range(ROWS, 2 * ROWS, EACH):
        said = served.push(first)
        if not acked(said):
            break
    assert "no room for more rows of table 't'" in refusal(said)


def test_a_full_disk_refuses_pushes_and_checkpoints_until_it_has_room() -> None:
    served = Served()
    served.fill()
    before = served.rows()
    served.disk.error = errno.ENOSPC
    for first in range(0, ROWS, EACH):
        said = served.push(first)
        if not acked(said):
            break
    assert "moved between memory and /disk: No space left on device" in refusal(said)
    after = [2.0 * item if item < served.pushed * EACH - ROWS else item for item in before]
    assert served.rows() == after
    said = served.stage.scheduler(TakeImage(5))
    taken, kept = [each.message for each in said]
    assert taken == ImageTaken(5)
    assert isinstance(kept, ImageKept)
    assert "No space left on device" in kept.error
    served.disk.error = None
    assert acked(served.push(first))
    assert served.used <= LIMIT
    served.stage.scheduler(TakeImage(6))
    assert isinstance(served.stage.notes[-1].order, Write)  # type: ignore[attr-defined]
    served.stage.take(served.stage.server.on_disk(SnapshotWritten(6, 9, "ab" * 32), served.stage.now))


def test_a_pull_from_a_disk_that_cannot_be_read_is_refused() -> None:
    served = Served()
    served.fill()
    served.disk.read_error = errno.EIO
    said = served.stage.say(0, PullTables((TablePart(served.chunk, 0, EACH),)), torch.arange(EACH))
    assert "Input/output error" in refusal(said)
    served.disk.read_error = None
    assert served.rows()[1:3] == [1.0, 2.0]
