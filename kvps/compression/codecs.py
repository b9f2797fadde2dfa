"""The arithmetic of the codecs: float32 elements encoded into few bytes, and decoded.

:func:`encode` writes the part of a tensor that a code can hold and leaves the other in it: the *rest*, which
is added to the next gradient, so that nothing is lost but time. (Seide et al.: 1-Bit Stochastic
Gradient Descent, Interspeech 2014; for all codecs alike Karimireddy et al.: Error Feedback Fixes
SignSGD, ICML 2019.) The rules of ``1bit`` and ``2bit`` are MXNet's, to the bit.

On a CPU, numpy compares and packs bits, torch does the rest: each is ten times the other's speed
there. Blocks of 256 KiB stay in the cache between the steps. On a GPU, torch does it all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvps.compression.pseudo_gradients import (
    read_e3m0,
    read_topk2bit,
    store,
    typed,
    write_e3m0,
    write_topk2bit,
)
from kvps.compression.spec import (
    BF16,
    BIT1,
    BIT2,
    BLOCK,
    E3M0,
    FP16,
    GROUP,
    INT8,
    RANDOMK,
    TABLE,
    TOPK,
    TOPK2BIT,
    CodecSpec,
    kept,
    size,
)
from kvps.errors import ProtocolError
from kvps.splitmix import GOLDEN, mixed

_TINY = torch.finfo(torch.float32).tiny


def encode(code: CodecSpec, rest: torch.Tensor, gradient: torch.Tensor | None = None) -> torch.Tensor:
    """Add ``gradient`` to ``rest``, write the sum, and leave in ``rest`` the part that was not written.

    Args:
        code: how.
        rest: float32, flat and contiguous, of any length but 0, finite; on any device.
        gradient: as ``rest``; None adds nothing.

    Returns:
        uint8, flat, :func:`kvps.compression.spec.size` of them, on the device of ``rest``.

    Example:
        >>> rest = torch.tensor([0.7, -0.2, 0.1])
        >>> octets = encode(CodecSpec(BIT2, 0.5), rest)
        >>> decode(CodecSpec(BIT2, 0.5), octets, torch.empty(3))
        tensor([0.5000, 0.0000, 0.0000])
        >>> rest
        tensor([ 0.2000, -0.2000,  0.1000])
    """
    count = len(rest)
    out = torch.empty(size(code, count), dtype=torch.uint8, device=rest.device)
    write, step = ARITHMETIC[code.codec][0], _step(code, count)
    begin = 0
    for start in range(0, count, step):
        block = rest[start : start + step]
        if gradient is not None:
            block.add_(gradient[start : start + step])
        end = begin + size(code, len(block))
        write(code, block, out[begin:end])
        begin = end
    return out


def decode(code: CodecSpec, octets: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Read the elements that ``octets`` say into ``out``, and return it.

    Args:
        code: how they were written.
        octets: uint8, flat, exactly :func:`kvps.compression.spec.size` of them. They are not written to.
        out: float32, flat and contiguous, on the same device. All of it is overwritten.

    Raises:
        ProtocolError: if they cannot have been written so.
    """
    count = len(out)
    assert len(octets) == size(code, count)
    read, step = ARITHMETIC[code.codec][1], _step(code, count)
    begin = 0
    for start in range(0, count, step):
        block = out[start : start + step]
        end = begin + size(code, len(block))
        read(code, octets[begin:end], block)
        begin = end
    return out


def _step(code: CodecSpec, count: int) -> int:
    """Return how many elements make a block."""
    return count if TABLE[code.codec].is_whole else BLOCK


# --- halves -----------------------------------------------------------------------------------------


