"""Hashes of a row's id: the server it lies on, and its initial value.

An id is any 64-bit number; there is no vocabulary. Everything here is a stable hash of it, computed
for many ids at once: so every process finds the same server for an id without asking, and a row
begins with the same value whichever server makes it, in whatever order, before or after a restart.

First values are made of whole numbers and one multiplication. A logarithm or a cosine would differ
in its last bit between processors; so a normal deviate is a sum of twelve uniform ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvps.core.placement import POINT_BITS, points
from kvps.errors import ConfigError
from kvps.splitmix import GOLDEN, Bits, mixed

Ids: TypeAlias = npt.NDArray[np.int64]
Hashes: TypeAlias = Bits
Seeds: TypeAlias = np.uint64 | Bits
"""A seed for all ids, or the seed of each."""

KINDS = ("zeros", "normal", "uniform")
BLOCK_COUNT = 16 << 10
"""Elements whose first values are computed at once: what is between stays in a core's cache."""
SERVER_SALT, INDEX_SALT, COUNT_SALT, ROUNDING_SALT = 1, 2, 3, 4
ADMIT_SALT = 1 << 62
"""Salts of the hashes for different purposes, which must be independent."""
_COLUMN = 0xD1342543DE82EF95
"""Distance between the salts of two columns. Not GOLDEN, or two salts would give the same hashes."""
_MASK = 2**64 - 1
_POINT_SHIFT = np.uint64(64 - POINT_BITS)


def hashes(ids: Ids | Hashes, salt: int | Seeds) -> Hashes:
    """Return 64 well mixed bits of each id.

    Args:
        ids: 64-bit numbers, of any shape.
        salt: other salts give hashes that have nothing to do with these; or that of each id.
    """
    if isinstance(salt, np.ndarray):
        return mixed(ids.view(np.uint64) + (salt + np.uint64(1)) * np.uint64(GOLDEN))
    return mixed(ids.view(np.uint64) + np.uint64((int(salt) + 1) * GOLDEN & _MASK))


def servers_of(ids: Ids, servers: int) -> npt.NDArray[np.uint16]:
    """Return the rank of the server that holds the row of each id.

    Example:
        >>> import numpy as np
        >>> servers_of(np.arange(6), servers=2)
        array([0, 1, 1, 1, 1, 1], dtype=uint16)
    """
    return points(servers).take((hashes(ids, SERVER_SALT) >> _POINT_SHIFT).view(np.int64))


class Initializer(NamedTuple):
    """How rows begin: a kind of :data:`KINDS` and its scale.

    The scale is the standard deviation of ``normal``, the bound of ``uniform``; 0 for ``zeros``.
    """

    kind: str
    scale: float

    def check(self) -> Initializer:
        """Return it.

        Raises:
            ConfigError: if there is no such kind, or its scale is not a number above 0.
        """
        if self.kind not in KINDS:
            raise ConfigError(f"init={self.kind!r:.60} is unknown; use one of {', '.join(KINDS)}")
        if not (self.scale == 0.0 if self.kind == "zeros" else 0.0 < self.scale < math.inf):
            wanted = "no scale" if self.kind == "zeros" else "a finite scale above 0"
            raise ConfigError(f"init {self.kind!r} with scale {self.scale}: give it {wanted}")
        return self

    def rows(self, ids: Ids, dim: int, dtype: torch.dtype, seed: int | Seeds) -> torch.Tensor:
        """Return the first rows of ``ids``, [len(ids), dim], as :meth:`values` has them."""
        found = torch.empty((len(ids), dim), dtype=dtype)
        for begin in range(0, len(ids), at_once := max(1, BLOCK_COUNT // dim)):
            some = slice(begin, begin + at_once)
            seeds = seed[some] if isinstance(seed, np.ndarray) else seed
            found[some] = torch.from_numpy(self.values(ids[some], dim, seeds))
        return found

    def values(self, ids: Ids, dim: int, seed: int | Seeds) -> npt.NDArray[np.float64]:
        """Return the first rows of ``ids``, of shape [len(ids), dim].

        Column c of an id's row depends on its seed, the id and c, and on nothing else.
        """
        if self.kind == "zeros":
            return np.zeros((len(ids), dim))
        columns = np.arange(dim, dtype=np.uint64) * np.uint64(_COLUMN)
        places = hashes(ids, seed)[:, None] + columns
        if self.kind == "uniform":
            # Odd numbers between -2**24 and 2**24: none is 0, and a float32 holds each.
            odd = (hashes(places, 0) >> np.uint64(40)).astype(np.float64) * 2.0 - (2.0**24 - 1.0)
            return odd * (self.scale / 2.0**24)
        # Twelve numbers of 16 bits: those of three hashes, in pairs, until the last step.
        pairs = np.uint64(0x0000FFFF_0000FFFF)
        total = np.zeros(places.shape, np.uint64)
        for salt in range(3):
            bits = hashes(places, salt)
            total += bits & pairs
            bits >>= np.uint64(16)
            bits &= pairs
            total += bits
        total += total >> np.uint64(32)
        total &= np.uint64(0xFFFFFFFF)
        centred = total.astype(np.float64) * 2.0 - 12.0 * 65535.0
        return centred * (self.scale / 2.0**17)


def first_of(init: object) -> Initializer:
    """Return what an ``init=`` argument stands for.

    Args:
        init: a kind, or a pair (kind, scale). Without a scale, normal has 0.01, uniform 0.05.

    Raises:
        ConfigError: for anything else.

    Example:
        >>> first_of("zeros"), first_of(("uniform", 0.5))
        (First(kind='zeros', scale=0.0), First(kind='uniform', scale=0.5))
    """
    if isinstance(init, str):
        return Initializer(init, {"normal": 0.01, "uniform": 0.05}.get(init, 0.0)).check()
    if isinstance(init, tuple | list) and len(init) == 2:
        kind, scale = init
        if isinstance(kind, str) and isinstance(scale, float | int) and not isinstance(scale, bool):
            return Initializer(kind, float(scale)).check()
    raise ConfigError(
        f"init={init!r:.60}: give one of {', '.join(KINDS)}, or a pair such as ('normal', 0.01)"
    )
