"""The codecs of pseudo-gradients: the values of e3m0, what topk2bit keeps, and octets that cannot be meant."""

import pytest
import torch

from kvps.compression.codecs import decode, encode
from kvps.compression.pseudo_gradients import nibbles_of, packed_nibbles
from kvps.compression.spec import CHUNK, E3M0, GROUP, TOPK2BIT, CodecSpec, size
from kvps.errors import ProtocolError


def random(count: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * spread


def sent(code: CodecSpec, values: torch.Tensor) -> torch.Tensor:
    return decode(code, encode(code, values.clone()), torch.full_like(values, torch.nan))


# --- e3m0 -------------------------------------------------------------------------------------------


def nearest(values: torch.Tensor) -> torch.Tensor:
    """Element by element: the nearest of 0 and seven powers of two, the largest of which is next to the largest."""
    said = torch.zeros_like(values)
    for begin in range(0, len(values), GROUP):
        group = values[begin : begin + GROUP].double()
        most = group.abs().max()
        if most < 2.0**-119:
            continue
        top = 2.0 ** torch.log2(most / 1.5).floor().add(1).item()  # nearest to the largest
        levels = torch.tensor([0.0, *[top * 2.0**-n for n in range(6, -1, -1)]])
        distance = (group.abs()[:, None] - levels.double()).abs()
        # Of two that are as near the larger one is said.
        index = 7 - distance.flip(1).argmin(1)
        said[begin : begin + GROUP] = (levels[index] * group.sign()).float()
    return said


@pytest.mark.spec("R352")
@pytest.mark.parametrize("spread", [1e-30, 1e-4, 1.0, 1e30])
def test_e3m0_says_the_nearest_power_of_two(spread: float) -> None:
    values = torch.cat([random(700, 1, spread), random(256, 2, spread * 1e3), torch.zeros(300)])
    values[5] = spread * 3
    assert torch.equal(sent(CodecSpec(E3M0), values), nearest(values))


@pytest.mark.spec("R352")
def test_the_octets_of_e3m0() -> None:
    """As docs/protocol.md says: the exponent of the group, then a sign and a level for each."""
    octets = encode(CodecSpec(E3M0), torch.tensor([8.0, -4.0, 0.1, -0.01]))
    assert octets.tolist() == [130, 0x7E, 0x10]


def test_e3m0_is_an_eighth() -> None:
    assert size(CodecSpec(E3M0), 1 << 20) == (1 << 20) // 256 + (1 << 19)


def test_means_of_e3m0_have_no_bias_that_matters() -> None:
    values = torch.rand(1 << 16, generator=torch.Generator().manual_seed(3)) + 0.01
    assert sent(CodecSpec(E3M0), values).mean() == pytest.approx(float(values.mean()), rel=0.02)


@pytest.mark.parametrize("most", [0.0, 1e-45, 1e-39, 2.0**-120])
def test_a_group_of_tiny_values_is_left_whole(most: float) -> None:
    values = torch.full((300,), most)
    rest = values.clone()
    assert decode(CodecSpec(E3M0), encode(CodecSpec(E3M0), rest), values.clone()).tolist() == [0.0] * 300
    assert torch.equal(rest, values)


def test_the_largest_float_is_said_by_a_finite_number() -> None:
    largest = torch.finfo(torch.float32).max
    rest = torch.tensor([largest, -largest, 1.0])
    said = decode(CodecSpec(E3M0), encode(CodecSpec(E3M0), rest), torch.empty(3))
    assert said.isfinite().all()
    assert rest.isfinite().all()


@pytest.mark.spec("R353")
@pytest.mark.parametrize("exponent", [1, 7, 255])
def test_an_exponent_that_no_group_has_is_refused(exponent: int) -> None:
    octets = torch.tensor([exponent, 0x77], dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="e3m0 has an exponent that is neither 0 nor 8 to 254"):
        decode(CodecSpec(E3M0), octets, torch.empty(2))


# --- topk2bit ---------------------------------------------------------------------------------------


@pytest.mark.spec("R352")
def test_topk2bit_keeps_the_largest_of_each_chunk() -> None:
    values = random(2 * CHUNK + 100, 4)
    said = sent(CodecSpec(TOPK2BIT, 1 / 64), values)
    for begin, kept in ((0, 64), (CHUNK, 64), (2 * CHUNK, 2)):
        part, whole = said[begin : begin + CHUNK], values[begin : begin + CHUNK]
        largest = whole.abs().topk(kept).indices
        assert set(part.nonzero().flatten().tolist()) == set(largest.tolist())
        assert torch.equal(part[largest].sign(), whole[largest].sign())
        assert len(part[largest].abs().unique()) == 2
        assert part.abs().sum() == pytest.approx(float(whole[largest].abs().sum()), rel=0.01)


@pytest.mark.spec("R352")
def test_the_octets_of_topk2bit() -> None:
    """As docs/protocol.md says: two magnitudes, low octets of indices, their high bits, and two bits for each."""
    values = torch.zeros(CHUNK)
    values[3], values[0x123], values[0xABC] = 1.0, -4.0, 2.0
    octets = encode(CodecSpec(TOPK2BIT, 3 / CHUNK), values)
    assert octets[:4].view(torch.bfloat16).tolist() == [1.5, 4.0]
    assert octets[4:].tolist() == [0x03, 0x23, 0xBC, 0x01, 0xA0, 0b00_11_00_00]
    assert values[3] == -0.5
    assert values[0xABC] == 0.5


def test_topk2bit_is_a_141th() -> None:
    assert 4 * CHUNK / size(CodecSpec(TOPK2BIT, 1 / 64), CHUNK) > 141


def test_equal_values_have_one_magnitude() -> None:
    values = torch.full((8,), -2.0)
    assert sent(CodecSpec(TOPK2BIT, 1.0), values).tolist() == [-2.0] * 8


@pytest.mark.spec("R353")
@pytest.mark.parametrize("indices", [(1, 1), (3, 1), (1, 5)])
def test_indices_that_cannot_be_meant_are_refused(indices: tuple[int, int]) -> None:
    octets = torch.tensor([0, 0, 0, 0, *indices, 0, 0], dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="topk2bit names elements out of order, or beyond the 5"):
        decode(CodecSpec(TOPK2BIT, 0.4), octets, torch.empty(5))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_nibbles_are_packed_and_read(count: int) -> None:
    numbers = torch.arange(count, dtype=torch.int32) + 9
    packed = packed_nibbles(numbers)
    assert len(packed) == -(-count // 2)
    assert nibbles_of(packed, count).tolist() == numbers.tolist()