def _write_half(code: CodecSpec, rest: torch.Tensor, out: torch.Tensor) -> None:
    dtype = torch.float16 if code.codec == FP16 else torch.bfloat16
    half = typed(out, dtype)
    half.copy_(rest)
    if not torch.isfinite(half.sum(dtype=torch.float32)):  # rare: then it pays to look closer
        # What is over the largest half stays in the rest; an infinity would stay there for ever.
        largest = torch.finfo(dtype).max
        half.copy_(rest.clamp(-largest, largest))
    rest.sub_(half)
    store(out, half)


def _read_half(code: CodecSpec, octets: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(typed(octets, torch.float16 if code.codec == FP16 else torch.bfloat16))


# --- bits -------------------------------------------------------------------------------------------


def _write_1bit(code: CodecSpec, rest: torch.Tensor, out: torch.Tensor) -> None:
    above = _above(rest, code.number * code.scale, is_equal=False)
    out.copy_(_packed(above))
    sent = above.view(torch.int8).mul(2).sub_(1)
    rest.sub_(sent, alpha=code.scale)


def _read_1bit(code: CodecSpec, octets: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_bits(octets, len(out)))
    out.mul_(2 * code.scale).sub_(code.scale)


def _write_2bit(code: CodecSpec, rest: torch.Tensor, out: torch.Tensor) -> None:
    threshold = code.number * code.scale
    above, below = _above(rest, threshold), _above(rest, threshold, is_negative=True)
    half = len(out) // 2
    out[:half].copy_(_packed(above))
    out[half:].copy_(_packed(below))
    rest.sub_(above.view(torch.int8) - below.view(torch.int8), alpha=threshold)


def _read_2bit(code: CodecSpec, octets: torch.Tensor, out: torch.Tensor) -> None:
    half = len(octets) // 2
    above, below = _bits(octets[:half], len(out)), _bits(octets[half:], len(out))
    out.copy_(above.view(torch.int8) - below.view(torch.int8))
    out.mul_(code.number * code.scale)


def _above(
    values: torch.Tensor, limit: float, *, is_equal: bool = True, is_negative: bool = False
) -> torch.Tensor:
    """Return which values reach ``limit``, or are over it; or, negative, their opposites do."""
    if values.device.type != "cpu":
        limit_32 = torch.tensor(limit, dtype=torch.float32, device=values.device)
        if is_negative:
            return values <= -limit_32
        return values >= limit_32 if is_equal else values > limit_32
    compare: Callable[..., np.ndarray[tuple[int], np.dtype[np.bool_]]]
    compare = np.less_equal if is_negative else np.greater_equal if is_equal else np.greater
    return torch.from_numpy(compare(values.numpy(), np.float32(-limit if is_negative else limit)))


def _packed(flags: torch.Tensor) -> torch.Tensor:
    """Return flags as bits, the first in the highest bit of the first byte."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags.numpy()))
    return packed_anywhere(flags)


def _bits(octets: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``count`` bits as bytes that are 0 or 1."""
    if octets.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(octets.numpy(), count=count))
    return bits_anywhere(octets, count)


