"""The arithmetic of compression: nothing is lost, and MXNet's rules hold to the bit."""

import numpy as np
import pytest
import torch

from kvps.compression import codecs
from kvps.compression.codecs import decode, drawn, encode
from kvps.compression.spec import (
    BF16,
    BIT1,
    BIT2,
    BLOCK,
    CODECS,
    E3M0,
    FP16,
    INT8,
    RANDOMK,
    TOPK,
    TOPK2BIT,
    CodecSpec,
    size,
)
from kvps.errors import ProtocolError

COUNTS = [1, 7, 8, 255, 256, 257, 1000, BLOCK, BLOCK + 1, 3 * BLOCK + 300]
CODES = [
    CodecSpec(FP16),
    CodecSpec(BF16),
    CodecSpec(BIT1, 0.0),
    CodecSpec(BIT1, 0.5, 0.1),
    CodecSpec(BIT2, 0.5),
    CodecSpec(BIT2, 0.5, 0.1),
    CodecSpec(INT8),
    CodecSpec(TOPK, 0.1),
    CodecSpec(RANDOMK, 0.1, 1.0, 5),
    CodecSpec(E3M0),
    CodecSpec(TOPK2BIT, 0.1),
]


def names_of(code: CodecSpec) -> str:
    return f"{next(name for name, item in CODECS.items() if item == code.codec)}-{code.scale}"


def random(count: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * spread


def read(code: CodecSpec, octets: torch.Tensor, count: int) -> torch.Tensor:
    return decode(code, octets, torch.full((count,), torch.nan))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("code", CODES, ids=names_of)
def test_encoded_values_and_residual_add_up_to_the_input(code: CodecSpec, count: int) -> None:
    rest, gradient = random(count, 1, 0.1), random(count, 2)
    whole = rest + gradient
    octets = encode(code, rest, gradient)
    assert len(octets) == size(code, count)
    torch.testing.assert_close(read(code, octets, count) + rest, whole, rtol=1e-6, atol=1e-6)
    assert torch.equal(gradient, random(count, 2))  # it is the user's


@pytest.mark.parametrize("code", CODES, ids=names_of)
def test_the_rest_alone_is_written_as_a_gradient_of_zeros_is(code: CodecSpec) -> None:
    tensor, other = random(1000, 3), random(1000, 3)
    assert torch.equal(encode(code, tensor), encode(code, other, torch.zeros(1000)))
    assert torch.equal(tensor, other)


@pytest.mark.parametrize("code", CODES, ids=names_of)
def test_repeated_pushes_arrive_within_a_bounded_residual(code: CodecSpec) -> None:
    """The rest stays bounded: after many pushes all but that has arrived."""
    gradient = random(500, 4, 0.01)
    rest, arrived = torch.zeros(500), torch.zeros(500)
    for step in range(200):
        now = code._replace(seed=step) if code.codec == RANDOMK else code
        arrived += read(now, encode(now, rest, gradient), 500)
    torch.testing.assert_close(arrived + rest, 200 * gradient, rtol=1e-4, atol=1e-3)
    assert rest.abs().max() < 2.5  # the gradients of 200 pushes are up to 6


# --- MXNet's rules ----------------------------------------------------------------------------------


def mxnet_1bit(rest: np.ndarray, gradient: np.ndarray, threshold: float) -> np.ndarray:  # type: ignore[type-arg]
    """Element by element, as MXNet 1.9.1's gradient_compression-inl.h does it."""
    rest += gradient
    sent = np.where(rest > np.float32(threshold), np.float32(1), np.float32(-1))
    rest -= sent
    return sent


def mxnet_2bit(rest: np.ndarray, gradient: np.ndarray, threshold: float) -> np.ndarray:  # type: ignore[type-arg]
    t = np.float32(threshold)
    rest += gradient
    sent = np.where(rest >= t, t, np.where(rest <= -t, -t, np.float32(0)))
    rest -= sent
    return sent


@pytest.mark.parametrize("shape", [(3, 4), (1200, 1200), (1211, 1211)])
@pytest.mark.parametrize("threshold", [0.5, 0.1, 0.3])
@pytest.mark.parametrize(("codec", "rule"), [(BIT1, mxnet_1bit), (BIT2, mxnet_2bit)])
def test_the_bits_follow_mxnets_rules(codec, rule, threshold, shape) -> None:  # type: ignore[no-untyped-def]
    count = shape[0] * shape[1]
    code = CodecSpec(codec, threshold)
    rest, expected_rest = torch.zeros(count), np.zeros(count, np.float32)
    for step in range(4):
        gradient = random(count, step, 0.4)
        gradient[::7] = threshold  # what reaches the threshold exactly
        gradient[1::7] = -threshold
        octets = encode(code, rest, gradient)
        expected = rule(expected_rest, gradient.numpy(), threshold)
        assert np.array_equal(read(code, octets, count).numpy(), expected)
        assert np.array_equal(rest.numpy(), expected_rest)


def test_a_scale_multiplies_thresholds_and_what_is_said() -> None:
    values = torch.tensor([0.06, 0.04, -0.06, -0.04])
    assert read(CodecSpec(BIT2, 0.5, 0.1), encode(CodecSpec(BIT2, 0.5, 0.1), values.clone()), 4).tolist() == (
        pytest.approx([0.05, 0.0, -0.05, 0.0])
    )
    assert read(CodecSpec(BIT1, 0.5, 0.1), encode(CodecSpec(BIT1, 0.5, 0.1), values.clone()), 4).tolist() == (
        pytest.approx([0.1, -0.1, -0.1, -0.1])
    )


@pytest.mark.spec("R152")
def test_the_octets_of_bits() -> None:
    """As docs/protocol.md says: the first of eight is the highest; of 2bit first those over."""
    values = torch.tensor([1.0, -1.0, 0.0, 1.0, 1.0, 0.0, 0.0, -1.0, 1.0])
    assert encode(CodecSpec(BIT1), values.clone()).tolist() == [0b10011000, 0b10000000]
    assert encode(CodecSpec(BIT2, 1.0), values.clone()).tolist() == [
        *(0b10011000, 0b10000000),
        *(0b01000001, 0b00000000),
    ]


@pytest.mark.parametrize("count", [1, 8, 9, 1003])
def test_integer_arithmetic_packs_as_numpy_does(count: int) -> None:
    """Which is what a GPU does."""
    flags = random(count, 5) > 0
    packed = codecs.packed_anywhere(flags)
    assert torch.equal(packed, codecs._packed(flags))
    assert torch.equal(codecs.bits_anywhere(packed, count), flags.to(torch.uint8))


@pytest.mark.cuda
@pytest.mark.parametrize("code", CODES, ids=names_of)
def test_a_gpu_writes_and_reads_as_the_cpu_does(code: CodecSpec) -> None:
    rest, gradient = random(BLOCK + 300, 1, 0.1), random(BLOCK + 300, 2)
    rest_there = rest.cuda()
    there, here = encode(code, rest_there, gradient.cuda()), encode(code, rest, gradient)
    back = decode(code, there, torch.empty(len(rest), device="cuda")).cpu()
    torch.testing.assert_close(back, read(code, here, len(rest)))
    torch.testing.assert_close(rest_there.cpu(), rest)


# --- halves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "largest"), [(CodecSpec(FP16), 65504.0), (CodecSpec(BF16), torch.finfo(torch.bfloat16).max)]
)
def test_values_over_the_largest_half_stay_in_the_residual(code: CodecSpec, largest: float) -> None:
    top = torch.finfo(torch.float32).max
    rest = torch.tensor([1e5, -1e5, 1.0] if code.codec == FP16 else [top, -top, 1.0])
    before = rest.clone()
    sent = read(code, encode(code, rest), 3)
    assert sent.tolist() == [largest, -largest, 1.0]
    assert torch.equal(rest, before - sent)
    assert rest.isfinite().all()


