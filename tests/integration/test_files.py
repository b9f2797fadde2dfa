"""Every file that kvps writes, read back by safetensors itself."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kvps
from kvps.checkpoint import reports
from kvps.errors import StorageError

COUNTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 100, 1001)
DIMS = (1, 3, 8)
DTYPES = ("float32", "float16", "bfloat16", "float64")


def ids_of(count: int) -> torch.Tensor:
    """Ids of which each number of servers has some, and of a few ids some server has none."""
    return torch.arange(count) * 2**40 + 5


def check(path: Path, table: kvps.EmbeddingTable, count: int, states: set[str]) -> None:
    """Compare a file with the rows of its table."""
    found = load_file(path)
    assert found.keys() == {"ids", "versions", "rows"} | {f"state.{state}" for state in states}
    order = found["ids"].argsort()
    assert torch.equal(found["ids"][order], ids_of(count))
    assert found["versions"].tolist() == [1] * count
    for name, column in found.items():
        shape = (count,) if name in ("ids", "versions") else (count, table.dim)
        assert column.shape == shape, (name, column.shape)
    assert found["rows"].dtype == table.dtype
    assert torch.equal(found["rows"][order], table.pull(ids_of(count)))


def tables(kv: Any) -> Iterator[tuple[kvps.EmbeddingTable, int]]:
    for number, count in enumerate(COUNTS):
        for dim in DIMS:
            dtype = DTYPES[(number + dim) % len(DTYPES)]
            name = f"{count}-{dim}"
            table = kv.embedding(name, dim, dtype=dtype, optimizer="adam", lr=0.5)
            if count:
                table.push(ids_of(count), torch.ones(count, dim))
            yield table, count


def export_all(kv: Any, folder: Path) -> None:
    for table, count in tables(kv):
        path = folder / f"{table.name}.safetensors"
        assert table.export(path) == count
        check(path, table, count, set())
        assert table.export(path, with_state=True) == count
        check(path, table, count, {"exp_avg", "exp_avg_sq"})
        assert table.changed_since(0, path) == count
        check(path, table, count, set())
        assert table.changed_since(1, path) == 0
        assert load_file(path)["rows"].shape == (0, table.dim)


def test_tables_of_any_number_of_rows_are_exported_from_servers(tmp_path: Path) -> None:
    """Of few rows some servers have none, and the first one of one row may be such a server."""
    with kvps.LocalCluster(workers=1, servers=3) as cluster:
        cluster.run(lambda _: export_all(kvps.create("dist_sync"), tmp_path))


def test_tables_of_any_number_of_rows_are_exported_from_a_process(tmp_path: Path) -> None:
    with kvps.create("local") as kv:
        export_all(kv, tmp_path)


KEYS = {
    "scalar": torch.tensor(2.0),
    "none": torch.ones(0),
    "none of three": torch.ones(0, 3),
    "half": torch.ones(7, dtype=torch.float16),
    "bf16": torch.ones(3, 3, dtype=torch.bfloat16),
    "a/b": torch.ones(5, dtype=torch.float64),
    "large": torch.ones(1001),
}


def some_keys(kv: Any) -> list[str]:
    """Initialise and push keys of all kinds; return their names."""
    names = list(KEYS)
    kv.init(names, list(KEYS.values()))
    kv.set_optimizer("adam", lr=0.5)
    kv.push(names, list(KEYS.values()))
    return names


def save_and_load(kv: Any, folder: Path) -> None:
    path = folder / "states"
    kv.save_optimizer_states(str(path))
    assert load_file(path) == {}
    names = some_keys(kv)
    kv.pull(names)
    kv.save_optimizer_states(str(path))
    found = load_file(path)
    for name, value in KEYS.items():
        if value.numel():
            assert found[f"{name}/exp_avg"].numel() == value.numel()
    before = kv.optimizer_states()
    kv.load_optimizer_states(str(path))
    after = kv.optimizer_states()
    assert before.keys() == after.keys()
    for key, (step, rows) in before.items():
        assert step == after[key][0] == 1
        assert all(torch.equal(row, after[key][1][name]) for name, row in rows.items())


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_states_of_keys_of_any_size_are_saved(kind: str, tmp_path: Path) -> None:
    def work(_: int) -> None:
        with kvps.create(kind) as kv:
            kv.set_optimizer("adam", lr=0.5)
            save_and_load(kv, tmp_path)

    with kvps.LocalCluster(workers=1, servers=2) as cluster:
        cluster.run(work)


def test_images_and_what_is_exported_of_them_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image of a local store is that of one server."""
    folder = tmp_path / "checkpoints"
    monkeypatch.setenv("KVPS_CHECKPOINT_DIR", str(folder))
    with kvps.create("local", name="model") as kv:
        names = some_keys(kv)
        values = dict(zip(names, kv.pull(names), strict=True))
        pushed = [(table.name, table.pull(ids_of(count)), count) for table, count in tables(kv)]
        kv.checkpoint("best")
        kv.push(names, list(KEYS.values()))
        kv.restore("best")
        for name, value in values.items():
            assert torch.equal(kv.pull(name), value), name
        for (_, rows, count), (table, _) in zip(pushed, tables_again(kv), strict=True):
            assert torch.equal(table.pull(ids_of(count)), rows)
            assert len(table) == count
    (image,) = folder.rglob("*.safetensors")
    assert load_file(image)
    out = tmp_path / "model.safetensors"
    assert reports.export([str(folder)], str(out), None, "best", "model", io.StringIO()) == 0
    found = load_file(out)
    assert found.keys() == KEYS.keys() | {
        f"{name}/{part}" for name, _, _ in pushed for part in ("ids", "rows", "recipe")
    }
    assert all(torch.equal(found[name], value) for name, value in values.items())