def packed_anywhere(flags: torch.Tensor) -> torch.Tensor:
    """Return flags as bits by integer arithmetic, on any device."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -len(flags) % 8))
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=flags.device)
    return (padded.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)


def bits_anywhere(octets: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``count`` bits as bytes that are 0 or 1 by integer arithmetic, on any device."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=octets.device)
    return ((octets[:, None] >> shifts) & 1).view(-1)[:count]


# --- int8 -------------------------------------------------------------------------------------------


def _write_int8(code: CodecSpec, rest: torch.Tensor, out: torch.Tensor) -> None:
    groups = -(-len(rest) // GROUP)
    whole = len(rest) // GROUP * GROUP
    scales = torch.empty(groups, dtype=torch.float32, device=rest.device)
    levels = torch.empty(len(rest), dtype=torch.int8, device=rest.device)
    for part, first, last in ((slice(0, whole), 0, whole // GROUP), (slice(whole, None), -1, None)):
        values = rest[part].view(-1, GROUP) if last else rest[part].view(1, -1)
        if not values.numel():
            continue
        scale = values.abs().amax(1).div_(127)
        scale[scale < _TINY] = 0  # its inverse would be infinite
        inverse = torch.where(scale > 0, 1 / scale, 0)
        level = (values * inverse[:, None]).round_()
        levels[part].copy_(level.view(-1))
        values.sub_(level.mul_(scale[:, None]))
        scales[first:last].copy_(scale)
    store(out[: 4 * groups], scales)
    out[4 * groups :].copy_(levels.view(torch.uint8))


def _read_int8(code: CodecSpec, octets: torch.Tensor, out: torch.Tensor) -> None:
    groups = -(-len(out) // GROUP)
    whole = len(out) // GROUP * GROUP
    scales = typed(octets[: 4 * groups], torch.float32)
    out.copy_(octets[4 * groups :].view(torch.int8))
    out[:whole].view(-1, GROUP).mul_(scales[: whole // GROUP, None])
    out[whole:].mul_(scales[-1])


# --- some of all ------------------------------------------------------------------------------------


def _write_topk(code: CodecSpec, rest: torch.Tensor, out: torch.Tensor) -> None:
    count = kept(code, len(rest))
    if rest.device.type == "cpu":
        largest = np.argpartition(rest.abs().numpy(), len(rest) - count)[len(rest) - count :]
        indices = torch.from_numpy(np.sort(largest))
    else:
        indices = rest.abs().topk(count, sorted=False).indices.sort().values
    store(out[: 4 * count], indices.to(torch.int32))
    store(out[4 * count :], rest[indices])
    rest[indices] = 0


def _read_topk(code: CodecSpec, octets: torch.Tensor, out: torch.Tensor) -> None:
    count = kept(code, len(out))
    indices = typed(octets[: 4 * count], torch.int32).long()
    if indices[0] < 0 or indices[-1] >= len(out) or not bool((indices.diff() > 0).all()):
        raise ProtocolError(f"topk names elements out of order, or beyond the {len(out)} of the key")
    out.zero_()
    out[indices] = typed(octets[4 * count :], torch.float32)


def _write_randomk(code: CodecSpec, rest: torch.Tensor, out: torch.Tensor) -> None:
    indices = drawn(code.seed, kept(code, len(rest)), len(rest)).to(rest.device)
    store(out, rest[indices])
    rest[indices] = 0


def _read_randomk(code: CodecSpec, octets: torch.Tensor, out: torch.Tensor) -> None:
    indices = drawn(code.seed, kept(code, len(out)), len(out)).to(out.device)
    out.zero_()
    out[indices] = typed(octets, torch.float32)


def drawn(seed: int, count: int, total: int) -> torch.Tensor:
    """Return ``count`` different indices below ``total``, ascending, the same wherever it is asked.

    The elements are cut into ``count`` near-equal parts, and of each one is drawn.

    Example:
        >>> drawn(1, 3, 9).tolist()
        [1, 3, 7]
    """
    part = np.arange(count, dtype=np.uint64)
    bits = mixed((part + np.uint64(seed)) * np.uint64(GOLDEN))
    begin = part * np.uint64(total) // np.uint64(count)
    end = (part + np.uint64(1)) * np.uint64(total) // np.uint64(count)
    return torch.from_numpy((begin + bits % (end - begin)).astype(np.int64))


ARITHMETIC = {
    FP16: (_write_half, _read_half),
    BF16: (_write_half, _read_half),
    BIT1: (_write_1bit, _read_1bit),
    BIT2: (_write_2bit, _read_2bit),
    INT8: (_write_int8, _read_int8),
    TOPK: (_write_topk, _read_topk),
    RANDOMK: (_write_randomk, _read_randomk),
    E3M0: (write_e3m0, read_e3m0),
    TOPK2BIT: (write_topk2bit, read_topk2bit),
}
"""Codec -> how a block is written, and read."""
