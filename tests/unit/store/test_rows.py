"""Rows of tables among the values that a user gives."""

import pytest
import torch

from kvps.dtypes import Spec
from kvps.errors import ConfigError, Mismatch
from kvps.store.rows import apart, have_rows, ids_of

SPECS = {"a": Spec("float32", (3,)), "t": Spec("float32", (2, 3))}
VECTOR, TABLE = torch.zeros(3), torch.eye(2, 3)


def test_rows_are_told_from_plain_values() -> None:
    assert not have_rows(("a", "t"), [VECTOR, TABLE], SPECS)
    assert have_rows(("a", "t"), [VECTOR, TABLE.to_sparse()], SPECS)
    assert have_rows(("t",), [([0], torch.ones(1, 3))], SPECS)
    assert not have_rows(("a",), "no list", SPECS)


@pytest.mark.parametrize("given", [[2**70], [-(2**70)], ["a"], [None], [[1], [1, 2]], [1.5]])
def test_numbers_of_rows_that_are_none(given: object) -> None:
    with pytest.raises(Mismatch, match="key 't': row_ids are whole numbers"):
        ids_of("t", SPECS["t"], given)


def test_rows_are_told_apart_by_their_indices() -> None:
    dense, sparse = apart(("a", "t"), [VECTOR, ([1, 1], torch.ones(2, 3))], SPECS)
    assert dense == [0]
    assert list(sparse) == [1]
    assert sparse[1].ids.tolist() == [1]
    assert sparse[1].inorder.tolist() == [[2, 2, 2]]
    with pytest.raises(ConfigError, match="2 keys need as many values, got 1"):
        apart(("a", "t"), [VECTOR], SPECS)
