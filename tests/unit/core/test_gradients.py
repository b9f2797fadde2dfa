"""Strips: elements in one piece of memory or in several, and sums of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.core.gradients import DenseGradient, GradientSum
from kvps.core.row_gradients import RowGradient
from kvps.dtypes import DTYPES, DType
from kvps.tensors import SMALL_BYTES, TORCH, to_frame


def strip(*pieces: list[float], dtype: torch.dtype = torch.float32) -> DenseGradient:
    return DenseGradient([torch.tensor(piece, dtype=dtype) for piece in pieces])


def test_contiguous_gradient_is_not_copied() -> None:
    piece = torch.arange(4.0)
    dense_gradient = DenseGradient([piece])
    assert dense_gradient.joined() is piece
    assert dense_gradient.within(0, 4) is piece
    assert dense_gradient.part(0, 4) is dense_gradient
    part = dense_gradient.part(1, 3)
    assert part.joined().data_ptr() == piece[1:].data_ptr()
    assert part.edges == (2,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_added_up_in_float32(dtype: torch.dtype) -> None:
    # big + 1 is big in this type.
    big = 2048.0 if dtype is torch.float16 else 256.0
    parts = [strip([big], [big], dtype=dtype), strip([1, 1], dtype=dtype)]
    total = GradientSum((*parts, parts[1]))
    assert total.whole().dtype is torch.float32
    assert total.whole().tolist() == [big + 2] * 2
    begun = GradientSum((DenseGradient([torch.full((2,), big)]), parts[1]))  # what is added up so far is wide
    assert begun.whole().tolist() == [big + 1] * 2


def test_a_sum_is_taken_in_the_order_of_its_parts() -> None:
    values = ([1e8], [1.0], [-1e8])
    assert GradientSum(tuple(strip(value) for value in values)).whole().tolist() == [0.0]
    assert GradientSum(tuple(strip(item) for item in (*values[::2], values[1]))).whole().tolist() == [1.0]


def test_the_sum_of_one_is_a_copy() -> None:
    piece = torch.arange(3.0)
    total = GradientSum((DenseGradient([piece]),)).whole()
    total.fill_(7)
    assert piece.tolist() == [0, 1, 2]


CUTS = st.lists(st.integers(1, 19), max_size=4, unique=True).map(sorted)


@given(cuts=st.lists(CUTS, min_size=1, max_size=4), data=st.data())
def test_where_the_edges_are_makes_no_difference(cuts: list[list[int]], data: st.DataObject) -> None:
    """A sum is that of the elements, in any range, cut anywhere, and its parts are only read."""
    rows = [torch.arange(20) * 10**index for index in range(len(cuts))]
    strips = [DenseGradient(torch.tensor_split(row, at)) for row, at in zip(rows, cuts, strict=True)]
    expected = torch.stack(rows).sum(0)
    start = data.draw(st.integers(0, 19))
    stop = data.draw(st.integers(start + 1, 20))
    out = torch.full((22,), -1)
    GradientSum(tuple(strips)).into(out[1 : 1 + stop - start], start, stop)
    read = GradientSum(tuple(strips)).read(torch.empty(20, dtype=torch.int64), start, stop)
    assert read.tolist() == expected[start:stop].tolist()
    assert out.tolist() == [-1, *expected[start:stop].tolist(), *[-1] * (21 - stop + start)]
    at = data.draw(st.integers(1, 19))
    left, right = GradientSum(tuple(strips)).cut(at)
    assert (len(left), len(right)) == (at, 20 - at)
    assert left.whole().tolist() + right.whole().tolist() == expected.tolist()
    assert all(row.equal(torch.arange(20) * 10**index) for index, row in enumerate(rows))


def received(*tensors: torch.Tensor, dtype: DType) -> list[DenseGradient]:
    return [DenseGradient.of([memoryview(bytes(to_frame(tensor)))], dtype.id) for tensor in tensors]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES if dtype.kind != "half"], ids=lambda dtype: dtype.name
)
def test_small_sums_have_the_bits_of_torch(dtype: DType, count: int) -> None:
    made = torch.Generator().manual_seed(count)
    tensors = [(100 * torch.randn(7, generator=made)).to(TORCH[dtype.name]) for _ in range(count)]
    expected, out = torch.empty_like(tensors[0]), torch.empty_like(tensors[0])
    GradientSum(tuple([DenseGradient([tensor]) for tensor in tensors])).into(expected, 0, 7)
    assert GradientSum(tuple(received(*tensors, dtype=dtype))).into_frame(to_frame(out), dtype.name)
    assert torch.equal(out, expected)


def test_other_sums_are_left_to_torch() -> None:
    floats = DTYPES[0]
    tensor, out = torch.randn(6), torch.zeros(6)
    (item,) = received(tensor, dtype=floats)
    assert not GradientSum((item,), divisor=2).into_frame(to_frame(out), "float32")
    assert not GradientSum((item, DenseGradient([tensor]))).into_frame(to_frame(out), "float32")
    assert not GradientSum((item,)).into_frame(to_frame(out), "int32"), "another type"
    assert not GradientSum((RowGradient(torch.tensor([1]), torch.ones(1, 2), 6),)).into_frame(
        to_frame(out), "float32"
    )
    assert item.part(0, 6) is item
    assert item.joined().equal(tensor)
    assert not GradientSum((item,)).into_frame(to_frame(out), "float32"), (
        "its tensor may have been written to"
    )
    assert out.tolist() == [0] * 6


def test_large_gradients_and_halves_are_tensors_at_once() -> None:
    large = torch.randn(SMALL_BYTES // 4 + 1)
    for tensor, dtype in ((large, DTYPES[0]), (torch.randn(4).half(), DTYPES[2]), (large[:0], DTYPES[0])):
        (item,) = received(tensor, dtype=dtype)
        assert item.frame is None
        assert item.joined().equal(tensor)
