"""Size classes: the key size that carries a tensor of a given length.

A key has one size for ever, and scripts send tensors of many sizes (a pickled object has another one
each time). The first shapes get keys that fit exactly, so that the buckets of a model travel without
padding. Later ones share keys of a few *classes*: eight between a power of two and the next, so that at
most an eighth is padding and the number of keys is bounded. What is chosen depends on nothing but the
calls before, which are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST = 64
"""The smallest class."""
EXACT_MAX = 64
"""The number of shapes of one kind that get keys of their own."""


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


class KeySizes:
    """The names and sizes of one group's keys.

    A key that fits exactly has the shape in its name. So ranks that give different shapes use different keys, and
    never take each other's values for theirs.
    """

    def __init__(self, exact_max: int = EXACT_MAX) -> None:
        self._exact_max = exact_max
        self._exact: dict[str, set[str]] = {}

    def of(self, kind: str, shape: Sequence[int], count: int) -> tuple[str, int]:
        """Return the name and the size of the key for ``count`` values of this shape.

        Args:
            kind: the operation and element type; each has its own keys.
            shape: of the tensor.
            count: the values, or bytes, that travel.

        Example:
            >>> KeySizes().of("all_reduce.SUM/float32", (4, 5), 20)
            ('all_reduce.SUM/float32/4x5', 20)
        """
        exact = self._exact.setdefault(kind, set())
        name = f"{kind}/{'x'.join(map(str, shape)) or 'scalar'}"
        if name not in exact:
            if len(exact) >= self._exact_max:
                size = class_of(count)
                return f"{kind}/~{size}", size
            exact.add(name)
        return name, count
