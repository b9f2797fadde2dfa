"""Embedding tables on a server: made, pushed to by id, pulled from, handed out in blocks."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvps.core.embedding.evicted import Evicted
from kvps.core.embedding.id_hash import Initializer, servers_of
from kvps.core.embedding.spec import EmbeddingSpec, message_of, recipe_of
from kvps.core.server import measured
from kvps.core.server.rules import table as embedding_rows
from kvps.core.server.server import LOOK_EVERY_S
from kvps.dtypes import BY_NAME
from kvps.protocol.envelope import Message
from kvps.protocol.membership import Done, HotRows, Measured
from kvps.protocol.stores import Declare, Declared, Entry
from kvps.protocol.values import (
    Ask,
    Embed,
    Export,
    Exported,
    Pull,
    PulledTables,
    Push,
    Run,
    TableRate,
)
from kvps.tensors import from_frame
from tests.support.placement_reference import reference
from tests.support.server_harness import Said, ServerStage, acked, heard, pulled, refusal
from tests.support.table_messages import pull_table, push_table

KEY = "kvps.embedding:words"
PLAIN: dict[str, Any] = {
    "init": "zeros",
    "optimizer": "sgd",
    "admit": 1,
    "evict": None,
    "dtype": "float32",
    "seed": 9,
    "lr": 1.0,
}


def recipe(**given: Any) -> EmbeddingSpec:
    return recipe_of("words", given.pop("dim", 2), **(PLAIN | given))


def embed(**given: Any) -> Embed:
    return message_of("kv", KEY, recipe(**given))


class Tabled:
    """A stage with one table on its only server."""

    def __init__(self, workers: int = 2, mode: str = "sync", **given: Any) -> None:
        options = {
            name: given.pop(name) for name in ("on_worker_lost", "average", "staleness") if name in given
        }
        self.stage = ServerStage(workers, memory_limit=given.pop("memory_limit", None))
        self.stage.open(mode, **options)
        self.dtype = given.get("dtype", "float32")
        (answer,) = heard(self.stage.say(0, embed(**given)), Declared)
        ((self.piece,),) = [place.pieces for place in answer.places]

    def push(self, rank: int, ids: Sequence[int], number: int, value: float = 1.0, **more: Any) -> list[Said]:
        return self.stage.say(rank, *self.pushing(rank, ids, number, value), **more)

    def pushing(self, rank: int, ids: Sequence[int], number: int, value: float = 1.0) -> tuple[Any, ...]:
        message = push_table(self.piece.chunk, BY_NAME["float32"].id, (rank,), number, 2, len(ids))
        rows = torch.full((2 * len(ids),), value)
        return (message, torch.tensor(ids), rows) if len(ids) else (message,)

    def pull(self, rank: int, ids: Sequence[int], after: int = 0) -> list[Said]:
        message = pull_table(self.piece.chunk, after, len(ids))
        return self.stage.say(rank, message, *([torch.tensor(ids)] if len(ids) else []))

    def rows(self, *ids: int, rank: int = 0) -> list[list[float]]:
        (said,) = self.pull(rank, ids)
        return values(said)

    def count(self) -> int:
        """What the table's element says."""
        said = self.stage.say(1, Pull(self.piece.chunk, True, (Ask(0, 1, 0, 0),)))
        (values,) = pulled(said).values()
        return int(values[0])


def values(said: Said) -> list[list[float]]:
    answer = said.message
    assert isinstance(answer, PulledTables), answer
    (group,), (count,) = answer.groups, answer.counts
    return from_frame(said.payload[0], "float32").view(count, group.dim).tolist() if count else []


@pytest.mark.spec("R465", "R648")
def test_server_tells_the_scheduler_of_the_rows_that_are_used_most(monkeypatch: pytest.MonkeyPatch) -> None:
    counts_uses = {"rows": 100, "half_life": 10}
    table = Tabled(1, evict=counts_uses)
    server = table.stage.server

    def told() -> list[tuple[HotRows, ...]]:
        table.stage.now += LOOK_EVERY_S
        said = table.stage.take(server.on_timer(table.stage.now))
        return [each.message.hot_rows for each in said if isinstance(each.message, Measured)]

    assert told() == []
    for number, ids in enumerate([[4, 17], [17], [-2, 17]]):
        assert acked(table.push(0, ids, number))
    ((rows,),) = told()
    half = 2**-0.1
    expected = {"17": 1 + half + half**2, "-2": 1.0, "4": half**2}
    assert (rows.store, rows.table, rows.uses) == ("kv", "words", pytest.approx(expected))
    assert [*rows.uses] == [*expected]
    for name, evict in (("plain", None), ("empty", counts_uses), ("other", counts_uses)):
        message = replace(embed(evict=evict), key=f"kvps.embedding:{name}")
        (answer,) = heard(table.stage.say(0, message), Declared)
        ((table.piece,),) = [place.pieces for place in answer.places]
        if name != "empty":
            assert acked(table.push(0, [1], 0))
    assert [[each.table for each in tables] for tables in told()] == [["words", "other"]]
    monkeypatch.setattr(measured, "ROWS_LOOKED", 1)
    assert [[each.table for each in tables] for tables in told()] == [["words"]]
    for chunk in server.context.chunks.by_number.values():
        chunk.embedding = None
    assert [told(), told()] == [[()], []]


