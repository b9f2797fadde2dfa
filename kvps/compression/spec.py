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
    e3m0     an exponent of 8 bits for each 256 elements; then 4 bits for each element
    topk2bit for each 4,096 elements two bfloat16 magnitudes, k indices of 12 bits, and k times 2 bits
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvps.errors import ProtocolError

BLOCK = 65536
"""Elements that are written by themselves: as many as stay in a core's cache on the way."""
GROUP = 256
"""Elements of ``int8`` that share a scale, and of ``e3m0`` that share an exponent."""
CHUNK = 4096
"""Elements of ``topk2bit`` of which the largest are kept."""

TINY, HUGE = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest and the largest normal float32."""
SEEDS = 2**63

FP16, BF16, BIT1, BIT2, INT8, TOPK, RANDOMK, E3M0, TOPK2BIT = range(1, 10)


class CodecSpec(NamedTuple):
    """How elements are written."""

    codec: int
    number: float = 0.0
    """The threshold of ``1bit`` and ``2bit``, the ratio of ``topk``, ``randomk`` and ``topk2bit``; else 0."""
    scale: float = 1.0
    """The factor of ``1bit`` and ``2bit``, thresholds included: 1 for gradients."""
    seed: int = 0
    """The seed of the indices of ``randomk``; else 0."""


class Codec(NamedTuple):
    """The properties of a codec, without its arithmetic (:data:`kvps.compression.codecs.ARITHMETIC`)."""

    name: str
    """The name that users give it."""
    size: Callable[[CodecSpec, int], int]
    """Return the bytes of so many elements."""
    takes: tuple[str, ...] = ()
    """Its parameters: ``threshold`` (with a scale), ``ratio`` or ``seed``."""
    is_whole: bool = False
    """All elements of a run are one block."""


def kept_bytes(code: CodecSpec, count: int) -> int:
    """Return the bytes of one chunk of ``topk2bit``, of so many elements."""
    some = kept(code, count)
    return 4 + some + -(-some // 2) + -(-some // 4)


def _chunked_bytes(code: CodecSpec, count: int) -> int:
    full, last = divmod(count, CHUNK)
    return full * kept_bytes(code, CHUNK) + (kept_bytes(code, last) if last else 0)


def _kept_bytes(each: int) -> Callable[[CodecSpec, int], int]:
    return lambda code, count: each * kept(code, count)


TABLE: Mapping[int, Codec] = {
    FP16: Codec("fp16", lambda _, count: 2 * count),
    BF16: Codec("bf16", lambda _, count: 2 * count),
    BIT1: Codec("1bit", lambda _, count: -(-count // 8), ("threshold",)),
    BIT2: Codec("2bit", lambda _, count: 2 * -(-count // 8), ("threshold",)),
    INT8: Codec("int8", lambda _, count: count + 4 * -(-count // GROUP)),
    TOPK: Codec("topk", _kept_bytes(8), ("ratio",), is_whole=True),
    RANDOMK: Codec("randomk", _kept_bytes(4), ("ratio", "seed"), is_whole=True),
    E3M0: Codec("e3m0", lambda _, count: -(-count // GROUP) + -(-count // 2)),
    TOPK2BIT: Codec("topk2bit", _chunked_bytes, ("ratio",)),
}
"""Number on the wire -> codec."""
CODECS = {codec.name: number for number, codec in TABLE.items()}
"""The number of each codec on the wire, by the name that users give it."""


def check(code: CodecSpec) -> CodecSpec:
    """Return ``code`` if it can be meant.

    Raises:
        ProtocolError: if it cannot.

    Example:
        >>> check(CodecSpec(BIT2, 0.5)).number
        0.5
    """
    codec = TABLE.get(code.codec)
    if codec is None:
        raise ProtocolError(f"no codec has number {code.codec}; there are 1 to {max(TABLE)}")
    if not fits(code):
        raise ProtocolError(f"{codec.name} with number {code.number} and scale {code.scale}")
    if "ratio" in codec.takes and not 0 < code.number <= 1:
        raise ProtocolError(f"{codec.name} needs a ratio above 0 and up to 1, not {code.number}")
    return code


def fits(code: CodecSpec) -> bool:
    """Whether float32 can hold what a code says: its scale, its threshold and both multiplied."""
    threshold = abs(code.number * code.scale)
    if not (TINY <= code.scale <= HUGE and math.isfinite(code.number) and threshold <= HUGE):
        return False
    return code.codec != BIT2 or (code.number > 0 and threshold >= TINY)


def kept(code: CodecSpec, count: int) -> int:
    """Return how many of ``count`` elements a codec with a ratio keeps: at least one.

    Example:
        >>> kept(CodecSpec(TOPK, 0.01), 250)
        3
    """
    return min(count, max(1, math.ceil(code.number * count)))


def size(code: CodecSpec, count: int) -> int:
    """Return the bytes of ``count`` elements.

    Example:
        >>> size(CodecSpec(BIT2, 0.5), 1_000_000)
        250000
    """
    return TABLE[code.codec].size(code, count)


def seeded(code: CodecSpec, number: int) -> CodecSpec:
    """Return the code of push, or version, ``number``: with another seed, other elements are drawn."""
    if "seed" not in TABLE[code.codec].takes:
        return code
    return code._replace(seed=(code.seed + number) % SEEDS)
