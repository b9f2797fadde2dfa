"""Requests that name several tables: judged part by part, taken in or refused as a whole."""

from typing import Any

import pytest
import torch

from kvps.core.embedding.spec import message_of, recipe_of
from kvps.core.server.chunks import slab
from kvps.core.server.rules import table
from kvps.dtypes import BY_NAME
from kvps.protocol.membership import Probe, Probed
from kvps.protocol.stores import Declared
from kvps.protocol.values import PulledTables, PullTables, PushTables, TableGroup, TablePart, TableStand
from kvps.tensors import from_frame
from tests.support.server_harness import Said, ServerStage, acked, heard, refusal

KINDS = {"a": ("float32", 2), "b": ("float32", 2), "c": ("float64", 1)}


class Tables:
    """A stage with three tables, of two groups, on its only server."""

    def __init__(self, mode: str = "sync", **given: Any) -> None:
        self.stage = ServerStage(2, memory_limit=given.pop("memory_limit", None))
        self.stage.open(mode, **given)
        self.chunks = {name: self.make("kv", name, dtype, dim) for name, (dtype, dim) in KINDS.items()}

    def make(self, store: str, name: str, dtype: str, dim: int) -> int:
        recipe = recipe_of(name, dim, "zeros", "sgd", 1, None, dtype, 9, lr=1.0)
        (answer,) = heard(self.stage.say(0, message_of(store, f"kvps.embedding:{name}", recipe)), Declared)
        ((piece,),) = [place.pieces for place in answer.places]
        return piece.chunk

    def push(self, rank: int, values: float = 1.0, **parts: tuple[int, list[int]]) -> list[Said]:
        """Push ``values`` to the rows of ids: name=(number, ids)."""
        return self.stage.say(rank, *self.pushing(rank, values, **parts))

    def pushing(self, rank: int, values: float, **parts: tuple[int, list[int]]) -> tuple[Any, ...]:
        said = [TablePart(self.chunks[name], number, len(ids)) for name, (number, ids) in parts.items()]
        groups, rows = [], []
        for kind in dict.fromkeys(KINDS[name] for name in parts):
            names = [name for name in parts if KINDS[name] == kind]
            count = sum(len(parts[name][1]) for name in names)
            groups.append(TableGroup(BY_NAME[kind[0]].id, kind[1], len(names)))
            if count:
                rows.append(torch.full((count * kind[1],), values, dtype=getattr(torch, kind[0])))
        ids = [some for _, part in parts.values() for some in part]
        message = PushTables((rank,), tuple(groups), tuple(said))
        return (message, torch.tensor(ids), *rows) if ids else (message,)

    def pull(self, rank: int, **parts: tuple[int, list[int]]) -> list[Said]:
        """Pull rows: name=(after, ids)."""
        said = tuple(TablePart(self.chunks[name], after, len(ids)) for name, (after, ids) in parts.items())
        ids = [some for _, part in parts.values() for some in part]
        return self.stage.say(rank, PullTables(said), *([torch.tensor(ids)] if ids else []))

    def rows(self, *ids: int) -> dict[str, list[list[float]]]:
        return {name: rows_of(self.pull(0, **{name: (0, [*ids])}))[0] for name in KINDS}


def rows_of(said: list[Said]) -> list[list[list[float]]]:
    (answer,) = said
    message = answer.message
    assert isinstance(message, PulledTables), message
    dtypes = {BY_NAME[dtype].id: dtype for dtype, _ in KINDS.values()}
    frames = iter(answer.payload)
    return [
        from_frame(next(frames), dtypes[group.dtype]).view(count, group.dim).tolist() if count else []
        for group, count in zip(message.groups, message.counts, strict=True)
    ]


@pytest.mark.spec("R188", "R193", "R466")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_parts_of_a_push_move_their_tables_and_one_pull_reads_them(mode: str) -> None:
    tables = Tables(mode)
    for rank in range(2):
        assert acked(tables.push(rank, a=(0, [1, 5]), b=(0, []), c=(0, [1])))
    said = tables.pull(1, a=(1, [5, 7]), b=(1, [1]), c=(1, [1, 2]))
    assert rows_of(said) == [[[-2.0, -2.0], [0.0, 0.0], [0.0, 0.0]], [[-2.0], [0.0]]]
    (answer,) = [effect.message for effect in said]
    assert isinstance(answer, PulledTables)
    assert answer.groups == (TableGroup(BY_NAME["float32"].id, 2, 2), TableGroup(BY_NAME["float64"].id, 1, 1))
    version = 1 if mode == "sync" else 2
    assert answer.stands == (TableStand(version, 1),) * 3
    assert rows_of(tables.pull(1, a=(1, [5]), b=(1, []), c=(1, []))) == [[[-2.0, -2.0]], []]
    assert tables.rows(1)["b"] == [[0.0, 0.0]]