# --- making ---------------------------------------------------------------------------------------


@pytest.mark.spec("R185")
@pytest.mark.parametrize(
    ("message", "match"),
    [
        (embed(dim=3), "Mismatch: table 'words'.*has dim 2, but 3 was requested"),
        (embed(lr=2.0), "Mismatch: table 'words'.*has lr 1.0, but 2.0 was requested"),
        (embed(init="normal"), r"Mismatch: .*has init \('zeros', 0.0\), but \('normal', 0.01\) was"),
        (Embed("kv", "words", 1, 2, "zeros", 0.0, 9, 1, 0, 0, "sgd", {}), "ProtocolError: .*begins"),
        (Embed("kv", KEY, 1, 2, "ones", 0.0, 9, 1, 0, 0, "sgd", {}), "ConfigError: init='ones'"),
        (Embed("kv", KEY, 1, 2, "normal", -1.0, 9, 1, 0, 0, "sgd", {}), "ConfigError: init 'normal'"),
        (Embed("kv", KEY, 1, 2, "zeros", 1.0, 9, 1, 0, 0, "sgd", {}), "ConfigError: init 'zeros'"),
        (Embed("kv", KEY, 7, 2, "zeros", 0.0, 9, 1, 0, 0, "sgd", {}), "ConfigError: dtype='int32'"),
        (Embed("kv", KEY, 1, 0, "zeros", 0.0, 9, 1, 0, 0, "sgd", {}), "ConfigError: dim=0"),
        (Embed("kv", KEY, 1, 2, "zeros", 0.0, 9, 0, 0, 0, "sgd", {}), "ConfigError: admit=0"),
        (Embed("kv", KEY, 1, 2, "zeros", 0.0, 9, 1, 0, 0, "lamb", {}), "ConfigError: .*'lamb'"),
        (Embed("kv", KEY, 1, 2, "zeros", 0.0, 9, 1, 0, 0, "eval", {}), "ConfigError: .*'eval'"),
        (Embed("kv", KEY, 1, 2, "zeros", 0.0, 9, 1, 0, 0, "sgd", {"x": 1}), "ConfigError: .*'x'"),
        (Embed("no", KEY, 1, 2, "zeros", 0.0, 9, 1, 0, 0, "sgd", {}), "ProtocolError: .*'no'"),
    ],
)
def test_impossible_table_is_refused(message: Embed, match: str) -> None:
    table = Tabled()
    before = table.stage.snapshot()
    said = refusal(table.stage.say(1, message))
    assert re.match(match, said), said
    assert table.stage.snapshot() == before


@pytest.mark.spec("R185")
def test_a_store_that_looks_at_gradients_has_no_table() -> None:
    stage = ServerStage(2)
    stage.open(on_nonfinite="skip")
    assert "on_nonfinite='apply'" in refusal(stage.say(0, embed()))


def test_a_table_needs_room_for_its_element() -> None:
    stage = ServerStage(2, memory_limit=4)
    stage.open()
    assert refusal(stage.say(0, embed())).startswith("Overload")
    assert not stage.server.context.chunks.by_number


@pytest.mark.spec("R197")
def test_rows_grow_beyond_the_limit_by_one_push_at_most() -> None:
    table = Tabled(workers=1, memory_limit=100)
    table.push(0, range(20), 0)
    before = table.stage.snapshot()
    assert refusal(table.push(0, [99], 1)).startswith(
        "Overload: no room for more rows of table 'words': weights 8 B + second buffers 8 B + "
        "sums of open rounds 8 B + tables 160 B = 184 B, and the limit of this server is 100 B"
    )
    assert table.stage.snapshot() == before
    again = table.push(0, range(20), 0)
    assert acked(again), "what is in is acknowledged again"


