"""The arithmetic of the codecs for pseudo-gradients: ``e3m0`` and ``topk2bit``.

The pseudo-gradient of many local steps bears a coarser code than the gradient of one batch.

``e3m0`` writes a float of four bits for each element, a sign and three bits of exponent (Douillard et al.:
Streaming DiLoCo with overlapping communication, arXiv 2501.18512). 256 elements share the exponent of the
largest of them, so the seven magnitudes are the powers of two from there down. An element becomes the nearest
of these, or 0.

``topk2bit`` keeps the largest elements of each 4,096 and writes two bits for each: its sign, and whether it
is above the median of those kept. The two magnitudes are the means of either half (chunked top-k with two
bits, as in SparseLoCo, arXiv 2508.15706). An index within so few elements takes 12 bits.

The helpers at the end read bytes as numbers of other types, and pack small numbers into bytes.
"""

from __future__ import annotations

import torch

from kvps.compression.spec import CHUNK, GROUP, CodecSpec, kept, kept_bytes
from kvps.errors import ProtocolError

_LEAST, _MOST = 8, 254
"""The range of a group's exponent, biased as in float32: all seven powers of two are normal numbers."""
_LEVELS = torch.tensor([0.0, *[2.0**n for n in range(1, 8)], 0.0, *[-(2.0**n) for n in range(1, 8)]])
"""The value of each code, as a multiple of the scale of its group."""


# --- e3m0 -------------------------------------------------------------------------------------------


