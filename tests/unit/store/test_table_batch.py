"""Several tables in one call: what is pulled and pushed, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch

import kvps
from kvps.errors import ConfigError, KeyNotFound, Mismatch


@pytest.fixture
def kv() -> Any:
    with kvps.create("local") as store:
        yield store


@pytest.fixture
def tables(kv: Any) -> list[kvps.EmbeddingTable]:
    kinds = [("float32", 3), ("bfloat16", 2), ("float32", 5), ("float64", 3), ("float32", 3)]
    return [
        kv.embedding(f"t{at}", dim, init=("normal", 1.0), optimizer="sgd", lr=1.0, dtype=dtype)
        for at, (dtype, dim) in enumerate(kinds)
    ]


def test_several_tables_are_pulled_and_pushed_as_each_by_itself(
    kv: Any, tables: list[kvps.EmbeddingTable]
) -> None:
    ids = [torch.randint(-5, 5, (4, at + 1)) * 2**55 for at in range(5)]
    alone = [table.pull(some) for table, some in zip(tables, ids, strict=True)]
    found = kv.pull_tables({table.name: some for table, some in zip(tables, ids, strict=True)})
    assert list(found) == ["t0", "t1", "t2", "t3", "t4"]
    for rows, expected in zip(found.values(), alone, strict=True):
        assert rows.dtype == expected.dtype
        assert torch.equal(rows, expected)
    gradients = [torch.randint(-3, 3, rows.shape).to(rows.dtype) for rows in alone]
    kv.push_tables({table: pair for table, *pair in zip(tables, ids, gradients, strict=True)})
    for table, some, rows, gradient in zip(tables, ids, alone, gradients, strict=True):
        flat = some.reshape(-1)
        same = (flat[:, None] == flat[None, :]).to(gradient.dtype)
        total = (same @ gradient.reshape(-1, table.dim)).view(rows.shape)
        found = table.pull(some)
        if table.dtype == torch.bfloat16:  # rounded by chance: off by less than one of the last of its 8 bits
            torch.testing.assert_close(found, rows - total, rtol=2**-7, atol=0.0)
        else:
            assert torch.equal(found, rows - total)
        assert table.version() == 1


def test_pushes_of_several_tables_are_waited_for_through_one_handle(
    kv: Any, tables: list[kvps.EmbeddingTable]
) -> None:
    handle = kv.push_tables({table: ([7], torch.ones(1, table.dim)) for table in tables}, async_op=True)
    handle.wait()
    assert handle.done()
    assert [len(table) for table in tables] == [1] * 5
    assert kv.pull_tables({}) == {}
    assert kv.push_tables({}) is None
    assert kv.push_tables({}, async_op=True).wait() is None
    assert [table.version() for table in tables] == [1] * 5
    kv.push_tables({table: ([], []) for table in tables})
    assert [table.version() for table in tables] == [2] * 5
    assert kv.pull_tables({tables[0]: np.array(2**63 + 1, np.uint64)})[tables[0]].shape == (3,)


def test_calls_that_name_no_tables_of_the_store_are_refused(
    kv: Any, tables: list[kvps.EmbeddingTable]
) -> None:
    good = ([1], torch.ones(1, 3))
    with kvps.create("local", name="other") as other:
        foreign = other.embedding("t0", 3)
        with pytest.raises(ConfigError, match="is not a table of store 'local'"):
            kv.push_tables({tables[0]: good, foreign: good})
    with pytest.raises(
        KeyNotFound, match=r"no table 'nobody' in this process; call embedding\('nobody', \.\.\.\)"
    ):
        kv.push_tables({tables[0]: good, "nobody": good})
    with pytest.raises(ConfigError, match="or by its name, not by a int"):
        kv.pull_tables({7: [1]})
    with pytest.raises(Mismatch, match="table 't0' is named twice"):
        kv.push_tables({tables[0]: good, "t0": good})
    for bad, error in [
        (([1.5], torch.ones(1, 3)), "ids are whole numbers"),
        (([1], torch.ones(1, 2)), r"table 't4': gradients of ids \[1\]"),
        (([1], torch.ones(1, 3, dtype=torch.int64)), "floating point"),
        (torch.ones(2, 3), "table 't4': give a pair of ids and gradients, not a Tensor"),
        (([1],), "give a pair"),
    ]:
        with pytest.raises(Mismatch, match=error):
            kv.push_tables({tables[0]: good, tables[4]: bad})
    assert [table.version() for table in tables] == [0] * 5
