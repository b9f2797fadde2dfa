"""Numbers that look random and are the same on every machine: SplitMix64's, whole arrays at once.

The generator steps its state by ``GOLDEN`` and mixes it; here a caller chooses the states, so that
any number can be asked for without those before it. (Steele et al.: Fast Splittable Pseudorandom
Number Generators, OOPSLA 2014.)
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bits: TypeAlias = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
"""The odd number nearest to 2**64 divided by the golden ratio."""


def mixed(states: Bits) -> Bits:
    """Return 64 bits for each state, every one of which depends on all bits of it.

    Example:
        >>> import numpy as np
        >>> [hex(word) for word in mixed(np.array([GOLDEN], np.uint64)).tolist()]
        ['0xe220a8397b1dcdaf']
    """
    shifted: Bits = np.right_shift(states, 30)
    bits = states ^ shifted
    bits *= 0xBF58476D1CE4E5B9
    bits ^= np.right_shift(bits, 27, out=shifted)
    bits *= 0x94D049BB133111EB
    bits ^= np.right_shift(bits, 31, out=shifted)
    return bits