@pytest.mark.spec("R197")
def test_a_key_may_not_have_the_name_of_a_table() -> None:
    """Nor take the place of one."""
    table = Tabled()
    before = table.stage.snapshot()
    for call in (0, 1):
        entry = Entry(KEY, 8, (1,), 0, 1)
        said = table.stage.say(0, Declare("kv", True, call, (entry,)))
        assert "the key of a table, which only EMBED can create" in refusal(said)
    assert table.stage.snapshot() == before


@pytest.mark.spec("R197")
def test_an_answer_fits_in_a_frame() -> None:
    table = Tabled(dim=65_536)
    said = table.stage.say(0, pull_table(table.piece.chunk, 0, 257), torch.arange(257))
    assert refusal(said).startswith("ProtocolError: chunk 1: 257 rows are 67371008 bytes")


def test_ids_that_were_checked_stay_as_they_were() -> None:
    """Their sender may have lent them, and write others there."""
    table = Tabled()
    message, ids, rows = table.pushing(0, [1, 2, 3], 0)
    table.stage.say(0, message, ids, rows, lent=True)
    ids.fill_(7)
    table.push(1, [], 0)
    assert table.rows(1, 2, 3, 7) == [[-1.0, -1.0]] * 3 + [[0.0, 0.0]]


# --- ids -----------------------------------------------------------------------------------------


@pytest.mark.spec("R186")
def test_the_server_of_an_id_is_as_the_document_says() -> None:
    ids = [0, 1, -1, 2**62, 123456789]
    runs = reference()["line"](65536, 7, lambda servers: 1)
    starts, owners = [start for start, _ in runs], [server for _, server in runs]
    expected = [owners[bisect_right(starts, mixed(id_, 1) >> 48) - 1] for id_ in ids]
    assert servers_of(np.array(ids), 7).tolist() == expected


@pytest.mark.spec("R187")
def test_first_values_are_as_the_document_says() -> None:
    item, seed, scale = 5, 77, 0.3
    places = [(mixed(item, seed) + c * 0xD1342543DE82EF95) % 2**64 for c in range(3)]
    uniform = [((mixed(p, 0) >> 40) * 2 - (2**24 - 1)) * (scale / 2**24) for p in places]
    parts = [[mixed(p, s) >> 16 * k & 0xFFFF for s in range(3) for k in range(4)] for p in places]
    normal = [(2 * sum(some) - 12 * 65535) * (scale / 2**17) for some in parts]
    assert Initializer("uniform", scale).values(np.array([item]), 3, seed).tolist() == [uniform]
    assert Initializer("normal", scale).values(np.array([item]), 3, seed).tolist() == [normal]
    assert Initializer("zeros", 0.0).values(np.array([item]), 3, seed).tolist() == [[0.0] * 3]


