"""Arrays to flat tensors, to frames, and back."""

import numpy as np
import pytest
import torch

from kvps.dtypes import DTYPES, Spec
from kvps.errors import Mismatch
from kvps.tensors import (
    NAMES,
    PRIVATE,
    TORCH,
    accumulator,
    as_tensor,
    dtype_of,
    from_frame,
    row_of,
    spec_of,
    to_frame,
)


def test_the_tables_agree() -> None:
    assert list(TORCH) == [dtype.name for dtype in DTYPES]
    for dtype in DTYPES:
        assert torch.empty(0, dtype=TORCH[dtype.name]).element_size() == dtype.itemsize
        assert NAMES[TORCH[dtype.name]] == dtype.name
        assert dtype_of(torch.empty(0, dtype=TORCH[dtype.name])) is dtype


# --- what a user gives ------------------------------------------------------------------------------


def test_arrays_and_tensors_share_their_memory() -> None:
    array, tensor = np.zeros(3, np.float32), torch.zeros(3, requires_grad=True)
    as_tensor(array)[1] = 5
    as_tensor(tensor)[1] = 5
    assert array.tolist() == tensor.tolist() == [0, 5, 0]
    assert not as_tensor(tensor).requires_grad


def test_any_stride_and_shape_will_do() -> None:
    grid = np.arange(6, dtype=np.int64).reshape(2, 3)
    assert row_of(as_tensor(grid.T)).view(-1).tolist() == [0, 3, 1, 4, 2, 5]
    assert row_of(torch.arange(6).reshape(2, 3).t()).view(-1).tolist() == [0, 3, 1, 4, 2, 5]
    assert row_of(as_tensor(np.array(7.0))).tolist() == 7.0
    assert row_of(torch.tensor(7.0)).tolist() == 7.0
    assert row_of(torch.empty(2, 0)).tolist() == [[], []]


def test_contiguous_row_is_not_copied() -> None:
    tensor = torch.zeros(2, 3)
    assert row_of(tensor).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(4, dtype=np.float32)[::-1],
        np.frombuffer(bytes(16), np.float32),
        np.zeros(4, [("a", "i1"), ("f", "f4")])["f"],
        np.frombuffer(bytearray(17), np.uint8)[1:].view(np.float32),
    ],
    ids=["negative stride", "read-only", "a field of records", "unaligned"],
)
def test_arrays_that_torch_cannot_share_are_copied(array: np.ndarray) -> None:
    tensor = as_tensor(array)
    assert tensor.tolist() == array.tolist()
    tensor += 1
    assert tensor.data_ptr() != array.ctypes.data


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1.0], "got list; wrap it with torch.as_tensor"),
        (np.float32(1), "got float32"),
        (np.zeros(2, np.complex64), "complex64 is not supported; use one of float32"),
        (np.zeros(2, ">f4"), ">f4 is not supported"),
        (np.zeros(2, bool), "bool is not supported"),
        (torch.zeros(2, dtype=torch.complex64), "torch.complex64 is not supported"),
        (torch.zeros(2, dtype=torch.bool), "torch.bool is not supported"),
        (torch.eye(2).to_sparse(), "expected a dense tensor, got torch.sparse_coo"),
    ],
)
def test_anything_else_is_refused(value: object, says: str) -> None:
    with pytest.raises(Mismatch, match=says):
        as_tensor(value)  # type: ignore[arg-type]


def test_specs() -> None:
    assert spec_of(torch.zeros(2, 3, dtype=torch.bfloat16)) == Spec("bfloat16", (2, 3))
    assert spec_of(np.zeros((), np.uint8)) == Spec("uint8", ())


# --- sums and frames --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda field: field.name)
def test_half_types_are_summed_in_float32_and_others_in_their_own(dtype) -> None:
    tensor = torch.ones(2, dtype=TORCH[dtype.name])
    expected = "float32" if dtype.kind == "half" else dtype.name
    assert dtype_of(accumulator(tensor)).name == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda field: field.name)
def test_a_frame_is_a_view_of_a_tensor_and_a_tensor_of_a_frame(dtype) -> None:
    tensor = torch.arange(5).to(TORCH[dtype.name])
    frame = to_frame(tensor[1:4])
    assert frame.nbytes == 3 * dtype.itemsize
    back = from_frame(frame, dtype.name)
    assert back.tolist() == [1, 2, 3]
    back[0] = 9
    assert tensor[1] == 9


def test_a_frame_of_nothing() -> None:
    assert to_frame(torch.empty(0)).nbytes == 0
    assert from_frame(memoryview(b""), "int16").dtype is torch.int16


def test_nobody_reads_private_memory() -> None:
    tensor = PRIVATE.empty(3, "int16")
    assert (len(tensor), tensor.dtype) == (3, torch.int16)
    assert not PRIVATE.lends("server 0", (tensor,))
    assert PRIVATE.side_by_side([tensor, tensor]) is None


def test_a_frame_that_may_not_be_written_is_copied() -> None:
    back = from_frame(memoryview(bytes(8)), "float32")
    back += 1
    assert back.tolist() == [1, 1]


def test_a_frame_at_an_odd_address_is_copied() -> None:
    for odd in (1, 2, 3):
        back = from_frame(memoryview(bytearray(b"\0" * odd + bytes([0, 0, 128, 63])))[odd:], "float32")
        assert back.data_ptr() % 4 == 0
        assert back.tolist() == [1.0]
