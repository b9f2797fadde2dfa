"""Embedding bags and collections of tables: bit equality with torch, their inputs, and their pushes."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import embedding, embedding_bag

import kvps
import kvps.torch
from kvps.errors import ConfigError, EpochChanged, Mismatch
from kvps.store.table_batch import TableBatch
from kvps.torch import Embedding, EmbeddingBag, EmbeddingCollection
from kvps.torch.embedding_ahead import AHEAD_MAX

DIMS = {"a": 4, "b": 8, "c": 4}
OFFSETS = torch.tensor([0, 5, 5, 9, 20])


@pytest.fixture
def kv() -> Any:
    torch.manual_seed(7)
    with kvps.create("local") as store:
        yield store


def tables_of(kv: Any, dims: dict[str, int] | None = None) -> dict[str, kvps.EmbeddingTable]:
    return {
        name: kv.embedding(name, dim, init=("normal", 0.5), optimizer="sgd", lr=1.0)
        for name, dim in (dims or DIMS).items()
    }


def test_sums_of_bags_are_the_scripts_own(kv: Any) -> None:
    ours = EmbeddingCollection({name: EmbeddingBag(table) for name, table in tables_of(kv).items()})
    given = {name: (torch.arange(20), OFFSETS[:-1]) for name in DIMS}
    with torch.no_grad():
        found = ours(given)
    found["a"].mul_(torch.ones(4, requires_grad=True))
    assert found["a"].requires_grad
    ours(given)["b"].detach_()


def test_inputs_stay_on_their_device_under_another_default(kv: Any) -> None:
    ours = EmbeddingCollection({"a": EmbeddingBag(tables_of(kv)["a"])})
    ids = torch.arange(20)
    with torch.device("meta"):
        found = [ours({"a": (ids, OFFSETS[:-1])})["a"], ours({"a": (ids.view(4, 5),)})["a"]]
    assert [item.device.type for item in found] == ["cpu", "cpu"]


@pytest.mark.parametrize("count", [40, 3000])
@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_alike_tables_equal_modules_of_torch_bit_for_bit(kv: Any, kind: Any, count: int) -> None:
    tables = tables_of(kv, {"a": 4, "b": 8, "c": 4, "d": 4})
    ours = EmbeddingCollection({name: kind(table) for name, table in tables.items()})
    peer, options = (
        (torch.nn.Embedding, {}) if kind is Embedding else (torch.nn.EmbeddingBag, {"mode": "sum"})
    )
    theirs = {
        name: peer.from_pretrained(table.pull(range(50)), freeze=False, **options)
        for name, table in tables.items()
    }
    optimizer = torch.optim.SGD(
        [param for module in theirs.values() for param in module.parameters()], lr=1.0
    )
    for step in range(3):
        given: dict[str, Any] = {}
        for at, name in enumerate(tables):
            ids = (torch.rand(count + at) ** 3 * 50).long()
            ends = torch.randint(0, count, (count // 3 + at,)).sort()[0]
            given[name] = (ids,) if kind is Embedding else (ids, torch.cat([torch.zeros(1).long(), ends]))
        found = ours(given)
        for name, inputs in given.items():
            expected = theirs[name](*inputs)
            assert torch.equal(found[name], expected)
            weight = torch.randn_like(expected)
            found[name] = found[name].mul_(weight) if step else found[name] * weight
            (expected * weight).sum().backward()
        sum(rows.sum() for rows in found.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, table in tables.items():
            assert torch.equal(table.pull(range(50)), theirs[name].weight)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("form", ["offsets", "last", "rows"])
def test_bag_equals_that_of_torch_bit_for_bit(kv: Any, mode: str, padding_idx: int | None, form: str) -> None:
    table = tables_of(kv, {"t": 5})["t"]
    ours = EmbeddingBag(table, mode, padding_idx, include_last_offset=form == "last")
    theirs = torch.nn.EmbeddingBag.from_pretrained(
        table.pull(range(40)),
        freeze=False,
        mode=mode,
        padding_idx=padding_idx,
        include_last_offset=form == "last",
    )
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1.0)
    for _ in range(3):
        ids = torch.randint(0, 40, (60,), dtype=torch.int32).view((12, 5) if form == "rows" else (60,))
        ends = torch.tensor([60] if form == "last" else [], dtype=torch.int64)
        given = (ids,) if form == "rows" else (ids, torch.cat([OFFSETS, ends]).int())
        found, expected = ours(*given), theirs(*given)
        assert torch.equal(found, expected)
        weight = torch.randn_like(found)
        (found * weight).sum().backward()
        (expected * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(table.pull(range(40)), theirs.weight.detach())
    assert len(table) < 40 + (padding_idx is None)  # the row of padding is never made


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_weights_of_samples_and_their_gradients_equal_those_of_torch(
    kv: Any, padding_idx: int | None
) -> None:
    table = tables_of(kv, {"t": 5})["t"]
    theirs = torch.nn.EmbeddingBag.from_pretrained(
        table.pull(range(9)), freeze=False, mode="sum", padding_idx=padding_idx
    )
    ids, weights = torch.randint(0, 9, (30,)), torch.randn(30)
    losses = []
    for module in (EmbeddingBag(table, padding_idx=padding_idx), theirs):
        own = weights.clone().requires_grad_()
        out = module(ids, OFFSETS, own)
        (out * torch.arange(25.0).view(5, 5)).sum().backward()
        losses.append((out.detach(), own.grad))
    assert torch.equal(losses[0][0], losses[1][0])
    assert torch.equal(losses[0][1], losses[1][1])
    assert theirs.weight.grad is not None
    assert torch.equal(table.pull(range(9)), theirs.weight.detach() - theirs.weight.grad)


def test_collection_equals_modules_of_torch_bit_for_bit(kv: Any) -> None:
    tables = tables_of(kv)
    ours = EmbeddingCollection(
        {
            "x": tables["a"],
            "y": EmbeddingBag(tables["b"], "mean", padding_idx=0),
            "z": tables["a"],
            "w": Embedding(tables["c"], padding_idx=1),
            "v": EmbeddingBag(tables["c"], "max"),
        }
    )
    for step in range(1, 4):
        weight = {name: table.pull(range(50)).requires_grad_() for name, table in tables.items()}
        ids = {name: torch.randint(0, 50, (30,)) for name in "xyzwv"}
        scales = [torch.randn(30).requires_grad_() for _ in range(2)]
        scales[1].data.copy_(scales[0].data)
        found = ours(
            {
                "v": (ids["v"], OFFSETS),
                "x": (ids["x"], OFFSETS, scales[0]),
                "y": (ids["y"], OFFSETS),
                "z": ids["z"].view(5, 6),
                "w": ids["w"].view(2, 15),
            }
        )
        theirs = {
            "x": embedding_bag(ids["x"], weight["a"], OFFSETS, mode="sum", per_sample_weights=scales[1]),
            "y": embedding_bag(ids["y"], weight["b"], OFFSETS, mode="mean", padding_idx=0),
            "z": embedding_bag(ids["z"].view(5, 6), weight["a"], mode="sum"),
            "w": embedding(ids["w"].view(2, 15), weight["c"]) * (ids["w"] != 1).view(2, 15, 1),
            "v": embedding_bag(ids["v"], weight["c"], OFFSETS, mode="max"),
        }
        assert list(found) == list(theirs)
        factors = {name: torch.randn_like(out) for name, out in found.items()}
        for outputs in (found, theirs):
            sum((out * factors[name]).sum() for name, out in outputs.items()).backward()  # type: ignore[union-attr]
        assert all(torch.equal(found[name], out) for name, out in theirs.items())
        assert torch.equal(scales[0].grad, scales[1].grad)  # type: ignore[arg-type]
        for name, table in tables.items():
            assert weight[name].grad is not None
            assert torch.equal(table.pull(range(50)), (weight[name] - weight[name].grad).detach()), name
            assert table.version() == step


def test_each_backward_pushes_every_table_once(kv: Any) -> None:
    tables = tables_of(kv)
    module = EmbeddingCollection(dict(tables))
    before = {name: table.pull([1, 2]) for name, table in tables.items()}
    ones = {name: torch.tensor([[1, 2], [2, 2]]) for name in tables}
    first, second = module(ones), module(ones)
    (first["a"].sum() + second["a"].sum()).backward()
    assert [table.version() for table in tables.values()] == [1, 1, 1]
    assert len(tables["b"]) == 0
    assert torch.equal(before["a"] - tables["a"].pull([1, 2]), torch.tensor([[2.0] * 4, [6.0] * 4]))
    out = module(ones)
    out["b"].sum().backward()
    assert torch.equal(before["b"] - tables["b"].pull([1, 2]), torch.tensor([[1.0] * 8, [3.0] * 8]))
    assert [table.version() for table in tables.values()] == [2, 2, 2]
    module({name: torch.empty((3, 0), dtype=torch.int64) for name in tables})["a"].sum().backward()
    assert [table.version() for table in tables.values()] == [3, 3, 3]
    with torch.no_grad():
        module(ones)["a"].relu_()
    module(ones)["a"].relu_().sum().backward()  # an output may be written to
    module.eval()
    assert not module(ones)["a"].requires_grad
    assert tables["a"].version() == 4


def test_copy_of_a_collection_has_its_tables(kv: Any) -> None:
    tables = tables_of(kv)
    module = copy.deepcopy(EmbeddingCollection(dict(tables)))
    module({name: torch.tensor([[5]]) for name in tables})["c"].sum().backward()
    assert len(tables["c"]) == 1
    assert "a: EmbeddingBag('a', 4, op='average', mode='sum')" in repr(module)
    assert not module.state_dict()


class Jagged(SimpleNamespace):
    """What of TorchRec's KeyedJaggedTensor is read."""

    def __init__(self, names: list[str], values: torch.Tensor, offsets: torch.Tensor, weights: Any) -> None:
        super().__init__(
            keys=lambda: names,
            values=lambda: values,
            offsets=lambda: offsets,
            lengths=offsets.diff,
            weights_or_none=lambda: weights,
        )


