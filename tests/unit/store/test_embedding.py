"""Embedding tables of local stores: what users call, and what they get for mistakes."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import kvps
from kvps.errors import ConfigError, Mismatch, StorageError
from kvps.store import embedding as module


@pytest.fixture
def kv() -> Any:
    with kvps.create("local") as store:
        yield store


@pytest.fixture
def table(kv: Any) -> kvps.EmbeddingTable:
    found = kv.embedding("t", 2, init="zeros", optimizer="sgd", lr=1.0)
    assert isinstance(found, kvps.EmbeddingTable)
    return found


def test_rows_come_in_the_order_and_shape_of_their_ids(table: kvps.EmbeddingTable) -> None:
    table.push([[5, -5], [6, 5]], -torch.arange(8.0).view(2, 2, 2))
    assert table.pull([[5, 6, 5]]).tolist() == [[[6.0, 8.0], [4.0, 5.0], [6.0, 8.0]]]
    assert table.pull(-5).tolist() == [2.0, 3.0]
    assert table.pull([]).shape == (0, 2)
    assert table.pull(np.array([2**64 - 5], np.uint64)).tolist() == [[2.0, 3.0]]
    assert table.pull(torch.tensor([6], dtype=torch.int32)).tolist() == [[4.0, 5.0]]
    assert (len(table), table.version(), table.resume()) == (3, 1, 1)


def test_a_pushed_tensor_is_not_written_to_and_may_be_strided(table: kvps.EmbeddingTable) -> None:
    gradients = torch.ones(2, 3).t()
    table.push([1, 2, 3], gradients)
    assert gradients.eq(1).all()
    handle = table.push([1], torch.ones(1, 2, dtype=torch.float16), async_op=True)
    handle.wait()
    assert table.pull([1, 2]).tolist() == [[-2.0, -2.0], [-1.0, -1.0]]


def test_an_empty_push_is_a_push(table: kvps.EmbeddingTable) -> None:
    table.push([], [])
    table.push(torch.empty(0, dtype=torch.int64), torch.empty(0, 2))
    assert (len(table), table.version()) == (0, 2)


def test_halves_are_summed_wide(kv: Any) -> None:
    table = kv.embedding("h", 1, init="zeros", optimizer="sgd", lr=1.0, dtype=torch.bfloat16)
    table.push([1] * 300, torch.ones(300, 1))
    assert table.pull([1]).tolist() == [[-300.0]]
    assert table.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "ids", ["one", [1.5], [True], [[1], [2, 3]], [2**64], None, [object()], [2**63, -1], [2**63, 1.0]]
)
def test_ids_that_are_none_are_refused(table: kvps.EmbeddingTable, ids: object) -> None:
    with pytest.raises(Mismatch, match="ids are whole numbers"):
        table.pull(ids)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_not_read_by_index_are_refused(table: kvps.EmbeddingTable) -> None:
    for ids, found in (
        (torch.tensor([0, 1]).to_sparse(), "torch.sparse_coo on cpu"),
        (torch.empty(2, dtype=torch.int64, device="meta"), "torch.strided on meta"),
        (torch.nested.nested_tensor([torch.tensor([1])] * 2), "a nested tensor"),
    ):
        with pytest.raises(Mismatch, match=f"ids are a dense tensor with values, got {found}"):
            table.pull(ids)


def test_unsigned_ids_of_a_list_may_lie_on_both_sides_of_the_sign(table: kvps.EmbeddingTable) -> None:
    """numpy makes floats of such a list, which merge ids."""
    hashes = [2**64 - 1, 7, 2**63, 2**63 + 1]
    table.push(hashes, torch.arange(8.0).view(4, 2))
    assert table.pull([[2**63 + 1], [7]]).tolist() == [[[-6.0, -7.0]], [[-2.0, -3.0]]]
    assert torch.equal(table.pull(torch.tensor(hashes, dtype=torch.uint64)), table.pull(hashes))


def test_arguments_may_be_numbers_of_numpy(kv: Any) -> None:
    assert kv.embedding("n", np.int64(3), admit=np.uint8(2), evict={"rows": np.int32(9)}).dim == 3


@pytest.mark.parametrize(
    "gradients",
    [
        torch.ones(2, 2),
        torch.ones(1, 3),
        torch.ones(2),
        torch.ones(1, 2, dtype=torch.int64),
        [[1]],
        [],  # of one id
        torch.ones(1, 2, device="meta"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(table: kvps.EmbeddingTable, gradients: object) -> None:
    with pytest.raises(Mismatch, match="table 't'"):
        table.push([1], gradients)
    assert table.version() == 0


def test_a_table_is_asked_for_again_with_the_same_arguments(kv: Any, table: kvps.EmbeddingTable) -> None:
    assert kv.embedding("t", 2, init="zeros", optimizer="sgd", lr=1.0) is table
    with pytest.raises(Mismatch, match="another dim"):
        kv.embedding("t", 3, init="zeros", optimizer="sgd", lr=1.0)
    with pytest.raises(Mismatch, match="another lr"):
        kv.embedding("t", 2, init="zeros", optimizer="sgd", lr=2.0)


def test_an_export_replaces_files_alone(table: kvps.EmbeddingTable, tmp_path: Path) -> None:
    """By root, a device such as /dev/null would otherwise become a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(StorageError, match="not a file"):
        table.export(pipe)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("name", ["", "x" * 250, 5, "a\nb", "kvps.embedding:x"])