@pytest.mark.spec("R466")
def test_a_part_that_comes_too_early_keeps_the_whole_push_out() -> None:
    tables = Tables("async")
    before = tables.stage.snapshot()
    assert tables.push(0, a=(0, [1]), b=(1, [1])) == []
    (probed,) = heard(tables.stage.say(0, Probe((2,)), seq=0), Probed)
    assert probed.missing == (2,)
    assert tables.stage.snapshot() == before
    assert acked(tables.push(0, b=(0, [1])))
    assert acked(tables.push(0, a=(0, [1]), b=(1, [1])))
    assert tables.rows(1) == {"a": [[-1.0, -1.0]], "b": [[-2.0, -2.0]], "c": [[0.0]]}


@pytest.mark.spec("R466")
def test_parts_that_were_counted_before_are_not_applied_again() -> None:
    tables = Tables("async")
    assert acked(tables.push(0, a=(0, [1]), c=(0, [1])))
    for _ in range(2):
        assert acked(tables.push(0, a=(0, [1]), b=(0, [1]), c=(1, [1])))
    assert tables.rows(1) == {"a": [[-1.0, -1.0]], "b": [[-1.0, -1.0]], "c": [[-2.0]]}


@pytest.mark.spec("R193")
def test_a_pull_waits_for_each_of_its_tables() -> None:
    tables = Tables()
    tables.push(0, a=(0, [1]), b=(0, [1]), c=(0, [1]))
    assert tables.pull(0, a=(1, [1]), b=(1, [1]), c=(0, [1])) == []
    tables.push(1, a=(0, [1]))
    (probed,) = heard(tables.stage.say(0, Probe((6,)), seq=0), Probed)
    assert "key 'kvps.embedding:b': round 0 waits for a push of rank 1" in probed.pending[0].reason
    said = tables.push(1, b=(0, [2]))
    answers = [effect for effect in said if isinstance(effect.message, PulledTables)]
    assert rows_of(answers) == [[[-2.0, -2.0], [-1.0, -1.0]], [[0.0]]]


def changed(tables: Tables, message: PushTables | PullTables, *payload: torch.Tensor) -> str:
    """Return how a request was refused, which must have changed nothing."""
    before = tables.stage.snapshot()
    text = refusal(tables.stage.say(0, message, *payload))
    assert tables.stage.snapshot() == before
    return text


@pytest.mark.spec("R467")
def test_requests_that_name_no_tables_or_too_many_are_refused() -> None:
    tables = Tables()
    a, b, c = [TablePart(chunk, 0, 0) for chunk in tables.chunks.values()]
    two, three = TableGroup(1, 2, 2), TableGroup(1, 2, 3)
    tables.stage.open(store="other")
    other = TablePart(tables.make("other", "a", "float32", 2), 0, 0)
    table_group = TableGroup(2, 1, 1)
    assert "names 0 tables, and it needs some of one store" in changed(tables, PushTables((0,), (), ()))
    assert "names 0 tables" in changed(tables, PullTables(()))
    assert "no chunk 0" in changed(tables, PushTables((0, 1), (), ()))
    assert "needs some of one store" in changed(tables, PushTables((0,), (two,), (a, other)))
    assert "needs some of one store" in changed(tables, PullTables((a, other)))
    for groups, parts in (
        ((two,), (a, a)),
        ((two,), (a,)),
        ((two,), (a, b, c)),
        ((two, table_group, table_group), (a, b, c)),
        ((), (a,)),
    ):
        text = changed(tables, PushTables((0,), groups, parts))
        assert text.startswith("ProtocolError: a push has groups of ")
        assert text.endswith(f"names {len(parts)} tables, each of which is to be named once")
    assert "is a table of float64[1]" in changed(tables, PushTables((0,), (three,), (a, b, c)))
    missing = TablePart(99, 0, 0)
    assert "no chunk 99" in changed(tables, PushTables((0,), (two,), (a, missing)))
    assert "no chunk 99" in changed(tables, PullTables((a, missing)))