def mixed(number: int, salt: int) -> int:
    """SplitMix64, as section 22 has it."""
    z = (number + (salt + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@pytest.mark.spec("R186")
def test_ids_of_other_servers_are_refused() -> None:
    stage = ServerStage(2, servers=2)
    stage.open()
    (answer,) = heard(stage.say(0, embed()), Declared)
    chunk = answer.places[0].pieces[0].chunk
    mine, others = (np.flatnonzero(servers_of(np.arange(20), 2) == item)[:2] for item in (0, 1))
    ids = torch.from_numpy(np.sort(np.concatenate([mine, others])))
    before = stage.snapshot()
    first = f"ProtocolError: 2 of 4 ids belong on other servers than 0, the first is {others[0]}"
    assert refusal(stage.say(0, pull_table(chunk, 0, 4), ids)) == first
    assert refusal(stage.say(0, push_table(chunk, 1, (0,), 0, 2, 4), ids, torch.zeros(8))) == first
    assert stage.snapshot() == before
    assert acked(stage.say(0, push_table(chunk, 1, (0,), 0, 2, 2), torch.from_numpy(mine), torch.zeros(4)))


# --- pushes ---------------------------------------------------------------------------------------


@pytest.mark.spec("R188")
def test_a_push_counts_once_and_one_that_comes_early_is_not_taken_in() -> None:
    table = Tabled()
    table.push(0, [1], 0)
    assert acked(table.push(0, [1], 0, 100.0)) == [4]
    assert table.push(0, [1], 2) == []
    assert acked(table.push(0, [1], 1)) == [6]
    table.push(1, [], 0)
    assert table.rows(1) == [[-1.0, -1.0]]
    assert acked(table.push(1, [1], 0, 100.0))  # its round is closed
    table.push(1, [1], 1)
    assert table.rows(1) == [[-3.0, -3.0]]
    message = push_table(table.piece.chunk, 1, (0, 1), 1, 2, 0)
    assert acked(table.stage.say(0, message))
    table.push(0, [], 2)
    two = push_table(table.piece.chunk, 1, (0, 1), 2, 2, 0)
    assert refusal(table.stage.say(0, two)).startswith("ProtocolError: a push for ranks [0, 1]")


@pytest.mark.spec("R190")
def test_sums_are_taken_in_the_order_of_ranks() -> None:
    table = Tabled(workers=3)
    for rank, value in ((2, 1.0), (1, -1e8), (0, 1e8)):
        table.push(rank, [1], 0, value)
    assert table.rows(1) == [[-1.0, -1.0]]  # (1e8 - 1e8) + 1


@pytest.mark.spec("R196")
def test_a_rate_holds_from_the_next_update_on() -> None:
    table = Tabled()
    chunk = table.piece.chunk
    table.push(0, [1], 0)
    assert heard(table.stage.say(0, TableRate(chunk, 0.25)), Done)
    table.push(1, [1], 0)
    assert table.rows(1) == [[-0.5, -0.5]]
    before = table.stage.snapshot()
    assert "rank 1 may not set" in refusal(table.stage.say(1, TableRate(chunk, 9.0)))
    assert refusal(table.stage.say(0, TableRate(chunk, -1.0))).startswith("ConfigError")
    assert "no chunk 77" in refusal(table.stage.say(0, TableRate(77, 1.0)))
    assert table.stage.snapshot() == before
    for rank in range(2):
        table.push(rank, [1], 1)
    assert table.rows(1) == [[-1.0, -1.0]]


@pytest.mark.spec("R189")
@pytest.mark.parametrize("ids", [[2, 1], [1, 1], [0, 3, 3, 4]])
def test_ids_out_of_order_are_refused(ids: list[int]) -> None:
    table = Tabled()
    before = table.stage.snapshot()
    assert "ascending order, each once" in refusal(table.push(0, ids, 0))
    assert table.stage.snapshot() == before


@pytest.mark.spec("R189")
def test_rows_of_another_form_are_refused() -> None:
    table = Tabled()
    item, chunk = torch.tensor([1]), table.piece.chunk
    before = table.stage.snapshot()
    for message, row in (
        (push_table(chunk, 1, (0,), 0, 3, 1), torch.zeros(3)),
        (push_table(chunk, 2, (0,), 0, 2, 1), torch.zeros(2, dtype=torch.float64)),
    ):
        said = refusal(table.stage.say(0, message, item, row))
        assert said.startswith(f"Mismatch: chunk {chunk} is a table of float32[2], and the push has rows")
    assert table.stage.snapshot() == before


@pytest.mark.spec("R189")
def test_keys_are_pushed_to_as_keys_and_tables_as_tables() -> None:
    table = Tabled()
    table.stage.init("w", [1.0, 2.0])
    chunk = table.stage.pieces["w"][0].chunk
    before = table.stage.snapshot()
    push = Push(table.piece.chunk, 8, (0,), 1.0, False, (Run(0, 1, 0),))
    assert "push rows by PUSH-TABLES" in refusal(table.stage.say(0, push, torch.ones(1, dtype=torch.int64)))
    messages: list[Message] = [
        push_table(chunk, 1, (0,), 0, 2, 0),
        pull_table(chunk, 0, 0),
        Export(chunk, 0, 5, 0, False),
    ]
    for message in messages:
        assert refusal(table.stage.say(0, message)).endswith("holds keys, not an embedding table")
    assert table.stage.snapshot() == before


def test_halves_may_come_as_halves_or_as_their_sums() -> None:
    table = Tabled(dtype="bfloat16")
    chunk = table.piece.chunk
    item = torch.tensor([1])
    half = BY_NAME["bfloat16"].id
    table.stage.say(0, push_table(chunk, half, (0,), 0, 2, 1), item, torch.ones(2, dtype=torch.bfloat16))
    table.stage.say(1, push_table(chunk, 1, (1,), 0, 2, 1), item, torch.full((2,), 0.5))
    (said,) = table.pull(0, [1])
    assert from_frame(said.payload[0], "bfloat16").tolist() == [-1.5, -1.5]


# --- who gets a row, and who loses it --------------------------------------------------------------


@pytest.mark.spec("R191", "R193")
def test_a_pull_makes_no_row() -> None:
    table = Tabled(init=("uniform", 0.5))
    before = table.stage.snapshot()
    first = table.rows(3, 4, 3)
    assert first[0] == first[2] != first[1]
    wanted = Initializer("uniform", 0.5).values(np.array([3]), 2, 9).astype(np.float32)
    assert first[0] == wanted[0].tolist()
    after = table.stage.snapshot()
    assert after == before
    assert table.count() == 0


@pytest.mark.spec("R192")
def test_old_rows_go_and_begin_anew() -> None:
    table = Tabled(mode="async", evict={"age": 2, "rows": 8})
    table.push(0, [1], 0)
    for number in range(1, 4):
        table.push(0, [2], number)
    assert (table.rows(1, 2), table.count()) == ([[0.0, 0.0], [-3.0, -3.0]], 1)
    table.push(0, list(range(10, 18)), 4)
    assert (table.rows(2, 10), table.count()) == ([[0.0, 0.0], [0.0, 0.0]], 7)


# --- pulls ------------------------------------------------------------------------------------------


@pytest.mark.spec("R193")
def test_a_pull_waits_where_staleness_is_bounded() -> None:
    table = Tabled(mode="ssp", staleness=1)
    table.push(1, [1], 0)
    for number in range(2):
        table.push(0, [1], number)
    assert len(table.pull(0, [1])) == 1
    table.push(0, [1], 2)
    assert table.pull(0, [1]) == []
    assert any(isinstance(packet.message, PulledTables) for packet in table.push(1, [1], 1))


# --- exports ------------------------------------------------------------------------------------------


def exported(said: list[Said]) -> tuple[Exported, list[list[float]]]:
    (packet,) = said
    assert isinstance(packet.message, Exported)
    found = [from_frame(frame, "int64").tolist() for frame in packet.payload[:2]]
    found += [from_frame(frame, "float32").tolist() for frame in packet.payload[2:]]
    return packet.message, found


@pytest.mark.spec("R194")
def test_an_export_has_every_row_once() -> None:
    table = Tabled(mode="async", optimizer="adagrad", lr=1.0)
    table.push(0, [1, 2, 3, 4, 5], 0)
    seen: list[float] = []
    start, count = 0, 0
    while True:
        answer, found = exported(table.stage.say(0, Export(table.piece.chunk, start, 2, 0, True)))
        seen += found[0]
        table.push(0, [1, 5, 100 + count], count + 1)
        count += 1
        assert [field.name for field in answer.fields] == ["weight", "sum"]
        assert len(found[2]) == len(found[3]) == 2 * answer.count
        start = answer.next
        if not start:
            break
    assert {1, 2, 3, 4, 5} <= set(seen)
    assert len(seen) == len(set(seen))
    answer, found = exported(table.stage.say(0, Export(table.piece.chunk, 0, 9, 1, False)))
    assert sorted(found[0]) == [1, 5, *range(100, 100 + count)]
    assert set(found[1]) <= set(range(2, 2 + count))
    answer, found = exported(table.stage.say(0, Export(table.piece.chunk, 0, 9, 99, False)))
    assert (answer.count, answer.next, found) == (0, 0, [])


@pytest.mark.spec("R582")
def test_an_export_of_changes_is_refused_where_it_is_not_known_what_was_evicted() -> None:
    table = Tabled(mode="async", evict={"seconds": 3600.0, "rows": 8})
    table.push(0, list(range(8)), 0)
    table.push(0, [20], 1)
    answer, found = exported(table.stage.say(0, Export(table.piece.chunk, 0, 9, 1, False)))
    assert found[:2] == [[20], [2]]
    answer, found = exported(table.stage.say(0, Export(table.piece.chunk, answer.next, 9, 1, False)))
    assert (answer.next, found) == (0, [[0, 1], [0, 0], [0.0] * 4])
    rows = table.stage.chunk(table.piece.chunk).embedding
    assert rows is not None
    rows.evicted = Evicted()  # as of a server that was restored
    said = table.stage.say(0, Export(table.piece.chunk, 0, 9, 1, False))
    assert "table 'words': the ids that were evicted are known from version 2 on, and 1" in refusal(said)
    for since in (0, 2):
        exported(table.stage.say(0, Export(table.piece.chunk, 0, 9, since, False)))


def test_an_export_of_no_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Tabled(mode="async")
    table.push(0, [1, 2, 3], 0)
    assert "no rows" in refusal(table.stage.say(0, Export(table.piece.chunk, 0, 0, 0, False)))
    monkeypatch.setattr(embedding_rows, "EXPORT_BYTES", 32)  # two rows of two times eight octets
    answer, _ = exported(table.stage.say(0, Export(table.piece.chunk, 0, 2**62, 0, False)))
    assert (answer.count, answer.next) == (2, 2)