def write_e3m0(code: CodecSpec, rest: torch.Tensor, out: torch.Tensor) -> None:
    """Write a block of ``rest`` to ``out``, and leave in ``rest`` the part that was not written."""
    groups, count = -(-len(rest) // GROUP), len(rest)
    bits = rest.view(torch.int32)
    exponent = (bits & 0x7FFFFFFF) >> 23
    nearest = ((bits & 0x7FFFFFFF) + 0x400000) >> 23  # from 1.5 times a power of two on, the next one
    top = _in_groups(nearest, groups).amax(1).clamp_(max=_MOST)
    top[top < _LEAST] = 0
    lowest = (top - 7).repeat_interleave(GROUP)[:count]
    level = (nearest - lowest).clamp_(0, 7)
    # Of the numbers below the smallest power, those over half of it are nearer to it than to 0.
    level[(level == 0) & (exponent == lowest)] = 1
    level[top.repeat_interleave(GROUP)[:count] == 0] = 0
    nibbles = torch.where((bits < 0) & (level > 0), level + 8, level)
    out[:groups].copy_(top)
    out[groups:].copy_(packed_nibbles(nibbles))
    rest.sub_(_said(nibbles, top))


def read_e3m0(code: CodecSpec, octets: torch.Tensor, out: torch.Tensor) -> None:
    """Read a block into ``out``.

    Raises:
        ProtocolError: for an exponent that no group has.
    """
    groups = -(-len(out) // GROUP)
    top = octets[:groups].int()
    if bool(((top != 0) & ((top < _LEAST) | (top > _MOST))).any()):
        raise ProtocolError(f"e3m0 has an exponent that is neither 0 nor {_LEAST} to {_MOST}")
    out.copy_(_said(nibbles_of(octets[groups:], len(out)), top))


def _said(nibbles: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Return what codes say in groups whose exponents are ``top``."""
    scales = torch.ldexp(torch.ones_like(top, dtype=torch.float32), top - 134)
    scales[top == 0] = 0
    levels = _LEVELS.to(nibbles.device)[nibbles.long()]
    return levels.mul_(scales.repeat_interleave(GROUP)[: len(levels)])


def _in_groups(values: torch.Tensor, groups: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, groups * GROUP - len(values))).view(groups, GROUP)


# --- topk2bit ---------------------------------------------------------------------------------------


def write_topk2bit(code: CodecSpec, rest: torch.Tensor, out: torch.Tensor) -> None:
    """Write a block of ``rest`` to ``out``, and leave in ``rest`` the part that was not written."""
    for values, octets in _chunks(code, rest, out):
        _write_rows(kept(code, values.shape[1]), values, octets)


def _write_rows(count: int, values: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``count`` elements of each row."""
    indices = values.abs().topk(count, dim=1, sorted=False).indices.sort(1).values
    picked = values.gather(1, indices)
    sizes = picked.abs()
    is_high = sizes > sizes.median(1, keepdim=True).values
    high_count = is_high.sum(1)
    high = (sizes * is_high).sum(1) / high_count.clamp(min=1)
    low = (sizes * ~is_high).sum(1) / (count - high_count)
    most = torch.finfo(torch.bfloat16).max
    levels = torch.stack((low, high), dim=1).clamp_(max=most).to(torch.bfloat16)
    codes = (picked < 0).to(torch.uint8) * 2 + is_high
    low_octets, high_bits, signs = _fields(count, out)
    out[:, :4].copy_(levels.view(torch.uint8))
    low_octets.copy_(indices & 0xFF)
    high_bits.copy_(packed_nibbles(indices >> 8))
    signs.copy_(_packed_pairs(codes))
    values.scatter_(1, indices, picked - _level_of(codes, levels.float()))


def read_topk2bit(code: CodecSpec, octets: torch.Tensor, out: torch.Tensor) -> None:
    """Read a block into ``out``.

    Raises:
        ProtocolError: for indices that are not ascending, or beyond the elements.
    """
    out.zero_()
    for values, part in _chunks(code, out, octets):
        width = values.shape[1]
        count = kept(code, width)
        low_octets, high_bits, signs = _fields(count, part)
        indices = nibbles_of(high_bits, count).long() << 8 | low_octets.long()
        if int(indices.max()) >= width or not bool((indices.diff(dim=1) > 0).all()):
            raise ProtocolError(f"topk2bit names elements out of order, or beyond the {width} of a chunk")
        levels = typed(part[:, :4].reshape(-1), torch.bfloat16).view(-1, 2).float()
        values.scatter_(1, indices, _level_of(_pairs_of(signs, count), levels))


def _level_of(codes: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return what codes of two bits say; each row has its (low, high) in ``levels``."""
    sizes = levels.gather(1, (codes & 1).long())
    return torch.where(codes > 1, -sizes, sizes)


def _fields(count: int, octets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the columns with the low bytes of indices, their high bits, and the codes."""
    first, second = 4 + count, 4 + count + -(-count // 2)
    return octets[:, 4:first], octets[:, first:second], octets[:, second:]


def _chunks(
    code: CodecSpec, values: torch.Tensor, octets: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return whole chunks and the last shorter one, each as rows of elements and of bytes."""
    full = len(values) // CHUNK
    parts = []
    at = full * kept_bytes(code, CHUNK)
    if full:
        parts.append((values[: full * CHUNK].view(full, -1), octets[:at].view(full, -1)))
    if len(values) > full * CHUNK:
        parts.append((values[full * CHUNK :].view(1, -1), octets[at:].view(1, -1)))
    return parts


def _packed_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return numbers below 4 as bytes: four to a byte, the first in the highest bits."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4))
    return (padded[:, ::4] << 6) | (padded[:, 1::4] << 4) | (padded[:, 2::4] << 2) | padded[:, 3::4]


def _pairs_of(octets: torch.Tensor, count: int) -> torch.Tensor:
    shifted = torch.stack((octets >> 6, octets >> 4 & 3, octets >> 2 & 3, octets & 3), dim=-1)
    return shifted.flatten(1)[:, :count]


def typed(octets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as numbers; a copy if they lie where such numbers may not."""
    is_aligned = octets.data_ptr() % dtype.itemsize == 0 and (octets.storage_offset() % dtype.itemsize == 0)
    return (octets if is_aligned else octets.clone()).view(dtype)


def store(out: torch.Tensor, numbers: torch.Tensor) -> None:
    """Write the bytes of ``numbers`` to ``out``, unless they are there."""
    if out.data_ptr() != numbers.data_ptr():
        out.copy_(numbers.contiguous().view(torch.uint8))


def packed_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """Return numbers below 16 as bytes: two to a byte, the first in the upper half, along the last dimension.

    Example:
        >>> packed_nibbles(torch.tensor([1, 2, 3])).tolist()
        [18, 48]
    """
    padded = torch.nn.functional.pad(nibbles.to(torch.uint8), (0, nibbles.shape[-1] % 2))
    return (padded[..., ::2] << 4) | padded[..., 1::2]


def nibbles_of(octets: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first ``count`` numbers that :func:`packed_nibbles` has packed, along the last dimension."""
    pairs = torch.stack((octets >> 4, octets & 15), dim=-1)
    return pairs.flatten(-2)[..., :count]
