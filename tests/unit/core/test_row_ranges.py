"""Rows of a key on one server: neighbouring runs are one, and each row has a number here and in the key."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.core.row_ranges import RowRanges


def numbers(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


@given(cuts=st.lists(st.integers(1, 50), min_size=2, max_size=12))
def test_numbers_go_there_and_back(cuts: list[int]) -> None:
    """Every second stretch of the rows is here."""
    edges = [sum(cuts[: at + 1]) for at in range(len(cuts) // 2 * 2)]
    ranges = list(zip(edges[::2], edges[1::2], strict=True))
    own = [row for first, stop in ranges for row in range(first, stop)]
    rows = RowRanges(ranges)
    assert rows.count == len(own)
    assert rows.runs == ranges
    assert rows.has(numbers(*own))
    assert rows.local(numbers(*own)).tolist() == list(range(len(own)))
    assert rows.numbers(numbers(*range(len(own)))).tolist() == own


@pytest.mark.spec("R171")
@pytest.mark.parametrize("ids", [(0,), (1, 2), (4, 5, 6), (2, 8), (9,), (7, 8)])
def test_a_row_of_another_server_is_none_of_these(ids: tuple[int, ...]) -> None:
    assert not RowRanges([(2, 4), (6, 8)]).has(numbers(*ids))
    assert not RowRanges([(2, 4)]).has(numbers(*ids))
    assert RowRanges([(2, 4), (6, 8)]).has(numbers(2, 3, 7))


def test_neighbours_are_one_run() -> None:
    rows = RowRanges([(2, 4), (4, 6), (8, 9)])
    assert rows.runs == [(2, 6), (8, 9)]
    assert str(rows) == "2 to 5 and 8 to 8"