# --- int8 -------------------------------------------------------------------------------------------


def test_each_group_of_int8_has_its_own_scale() -> None:
    values = torch.cat([random(256, 1, 1e-3), random(256, 2, 1e3), random(3, 3)])
    sent = read(CodecSpec(INT8), encode(CodecSpec(INT8), values.clone()), len(values))
    for part in (slice(0, 256), slice(256, 512), slice(512, None)):
        most = values[part].abs().max()
        assert (sent[part] - values[part]).abs().max() <= most / 254 * 1.001
        assert sent[part].abs().max() == pytest.approx(most)


@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-39])
def test_a_group_whose_scale_has_no_inverse_is_left_whole(tiny: float) -> None:
    values = torch.full((300,), tiny)
    sent = read(CodecSpec(INT8), encode(CodecSpec(INT8), values), 300)
    assert sent.tolist() == [0.0] * 300
    assert torch.equal(values, torch.full((300,), tiny))


# --- some of all ------------------------------------------------------------------------------------


def test_topk_sends_the_largest() -> None:
    values = torch.tensor([0.1, -5.0, 0.2, 3.0, -0.3])
    sent = read(CodecSpec(TOPK, 0.4), encode(CodecSpec(TOPK, 0.4), values), 5)
    assert sent.tolist() == [0.0, -5.0, 0.0, 3.0, 0.0]
    assert values.tolist() == pytest.approx([0.1, 0.0, 0.2, 0.0, -0.3])


@pytest.mark.spec("R153")
@pytest.mark.parametrize("indices", [[1, 1], [3, 1], [1, 5], [-1, 2]])
def test_indices_that_cannot_be(indices: list[int]) -> None:
    octets = torch.cat(
        [torch.tensor(indices, dtype=torch.int32).view(torch.uint8), torch.ones(2).view(torch.uint8)]
    )
    with pytest.raises(ProtocolError, match="out of order, or beyond the 5"):
        decode(CodecSpec(TOPK, 0.4), octets, torch.empty(5))


@pytest.mark.parametrize(("count", "total"), [(1, 1), (1, 10), (10, 10), (100, 12_345)])
def test_elements_are_drawn_in_order_and_once(count: int, total: int) -> None:
    found = drawn(7, count, total)
    assert len(found) == count
    assert (found.diff() > 0).all()
    assert int(found[0]) >= 0
    assert int(found[-1]) < total


def test_another_seed_draws_others_and_in_time_all() -> None:
    assert not torch.equal(drawn(1, 20, 1000), drawn(2, 20, 1000))
    assert len({int(item) for seed in range(200) for item in drawn(seed, 5, 50)}) == 50


@pytest.mark.spec("R152")
def test_random_choice_never_changes() -> None:
    assert drawn(1, 3, 9).tolist() == [1, 3, 7]
    assert drawn(2**62, 4, 1000).tolist() == [25, 325, 735, 959]


# --- octets as they come ------------------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES, ids=names_of)
def test_octets_may_lie_anywhere(code: CodecSpec) -> None:
    """A small frame shares its memory with a head."""
    octets = encode(code, random(1000, 6))
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), octets])[1:]
    assert torch.equal(read(code, shifted, 1000), read(code, octets, 1000))