@pytest.mark.spec("R186", "R189", "R197")
def test_a_part_that_is_refused_keeps_the_whole_push_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Tables()
    assert "the 2 ids of a push are not in ascending order" in changed(
        tables, *tables.pushing(0, 1.0, a=(0, [3, 5]), b=(0, [2, 2]), c=(0, [1]))
    )
    text = changed(tables, *tables.pushing(0, 1.0, a=(0, []), b=(0, [5]), c=(0, [7, 6])))
    assert f"chunk {tables.chunks['c']}: the 2 ids" in text
    assert acked(tables.push(0, a=(0, [3, 5]), b=(0, [1, 2]), c=(0, [0])))
    monkeypatch.setattr(table, "ANSWER_BYTES", 100)
    message = PullTables(tuple(TablePart(chunk, 0, 5) for chunk in tables.chunks.values()))
    assert "15 rows are 120 bytes, and the limit of an answer is 100" in changed(
        tables, message, torch.arange(15)
    )
    full = Tables(memory_limit=4096)
    for number in range(2):
        for rank in range(2):
            said = full.push(rank, a=(number, [*range(600)]), b=(number, [*range(600)]))
            assert acked(said) or "Overload" in refusal(said)
    assert "no room for more rows of table 'a'" in refusal(full.push(0, a=(1, [7]), b=(1, [7])))


def test_a_lost_worker_closes_several_rounds_of_several_tables() -> None:
    tables = Tables(on_worker_lost="shrink", average=True)
    tables.push(0, a=(0, [1]), b=(0, [2]))
    tables.push(0, 2.0, a=(1, [1]), b=(1, [1, 2]))
    tables.push(1, 4.0, a=(0, [1]))
    assert tables.rows(1, 2)["a"] == [[-2.5, -2.5], [0.0, 0.0]]
    tables.stage.show(w1="lost")
    assert tables.rows(1, 2) == {
        "a": [[-4.5, -4.5], [0.0, 0.0]],
        "b": [[-2.0, -2.0], [-3.0, -3.0]],
        "c": [[0.0], [0.0]],
    }


def test_sets_of_tables_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab, "NAMED_MAX", 2)
    tables = Tables("async")
    assert acked(tables.push(0, a=(0, [1]), b=(0, [1])))
    assert tables.rows(1) == {"a": [[-1.0, -1.0]], "b": [[-1.0, -1.0]], "c": [[0.0]]}
    assert len(tables.stage.server.context.chunks.named) == 2
    assert acked(tables.push(0, a=(1, [1]), b=(1, [1])))
    assert tables.rows(1)["b"] == [[-2.0, -2.0]]


@pytest.mark.spec("R188")
def test_a_round_of_pushes_that_name_other_tables_together() -> None:
    tables = Tables()
    assert acked(tables.push(0, 1.0, a=(0, [1, 5])))
    assert acked(tables.push(0, 2.0, b=(0, [1])))
    assert acked(tables.push(1, 4.0, a=(0, [5]), b=(0, [1, 7])))
    assert tables.rows(1, 5, 7) == {
        "a": [[-1.0, -1.0], [-5.0, -5.0], [0.0, 0.0]],
        "b": [[-6.0, -6.0], [0.0, 0.0], [-4.0, -4.0]],
        "c": [[0.0], [0.0], [0.0]],
    }


def test_a_table_without_the_gradient_of_a_rank_has_no_rows_of_it() -> None:
    group = table.PushedGroup(torch.tensor([3, 8, 9]).numpy(), torch.rand(3, 2), (0, 1, 3))
    both = [table.TableGradient(group, 0), None, table.TableGradient(group, 1)]
    for given in (both, both[1:]):
        ids, sizes, rows = table._pushed(given)
        stop = 3 - len(given)
        assert sizes == (1, 0, 2)[stop:]
        assert ids.tolist() == [3, 8, 9][stop:]
        assert torch.equal(rows, group.rows[stop:])
    with pytest.raises(AttributeError, match="name"):
        both[2].name  # type: ignore[union-attr]  # noqa: B018
