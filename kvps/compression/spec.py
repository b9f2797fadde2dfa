"""Codec specifications: the codecs on the wire, their parameters, and the encoded size.

A :class:`CodecSpec` says how the elements of a run were written: which codec, and its numbers. The size
of the result follows from the code and from how many elements there are, so that a receiver
computes it and never takes a sender's word. This file knows neither torch nor numpy: the wire
imports it. :mod:`kvps.compression.codecs` does the arithmetic.

Elements are written in blocks of :data:`BLOCK`, each by itself and one behind the other (of
``topk`` and ``randomk``, all as one block)::

    fp16     a half for each element                         bf16     a bfloat16 for each element
    1bit     a bit for each element: +scale or -scale
    2bit     a bit for each element: +threshold; then a bit for each: -threshold (times scale)
    int8     a float32 scale for each 256 elements; then an int8 for each element
    topk     the uint32 indices of the k largest, ascending; then their float32 values
    randomk  the float32 values of k elements, whose indices follow from the seed
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kvps.errors import ProtocolError

BLOCK = 65536
"""Elements that are written by themselves: as many as stay in a core's cache on the way."""
GROUP = 256
"""Elements of ``int8`` that share a scale."""

TINY, HUGE = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest and the largest normal float32."""
SEEDS = 2**63

FP16, BF16, BIT1, BIT2, INT8, TOPK, RANDOMK = range(1, 8)

CODECS = {
    "fp16": FP16,
    "bf16": BF16,
    "1bit": BIT1,
    "2bit": BIT2,
    "int8": INT8,
    "topk": TOPK,
    "randomk": RANDOMK,
}
"""The number of each codec on the wire, by the name that users give it."""

NAMES = {number: name for name, number in CODECS.items()}


class CodecSpec(NamedTuple):
    """How elements are written."""

    codec: int
    number: float = 0.0
    """The threshold of ``1bit`` and ``2bit``, the ratio of ``topk`` and ``randomk``; else 0."""
    scale: float = 1.0
    """The factor of ``1bit`` and ``2bit``, thresholds included: 1 for gradients."""
    seed: int = 0
    """The seed of the indices of ``randomk``; else 0."""


def check(code: CodecSpec) -> CodecSpec:
    """Return ``code`` if it can be meant.

    Raises:
        ProtocolError: if it cannot.

    Example:
        >>> check(Code(BIT2, 0.5)).number
        0.5
    """
    name = NAMES.get(code.codec)
    if name is None:
        raise ProtocolError(f"no codec has number {code.codec}; there are 1 to {max(NAMES)}")
    if not fits(code):
        raise ProtocolError(f"{name} with number {code.number} and scale {code.scale}")
    if code.codec in (TOPK, RANDOMK) and not 0 < code.number <= 1:
        raise ProtocolError(f"{name} needs a ratio above 0 and up to 1, not {code.number}")
    return code


def fits(code: CodecSpec) -> bool:
    """Whether float32 can hold what a code says: its scale, its threshold and both multiplied."""
    threshold = abs(code.number * code.scale)
    if not (TINY <= code.scale <= HUGE and math.isfinite(code.number) and threshold <= HUGE):
        return False
    return code.codec != BIT2 or (code.number > 0 and threshold >= TINY)


def kept(code: CodecSpec, count: int) -> int:
    """Return how many of ``count`` elements ``topk`` or ``randomk`` keeps: at least one.

    Example:
        >>> kept(Code(TOPK, 0.01), 250)
        3
    """
    return min(count, max(1, math.ceil(code.number * count)))


def seeded(code: CodecSpec, number: int) -> CodecSpec:
    """Return the code of push, or version, ``number``: by another seed, other elements are drawn."""
    return code._replace(seed=(code.seed + number) % SEEDS)


def size(code: CodecSpec, count: int) -> int:
    """Return the bytes of ``count`` elements.

    Example:
        >>> size(Code(BIT2, 0.5), 1_000_000)
        250000
    """
    match code.codec:
        case 1 | 2:
            return 2 * count
        case 3:
            return -(-count // 8)
        case 4:
            return 2 * -(-count // 8)
        case 5:
            return count + 4 * -(-count // GROUP)
        case 6:
            return 8 * kept(code, count)
        case _:
            return 4 * kept(code, count)