@pytest.mark.parametrize("is_weighted", [False, True])
def test_keyed_jagged_tensor_is_a_batch_of_bags(kv: Any, is_weighted: bool) -> None:
    tables = tables_of(kv)
    module = EmbeddingCollection(dict(tables))
    values, offsets = torch.randint(0, 50, (20,)), torch.tensor([0, 3, 3, 8, 9, 15, 20], dtype=torch.int32)
    weights = torch.randn(20) if is_weighted else None
    found = module(Jagged(["c", "a", "b"], values, offsets, weights))
    for name, begin, bags in (("c", 0, [0, 3]), ("a", 3, [0, 5]), ("b", 9, [0, 6])):
        end = {"c": 3, "a": 9, "b": 20}[name]
        own = None if weights is None else weights[begin:end]
        expected = EmbeddingBag(tables[name])(values[begin:end], torch.tensor(bags), own)
        assert torch.equal(found[name], expected)
    with pytest.raises(Mismatch, match="3 keys and 20 values has 6 offsets: each key needs the same number"):
        module(Jagged(["c", "a", "b"], values, offsets[1:], weights))


BAD_BAGS: list[tuple[tuple[Any, ...], str]] = [
    ((torch.tensor([1.0, 2.0]), torch.tensor([0])), "ids are whole numbers, got torch.float32"),
    (([1, 2], torch.tensor([0])), "ids are a tensor, got list"),
    ((torch.tensor([1, 2]),), "ids of one dimension need offsets, a tensor of whole numbers; got NoneType"),
    ((torch.tensor([1, 2]), torch.tensor([0.0])), "offsets are whole numbers"),
    (
        (torch.tensor([1, 2]), torch.tensor([[0]])),
        r"offsets have one dimension, and one for each bag; got \[1, 1\]",
    ),
    ((torch.tensor([1, 2]), torch.tensor([1])), "ascend from 0 to 2, the number of ids; got 1 before 2"),
    (
        (torch.tensor([1, 2]), torch.tensor([0, 2, 1])),
        "ascend from 0 to 2, the number of ids; got 2 before 1",
    ),
    ((torch.tensor([1, 2]), torch.tensor([0, 3])), "ascend from 0 to 2, the number of ids; got 3 before 2"),
    ((torch.tensor([[1, 2]]), torch.tensor([0])), "two dimensions have a bag in each row; omit the offsets"),
    ((torch.tensor(1),), r"ids have one or two dimensions, got \[\]"),
    ((torch.tensor([[1, 2]]), None, torch.ones(2)), r"float32 \[1, 2\], as the ids; got torch.float32 \[2\]"),
    ((torch.tensor([[1, 2]]), None, torch.ones(1, 2).double()), "float64"),
    ((torch.tensor([[1, 2]]), None, 2.0), "as the ids; got float"),
    ((torch.tensor([[1, 2]]), None, torch.ones(1, 2, device="meta")), "strided on meta"),
    ((torch.tensor([[1, 2]]), None, torch.ones(1, 2).to_sparse()), "sparse_coo on cpu"),
]


