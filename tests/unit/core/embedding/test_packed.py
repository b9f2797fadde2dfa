"""Rows of pulls as int8."""

import pytest
import torch

import kvps
from kvps.core.embedding.packed import packed, unpacked
from kvps.errors import ConfigError


@pytest.mark.spec("R531")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_elements_are_off_by_half_a_step_of_their_row_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    rows = (torch.randn(200, 7) * torch.logspace(-6, 3, 200)[:, None]).to(dtype)
    rows[3], rows[5, 2], rows[6, 1] = 0.0, torch.nan, -torch.inf
    octets = packed(rows)
    assert (octets.shape, octets.dtype) == ((200, 11), torch.uint8)
    found = unpacked(octets, dtype)
    assert found.dtype == dtype
    assert found[[5, 6]].isnan().all()
    assert not found[3].any()
    finite = [at for at in range(200) if at not in (5, 6)]
    scales = rows[finite].float().abs().amax(1, keepdim=True) / 127
    room = 0.5001 + (0.6 if dtype == torch.bfloat16 else 0.0)  # which rounds once more
    assert ((found[finite].float() - rows[finite].float()).abs() <= room * scales).all()


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("dim", [1, 4, 5])
def test_few_rows_of_any_length_are_unpacked(count: int, dim: int) -> None:
    rows = torch.randint(-127, 128, (count, dim)).float()
    rows[:, 0] = 127.0
    assert torch.equal(unpacked(packed(rows), torch.float32), rows)


def test_a_table_is_pulled_as_int8_and_keeps_its_rows() -> None:
    kv = kvps.create("local")
    given = {"init": ("normal", 0.5), "optimizer": "sgd", "lr": 1.0, "seed": 3}
    table, other = kv.embedding("t", 8, pull_dtype="int8", **given), kv.embedding("u", 8, **given)
    ids = torch.arange(50)
    assert torch.equal(table.pull(ids), unpacked(packed(other.pull(ids)), torch.float32))
    for some in (table, other):
        some.push(ids, torch.ones(50, 8))
    exported = [torch.cat([rows for _, rows in some.export()]) for some in (table, other)]
    assert torch.equal(*exported)
    both = kv.pull_tables({table: ids, other: ids})
    assert torch.equal(both[table], both[other])  # not all of them say so
    assert not torch.equal(table.pull(ids), both[table])
    with pytest.raises(ConfigError, match="pull_dtype='int4': give 'int8'"):
        kv.embedding("v", 8, pull_dtype="int4")
