"""The table of codecs: what a code may say, and how many octets follow from it."""

import math

import pytest

from kvps.compression.spec import (
    BF16,
    BIT1,
    BIT2,
    CODECS,
    E3M0,
    FP16,
    INT8,
    RANDOMK,
    TABLE,
    TOPK,
    TOPK2BIT,
    CodecSpec,
    check,
    kept,
    seeded,
    size,
)
from kvps.errors import ProtocolError


@pytest.mark.parametrize(
    ("code", "count", "octets"),
    [
        (CodecSpec(FP16), 1_000_001, 2_000_002),
        (CodecSpec(BF16), 3, 6),
        (CodecSpec(BIT1, 0.5), 8, 1),
        (CodecSpec(BIT1, 0.5), 9, 2),
        (CodecSpec(BIT2, 0.5), 8, 2),
        (CodecSpec(BIT2, 0.5), 9, 4),
        (CodecSpec(INT8), 256, 260),
        (CodecSpec(INT8), 257, 265),
        (CodecSpec(TOPK, 0.01), 1, 8),
        (CodecSpec(TOPK, 0.01), 101, 16),
        (CodecSpec(RANDOMK, 0.01), 101, 8),
        (CodecSpec(RANDOMK, 1.0), 7, 28),
        (CodecSpec(E3M0), 256, 129),
        (CodecSpec(E3M0), 257, 131),
        (CodecSpec(TOPK2BIT, 1 / 64), 4096, 116),
        (CodecSpec(TOPK2BIT, 1 / 64), 4097, 123),
    ],
)
def test_octets_of_so_many_elements(code: CodecSpec, count: int, octets: int) -> None:
    assert size(code, count) == octets


def test_at_least_one_element_is_kept_and_no_more_than_there_are() -> None:
    assert kept(CodecSpec(TOPK, 1e-9), 5) == 1
    assert kept(CodecSpec(TOPK, 1.0), 5) == 5
    assert kept(CodecSpec(TOPK, 0.3), 10) == math.ceil(0.3 * 10)


@pytest.mark.parametrize(
    ("name", "ratio"), [("2bit", 1 / 15), ("1bit", 1 / 30), ("int8", 0.27), ("fp16", 0.5), ("bf16", 0.5)]
)
def test_how_much_less_than_float32(name: str, ratio: float) -> None:
    assert size(CodecSpec(CODECS[name], 0.5), 98_304) / (4 * 98_304) <= ratio


@pytest.mark.spec("R153")
@pytest.mark.parametrize(
    ("code", "match"),
    [
        (CodecSpec(0), "no codec has number 0"),
        (CodecSpec(10), "no codec has number 10; there are 1 to 9"),
        (CodecSpec(FP16, scale=0.0), "scale 0.0"),
        (CodecSpec(BIT1, 0.5, -1.0), "scale -1.0"),
        (CodecSpec(BIT1, math.nan), "1bit with number nan"),
        (CodecSpec(BIT1, 0.5, math.inf), "scale inf"),
        (CodecSpec(BIT2, 0.0), "2bit with number 0.0 and scale 1.0"),
        (CodecSpec(BIT2, -0.5), "2bit with number -0.5"),
        (CodecSpec(BIT2, 1e300), "2bit with number 1e"),
        (CodecSpec(BIT2, 1e30, 1e30), "2bit with number 1e"),
        (CodecSpec(BIT2, 1e-30, 1e-30), "2bit with number 1e-30 and scale 1e-30"),
        (CodecSpec(BIT1, 0.5, 1e300), "1bit with number 0.5 and scale 1e"),
        (CodecSpec(BIT1, 0.5, 1e-40), "scale 1e-40"),
        (CodecSpec(TOPK2BIT, 0.0), "topk2bit needs a ratio"),
        (CodecSpec(TOPK, 0.0), "topk needs a ratio above 0 and up to 1, not 0.0"),
        (CodecSpec(RANDOMK, 1.5), "randomk needs a ratio"),
    ],
)
def test_invalid_codec_is_refused(code: CodecSpec, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        check(code)


@pytest.mark.parametrize("name", CODECS)
def test_valid_codec_passes_the_check(name: str) -> None:
    code = CodecSpec(CODECS[name], 0.5, 0.1, 7)
    assert check(code) is code
    assert TABLE[code.codec].name == name


def test_seeds_do_not_leave_their_range() -> None:
    assert seeded(CodecSpec(RANDOMK, 0.1, 1.0, 2**63 - 1), 3).seed == 2


def test_a_threshold_of_1bit_may_be_anything_finite() -> None:
    for threshold in (-1.0, 0.0, 0.5):
        check(CodecSpec(BIT1, threshold))
