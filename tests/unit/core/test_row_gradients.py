"""Sparse gradients: parts, dense sums, sums of their own, and what users give put in order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.core.row_gradients import RowGradient, added, coalesce


def sparse(rows: dict[int, list[float]], count: int, dtype: torch.dtype = torch.float32) -> RowGradient:
    width = len(next(iter(rows.values()), [0.0, 0.0]))
    ids = torch.tensor(sorted(rows), dtype=torch.int64)
    values = torch.tensor([rows[row] for row in sorted(rows)], dtype=dtype).view(-1, width)
    return RowGradient(ids, values, count)


def dense(row_gradient: RowGradient) -> torch.Tensor:
    out = torch.zeros(len(row_gradient) // row_gradient.width, row_gradient.width, dtype=row_gradient.dtype)
    return out.index_copy_(0, row_gradient.ids, row_gradient.rows).view(-1)


def test_a_part_numbers_its_rows_from_its_own_first() -> None:
    part = sparse({0: [1, 2], 3: [3, 4], 4: [5, 6]}, 5).part(4, 8)
    assert (len(part), part.ids.tolist(), part.joined().tolist()) == (4, [1], [3, 4])


def test_the_whole_is_a_part() -> None:
    row_gradient = sparse({1: [1.0]}, 3)
    assert row_gradient.part(0, 3).rows.data_ptr() == row_gradient.rows.data_ptr()


@given(st.data())
def test_any_range_of_elements_is_added_to(data: st.DataObject) -> None:
    width, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    ids = data.draw(st.sets(st.integers(0, count - 1)))
    row_gradient = sparse({row: [float(row * width + at + 1) for at in range(width)] for row in ids}, count)
    if not ids:
        row_gradient = RowGradient(row_gradient.ids, row_gradient.rows[:, :1].expand(0, width), count)
    start = data.draw(st.integers(0, count * width))
    stop = data.draw(st.integers(start, count * width))
    out = torch.full((stop - start,), 0.5)
    row_gradient.add_to(out, start, stop)
    assert torch.equal(out, dense(row_gradient)[start:stop] + 0.5)


@pytest.mark.parametrize("divisor", [1, 4])
def test_sums_name_each_row_once(divisor: int) -> None:
    row_gradient, two = sparse({0: [1, 2], 3: [3, 4]}, 5), sparse({3: [5, 6], 4: [7, 8]}, 5)
    total = added([row_gradient, two], divisor)
    assert total.ids.tolist() == [0, 3, 4]
    assert torch.equal(dense(total), (dense(row_gradient) + dense(two)) / divisor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_sums_are_taken_in_order(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(37)
    parts = []
    for scale in (1e6, 1.0, 1e-3):
        ids = torch.randperm(60, generator=generator)[:40].sort().values
        parts.append(RowGradient(ids, (torch.randn(40, 5, generator=generator) * scale).to(dtype), 60))
    total = added(parts)
    expected = torch.zeros(60, 5, dtype=total.dtype)
    for part in parts:
        expected.index_add_(0, part.ids, part.rows.to(total.dtype))
    assert torch.equal(total.rows, expected[total.ids])
    assert total.dtype is (torch.float32 if dtype is torch.bfloat16 else dtype)
    assert not len(added([RowGradient(part.ids[:0], part.rows[:0], 60) for part in parts]).ids)


def test_a_sum_is_in_memory_of_its_own() -> None:
    row_gradient = sparse({0: [1.0]}, 2)
    added([row_gradient]).rows.zero_()
    assert row_gradient.rows.tolist() == [[1.0]]


def test_halves_are_summed_in_float32() -> None:
    ones = [sparse({0: [2048.0]}, 1, torch.float16), *[sparse({0: [1.0]}, 1, torch.float16)] * 2]
    total = added(ones)
    assert (total.dtype, total.rows.tolist()) == (torch.float32, [[2050.0]])
    assert added(ones[:1]).rows.dtype is torch.float32
    ids, _, rows = coalesce(torch.tensor([0, 0, 0]), torch.cat([item.rows for item in ones]))
    assert (ids.tolist(), rows.dtype, rows.tolist()) == ([0], torch.float16, [[2050.0]])


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-9, 9)), max_size=12))
def test_duplicates_are_summed_and_rows_are_sorted(given_rows: list[tuple[int, int]]) -> None:
    ids = torch.tensor([item for item, _ in given_rows], dtype=torch.int64)
    rows = torch.tensor([[float(value)] for _, value in given_rows]).view(-1, 1)
    unique, places, summed = coalesce(ids, rows)
    summed = summed[places]
    assert unique.tolist() == sorted({item for item, _ in given_rows})
    for row, value in zip(unique.tolist(), summed.tolist(), strict=True):
        assert value == [sum(value for item, value in given_rows if item == row)]