@pytest.mark.parametrize(("given", "error"), BAD_BAGS)
def test_bags_that_do_not_fit_are_refused_and_nothing_is_pushed(
    kv: Any, given: tuple[Any, ...], error: str
) -> None:
    tables = tables_of(kv)
    with pytest.raises(Mismatch, match=f"table 'a': .*{error}"):
        EmbeddingBag(tables["a"])(*given)
    module = EmbeddingCollection({"x": tables["a"], "y": tables["b"]})
    with pytest.raises(Mismatch, match=f"feature 'y': .*{error}"):
        module({"x": torch.tensor([[1]]), "y": given})
    with pytest.raises(Mismatch, match="table 'a': "):
        EmbeddingBag(tables["a"], include_last_offset=True)(*given)
    assert [table.version() for table in tables.values()] == [0, 0, 0]


def test_last_offset_must_be_the_number_of_ids(kv: Any) -> None:
    module = EmbeddingBag(tables_of(kv)["a"], include_last_offset=True)
    with pytest.raises(Mismatch, match="ascend from 0 to 2, the number of ids; got 0 before 1"):
        module(torch.tensor([1, 2]), torch.tensor([0, 1]))
    with pytest.raises(Mismatch, match=r"one for each bag; got \[0\]"):
        module(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))


def test_arguments_that_cannot_be(kv: Any) -> None:
    tables = tables_of(kv)
    ids = torch.tensor([[1]])
    with pytest.raises(ConfigError, match="mode='median': use one of sum, mean, max"):
        EmbeddingBag(tables["a"], "median")
    with pytest.raises(Mismatch, match="per_sample_weights need mode='sum', and this is 'max'"):
        EmbeddingBag(tables["a"], "max")(ids, None, torch.ones(1, 1))
    for nothing in ({}, [tables["a"]]):
        with pytest.raises(ConfigError, match="give a dict of at least one table by name"):
            EmbeddingCollection(nothing)
    with pytest.raises(ConfigError, match=r"kv\.embedding"):
        EmbeddingCollection({"x": torch.nn.Embedding(1, 1)})
    with pytest.raises(ConfigError, match="op='max'"):
        EmbeddingCollection(tables, op="max")
    with kvps.create("local", name="other") as other, pytest.raises(ConfigError, match="two stores"):
        EmbeddingCollection({"x": tables["a"], "y": other.embedding("a", 4)})
    module = EmbeddingCollection({"x": tables["a"], "y": Embedding(tables["b"])})
    with pytest.raises(Mismatch, match="'x', 'y'; missing or unknown: 'y', 'z'"):
        module({"x": ids, "z": ids})
    with pytest.raises(Mismatch, match="got Tensor"):
        module(ids)
    with pytest.raises(Mismatch, match="feature 'y': give at most 1 tensors, got 2"):
        module({"x": ids, "y": (ids, None)})
    with pytest.raises(Mismatch, match="feature 'x': give at most 3 tensors, got 0"):
        module({"x": (), "y": ids})
    with pytest.raises(Mismatch, match="several devices: cpu, meta"):
        module({"x": ids, "y": _Elsewhere(ids)})