def tables_again(kv: Any) -> Iterator[tuple[kvps.EmbeddingTable, int]]:
    """The same tables, without a push."""
    for number, count in enumerate(COUNTS):
        for dim in DIMS:
            dtype = DTYPES[(number + dim) % len(DTYPES)]
            yield kv.embedding(f"{count}-{dim}", dim, dtype=dtype, optimizer="adam", lr=0.5), count


def test_states_and_rests_of_a_trainer_are_read(tmp_path: Path) -> None:
    def work(_: int) -> None:
        params = {"w": torch.ones(100, requires_grad=True), "b": torch.ones(3, requires_grad=True)}
        trainer = kvps.Trainer(
            params,
            "adam",
            {"lr": 0.5},
            kvstore="dist_sync",
            compression_params={"type": "2bit", "threshold": 0.5, "min_bytes": 0},
        )
        for param in params.values():
            param.grad = torch.full_like(param, 0.25)
        trainer.step(1)
        path = tmp_path / "trainer"
        trainer.save_states(str(path))
        assert load_file(path)["w/exp_avg"].numel() == 100
        rests = load_file(f"{path}.rests-0")
        assert {name: item.numel() for name, item in rests.items()} == {"w": 100, "b": 3}
        trainer.load_states(str(path))

    with kvps.LocalCluster(workers=1, servers=2) as cluster:
        cluster.run(work)


def test_a_name_that_makes_a_file_unreadable_is_refused(tmp_path: Path) -> None:
    """safetensors writes such a file, and cannot read it."""

    def work(_: int) -> None:
        name, compression = "__metadata__", {"type": "1bit", "min_bytes": 0}
        params = {name: torch.ones(100, requires_grad=True)}
        trainer = kvps.Trainer(params, "sgd", {"lr": 0.5}, "dist_sync", compression)
        params[name].grad = torch.ones(100)
        trainer.step(1)
        with pytest.raises(StorageError, match="'__metadata__'"):
            trainer.save_states(str(tmp_path / "states"))

    with kvps.LocalCluster(workers=1, servers=1) as cluster:
        cluster.run(work)