def test_a_name_must_be_one(kv: Any, name: Any) -> None:
    with pytest.raises(ConfigError):
        kv.embedding(name, 2)


def test_keys_may_not_look_like_tables(kv: Any) -> None:
    with pytest.raises(ConfigError, match="embedding tables"):
        kv.init("kvps.embedding:x", torch.zeros(1))


def test_a_store_that_looks_at_gradients_has_no_tables() -> None:
    with kvps.create("local", on_nonfinite="skip") as kv, pytest.raises(ConfigError, match="finite"):
        kv.embedding("t", 2)


def test_a_closed_store_has_no_tables(kv: Any, table: kvps.EmbeddingTable) -> None:
    kv.close()
    with pytest.raises(ConfigError, match="closed"):
        table.pull([1])
    with pytest.raises(ConfigError, match="closed"):
        len(table)


def test_an_export_comes_in_blocks(table: kvps.EmbeddingTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 24)  # three rows
    table.push(range(10), torch.ones(10, 2))
    table.push([4], torch.ones(1, 2))
    blocks = list(table.export())  # type: ignore[call-overload]
    assert [len(ids) for ids, _ in blocks] == [3, 3, 3, 1]
    rows = dict(zip(torch.cat([ids for ids, _ in blocks]).tolist(), range(10), strict=True))
    assert torch.cat([rows for _, rows in blocks])[rows[4]].tolist() == [-2.0, -2.0]
    assert [ids.tolist() for ids, _ in table.changed_since(1)] == [[4]]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="version=-1"):
        table.changed_since(-1)
    with pytest.raises(ConfigError, match="version='1'"):
        table.changed_since("1")  # type: ignore[arg-type]


