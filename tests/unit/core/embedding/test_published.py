"""A table among the tensors of a version: rows by id, and no table from tensors that are none."""

import numpy as np
import pytest
import torch

from kvps.core.embedding.published import ServedTable, names_of, tensors_of
from kvps.core.embedding.spec import recipe_of
from kvps.errors import ProtocolError

IDS = [2**40, -3, 17, 5]


def tensors(dtype: str = "float32", twice: bool = False) -> dict[str, torch.Tensor]:
    recipe = recipe_of("t", 6, ("normal", 0.5), "sgd", 1, None, dtype, 7)
    rows = torch.arange(len(IDS) * 6).reshape(-1, 6).to(getattr(torch, dtype))
    blocks = [(torch.tensor(IDS[:3]), rows[:3]), (torch.tensor(IDS[3:]), rows[3:])]
    blocks += [(torch.tensor(IDS[:1]), -rows[3:])] * twice
    return tensors_of("t", blocks, recipe)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_ids_have_their_rows_and_others_what_a_pull_gives(dtype: str) -> None:
    recipe = recipe_of("t", 6, ("normal", 0.5), "sgd", 1, None, dtype, 7)
    given = tensors(dtype)
    wanted = np.array([5, 99, 2**40, 5, -4, 2**62], np.int64)
    found = ServedTable("t", given).lookup(wanted)
    fresh = recipe.first_rows(wanted)
    for place, row in ((0, 3), (2, 0), (3, 3)):
        assert torch.equal(found[place], given["t/rows"][row])
    for place in (1, 4, 5):
        assert torch.equal(found[place], fresh[place])
    none = tensors_of("t", [], recipe)
    assert torch.equal(ServedTable("t", none).lookup(wanted), fresh)
    as_published = {**given, "t/rows": given["t/rows"].to(torch.bfloat16)}
    assert torch.equal(ServedTable("t", as_published).lookup(wanted[1:2]), fresh[1:2].bfloat16())
    assert not len(ServedTable("t", given).lookup(wanted[:0]))


def test_a_row_that_was_made_again_has_its_last_value() -> None:
    found = ServedTable("t", tensors(twice=True)).lookup(np.array([2**40], np.int64))
    assert torch.equal(found[0], -tensors()["t/rows"][3])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("t/recipe", torch.tensor([1, 2, 3], dtype=torch.uint8)),
        ("t/recipe", torch.frombuffer(bytearray(b'{"init": ["cosine", 1], "seed": 1}'), dtype=torch.uint8)),
        ("t/recipe", torch.frombuffer(bytearray(b"[1]"), dtype=torch.uint8)),
        ("t/ids", torch.arange(3)),
        ("t/ids", torch.arange(4.0)),
        ("t/rows", torch.zeros(4)),
    ],
)
def test_tensors_that_are_no_table_are_refused(name: str, value: torch.Tensor) -> None:
    assert name in names_of("t")
    with pytest.raises(ProtocolError, match="table 't' cannot be read"):
        ServedTable("t", tensors() | {name: value})
