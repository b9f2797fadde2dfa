"""Size classes: the key size that carries a tensor of a given length.

A key has one size for ever, and scripts send tensors of many sizes (a pickled object has another one
each time). The first sizes get keys that fit exactly, so that the buckets of a model travel without
padding. Later ones share keys of a few *classes*: eight between a power of two and the next, so that at
most an eighth is padding and the number of keys is bounded. What is chosen depends on nothing but the
calls before, which are the same on all ranks.
"""

from __future__ import annotations

LEAST = 64
"""The smallest class."""
EXACT_MAX = 64
"""The number of sizes that get keys that fit exactly."""


def class_of(count: int) -> int:
    """Return the smallest class that holds ``count`` values.

    Example:
        >>> class_of(3), class_of(64), class_of(65), class_of(1000), class_of(1025)
        (64, 64, 72, 1024, 1152)
    """
    if count <= LEAST:
        return LEAST
    step = 1 << (count - 1).bit_length() - 4
    return -(-count // step) * step


class Sizes:
    """The sizes of one group's keys for sums."""

    def __init__(self, exact_max: int = EXACT_MAX) -> None:
        self._exact_max = exact_max
        self._exact: set[tuple[str, int]] = set()

    def of(self, kind: str, count: int) -> int:
        """Return the size of the key for ``count`` values of a ``kind``, which has its own keys."""
        if (kind, count) in self._exact:
            return count
        if len(self._exact) >= self._exact_max:
            return class_of(count)
        self._exact.add((kind, count))
        return count