class _Elsewhere(torch.Tensor):
    """A tensor that says that it lies on another device."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> _Elsewhere:
        return tensor.as_subclass(cls)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")


# --- rows that are asked for ahead ------------------------------------------------------------------


def count_pulls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that gets the ids of each request for rows."""
    asked: list[list[int]] = []
    ask = TableBatch.ask

    def counted(batch: TableBatch, timeout: float | None = None) -> Any:
        asked.append(batch.split.ids.tolist())
        return ask(batch, timeout)

    monkeypatch.setattr(TableBatch, "ask", counted)
    return asked


def test_rows_that_were_asked_for_ahead_are_exact(kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = tables_of(kv)
    module = EmbeddingCollection(dict(tables))
    plain = EmbeddingCollection(dict(tables))
    batches = [
        {name: torch.randint(0, 20, (6, 3), generator=torch.Generator().manual_seed(at)) for name in tables}
        for at in range(6)
    ]
    asked = count_pulls(monkeypatch)
    for at, batch in enumerate(module.prefetching(batches)):
        expected = plain.eval()(batch)
        asked.clear()
        found = module(batch)
        assert (asked == []) == (at > 0)  # all but the first were asked for
        assert all(torch.equal(found[name], out) for name, out in expected.items())
        sum(out.square().sum() for out in found.values()).backward()  # type: ignore[union-attr]
    assert [table.version() for table in tables.values()] == [6] * 3
    assert list(module.prefetching([])) == []


def test_only_rows_that_were_pushed_since_are_asked_for_again(
    kv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = tables_of(kv)
    module = EmbeddingCollection(dict(tables))
    asked = count_pulls(monkeypatch)
    first = {name: torch.tensor([[1, 5]]) for name in tables}
    second = {"a": torch.tensor([[1, 7]]), "b": torch.tensor([[5, 9]]), "c": torch.tensor([[0, 3]])}
    out = module(first)
    module.prefetch(second)
    (out["a"].sum() + out["b"].sum() + out["c"].sum()).backward()
    assert asked == [[1, 5] * 3, [1, 7, 0, 3, 5, 9], [1, 5]]
    expected = {name: tables[name].pull(ids)[0].sum(0, keepdim=True) for name, ids in second.items()}
    asked.clear()
    found = module(second)
    assert asked == []
    assert all(torch.equal(found[name], out) for name, out in expected.items())
    module.prefetch(first)
    sum(out.sum() for out in found.values()).backward()  # type: ignore[union-attr]
    tables["a"].push([1], torch.ones(1, 4))  # behind the module's back: the rows are of no use any more
    expected = {name: tables[name].pull(ids)[0].sum(0, keepdim=True) for name, ids in first.items()}
    assert all(torch.equal(module(first)[name], out) for name, out in expected.items())


def test_rows_are_asked_for_again_after_a_restoration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVPS_CHECKPOINT_DIR", str(tmp_path))
    with kvps.create("local") as kv:
        module = EmbeddingCollection({"a": kv.embedding("a", 2, optimizer="sgd", lr=1.0)})
        batch = {"a": torch.tensor([[1], [5]])}
        kv.checkpoint()
        expected = module(batch)["a"].detach()
        module(batch)["a"].sum().backward()
        module.prefetch(batch)
        kv.restore()
        assert torch.equal(module(batch)["a"], expected)


def test_rows_that_nobody_wants_are_forgotten(kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tables_of(kv)["a"]
    module = EmbeddingCollection({"x": table, "y": EmbeddingBag(table, padding_idx=0)})
    asked = count_pulls(monkeypatch)
    batches = [{"x": torch.tensor([[at]]), "y": torch.tensor([[0, at]])} for at in range(AHEAD_MAX + 1)]
    for batch in batches:
        module.prefetch(batch)
    asked.clear()
    for batch in reversed(batches):
        assert torch.equal(module(batch)["x"], table.pull(batch["x"])[0])
    assert len(asked) == 1 + len(batches)  # the oldest, and those of the table itself
    module.prefetch(batches[3])
    module({"x": torch.tensor([[0]]), "y": torch.tensor([[3, 0]])})["x"].sum().backward()
    module._exchange._returned(EpochChanged("back", {}, {}, has_optimizer=True))
    asked.clear()
    module(batches[3])
    assert len(asked) == 1
    with pytest.raises(Mismatch, match="missing or unknown: 'y'"):
        module.prefetch({"x": torch.tensor([[0]])})


def test_a_batch_that_no_forward_takes_is_forgotten_after_some_pushes(kv: Any) -> None:
    """Each push to its rows asks for them again: for ever, a job that breaks off an epoch would ask."""
    module = EmbeddingCollection({"x": tables_of(kv)["a"]})
    module.prefetch({"x": torch.tensor([[1], [2]])})
    for number in range(AHEAD_MAX + 1):
        assert len(module._exchange._ahead._asked) == 1, number
        module({"x": torch.tensor([[2], [3]])})["x"].sum().backward()
    assert len(module._exchange._ahead._asked) == 0