def test_changes_name_the_ids_that_were_evicted(kv: Any, tmp_path: Path) -> None:
    table = kv.embedding("e", 2, init=("uniform", 0.5), evict={"rows": 8}, optimizer="sgd", lr=1.0)
    first = table.pull([0, 1])
    table.push(range(8), torch.ones(8, 2))
    copy = {number: row for ids, rows in table.export() for number, row in zip(ids.tolist(), rows)}  # noqa: B905 - evicted ids have no rows
    before = table.version()
    table.push([20], torch.ones(1, 2))
    for ids, rows in table.changed_since(before):
        copy.update(zip(ids.tolist(), rows, strict=False))
        for number in ids.tolist() if not len(rows) else ():
            del copy[number]
    assert sorted(copy) == [*range(2, 8), 20]
    assert torch.equal(torch.stack([*copy.values()]), table.pull([*copy]))
    assert table.changed_since(before, tmp_path / "t") == 3
    found = load_file(tmp_path / "t")
    assert dict(zip(found["ids"].tolist(), found["versions"].tolist(), strict=True)) == {20: 2, 0: 0, 1: 0}
    assert torch.equal(found["rows"][1:], first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_file_has_ids_versions_rows_and_states(kv: Any, tmp_path: Path, dtype: str) -> None:
    table = kv.embedding("f", 3, optimizer="adagrad", lr=1.0, dtype=dtype)
    table.push([1, 2, 3], torch.ones(3, 3))
    table.push([2], torch.ones(1, 3))
    path = tmp_path / "t.safetensors"
    assert table.export(path, with_state=True) == 3
    found = load_file(path)
    order = found["ids"].argsort()
    assert found["ids"][order].tolist() == [1, 2, 3]
    assert found["versions"][order].tolist() == [1, 2, 1]
    assert torch.equal(found["rows"][order], table.pull([1, 2, 3]))
    assert found["state.sum"][order].tolist() == [[1.0] * 3, [2.0] * 3, [1.0] * 3]
    assert table.changed_since(1, str(path)) == 1
    assert load_file(path).keys() == {"ids", "versions", "rows"}
    assert [field.name for field in tmp_path.iterdir()] == ["t.safetensors"]


@pytest.mark.spec("R476")
def test_a_state_may_have_one_number_a_row(kv: Any, tmp_path: Path) -> None:
    table = kv.embedding("f", 4, optimizer="rowwise_adagrad", lr=1.0, init="zeros")
    table.push([1, 2], torch.tensor([[1.0, 3.0, 1.0, 1.0], [0.0, 2.0, 0.0, 0.0]]))
    assert table.export(tmp_path / "t", with_state=True) == 2
    found = load_file(tmp_path / "t")
    assert found["state.sum"][found["ids"].argsort()].tolist() == [[3.0], [1.0]]
    torch.testing.assert_close(table.pull(2), torch.tensor([0.0, -2.0, 0.0, 0.0]))


def test_an_empty_table_makes_an_empty_file(table: kvps.EmbeddingTable, tmp_path: Path) -> None:
    assert table.export(tmp_path / "t") == 0
    found = load_file(tmp_path / "t")
    assert (found["ids"].shape, found["rows"].shape) == ((0,), (0, 2))


def test_a_file_that_cannot_be_written_is_named(table: kvps.EmbeddingTable, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        table.export(tmp_path / "nowhere" / "t")


def test_an_empty_table_is_a_table(table: kvps.EmbeddingTable) -> None:
    assert table
    assert repr(table).startswith("<EmbeddingTable 't' of torch.float32[2] in <KVStore local")


def test_checkpoints_have_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPS_CHECKPOINT_DIR", str(tmp_path))
    options: dict[str, Any] = {"init": "normal", "optimizer": "sgd", "lr": 1.0, "momentum": 0.5}
    ids = [1, 2, 3]
    with kvps.create("local") as kv:
        table = kv.embedding("t", 2, **options)
        table.push(ids, torch.ones(3, 2))
        assert kv.checkpoint() == 1
        table.push(ids, torch.ones(3, 2))
        expected = table.pull(ids)
        assert kv.restore() == 1
        assert (table.version(), len(table)) == (1, 3)
        table.push(ids, torch.ones(3, 2))
        assert torch.equal(table.pull(ids), expected)
    with kvps.create("local") as kv:
        assert kv.restore() == 1
        with pytest.raises(Mismatch, match="has dim 2, but 3 was requested"):
            kv.embedding("t", 3, **options)
        table = kv.embedding("t", 2, **options)
        table.push(ids, torch.ones(3, 2))
        assert torch.equal(table.pull(ids), expected)
    with kvps.create("local") as kv:
        other = kv.embedding("t", 2, init="zeros")
        with pytest.raises(Mismatch, match="another init"):
            kv.restore()
        assert len(other) == 0
