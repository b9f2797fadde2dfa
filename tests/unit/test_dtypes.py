"""Element types, and which shapes a tensor may have."""

import pytest

from kvps.dtypes import BY_ID, BY_NAME, BYTES_MAX, DIM_MAX, DTYPES, NDIM_MAX, Spec, summed_in
from kvps.errors import Mismatch


@pytest.mark.spec("R11")
def test_the_table_of_element_types_is_for_ever() -> None:
    assert [(dtype.id, dtype.name, dtype.itemsize, dtype.kind) for dtype in DTYPES] == [
        (1, "float32", 4, "float"),
        (2, "float64", 8, "float"),
        (3, "float16", 2, "half"),
        (4, "bfloat16", 2, "half"),
        (5, "int8", 1, "int"),
        (6, "int16", 2, "int"),
        (7, "int32", 4, "int"),
        (8, "int64", 8, "int"),
        (9, "uint8", 1, "int"),
    ]
    assert [BY_ID[dtype.id] for dtype in DTYPES] == [BY_NAME[dtype.name] for dtype in DTYPES]


@pytest.mark.parametrize(
    ("spec", "count", "nbytes", "text"),
    [
        (Spec("float32", ()), 1, 4, "float32[]"),
        (Spec("float64", (2, 3)), 6, 48, "float64[2,3]"),
        (Spec("bfloat16", (5, 0, 7)), 0, 0, "bfloat16[5,0,7]"),
        (Spec("int8", (1,) * NDIM_MAX), 1, 1, f"int8[{','.join('1' * NDIM_MAX)}]"),
        (Spec("float32", (DIM_MAX,)), DIM_MAX, BYTES_MAX, f"float32[{DIM_MAX}]"),
    ],
)
def test_a_spec_knows_its_size(spec: Spec, count: int, nbytes: int, text: str) -> None:
    assert (spec.count, spec.nbytes, str(spec)) == (count, nbytes, text)


@pytest.mark.spec("R12")
@pytest.mark.parametrize(
    ("dtype", "shape", "match"),
    [
        ("complex64", (2,), "complex64 is not supported; use one of float32, float64"),
        ("O", (2,), "not supported"),
        ("", (2,), "not supported"),
        ("float32", (1,) * 17, "at most 16 dimensions"),
        ("float32", (-1,), r"shape \(-1,\) is outside"),
        ("float32", (2, -3), "outside the limits"),
        ("uint8", (DIM_MAX + 1,), "0 to 1099511627776 elements"),
        ("float64", (DIM_MAX,), "over 4398046511104 bytes"),
        ("uint8", (2**32, 2**32), "over 4398046511104 bytes"),
        ("float32", (DIM_MAX,) * 16, "over 4398046511104 bytes"),
    ],
)
def test_invalid_spec_is_refused(dtype: str, shape: tuple[int, ...], match: str) -> None:
    with pytest.raises(Mismatch, match=match):
        Spec(dtype, shape)


@pytest.mark.spec("R12")
@pytest.mark.parametrize("dtype", BY_NAME)
def test_half_types_are_added_up_in_float32_and_others_in_their_own(dtype: str) -> None:
    assert summed_in(dtype) == ("float32" if dtype in ("float16", "bfloat16") else dtype)


def test_a_huge_shape_makes_no_huge_text() -> None:
    with pytest.raises(Mismatch) as caught:
        Spec("float32", (2**60,) * 8192)
    assert len(str(caught.value)) < 250
