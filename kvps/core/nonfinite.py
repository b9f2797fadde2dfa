"""Gradients that are not finite: how they are counted, and described to a person.

Servers find them (:mod:`kvps.core.server.round_logs`), and workers are told of them
with the values that they pull.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvps.phrases import some_of

ACTIONS = ("apply", "skip", "error")
"""The policies for an update whose gradient is not finite."""
RANKS_MAX = 20
"""Maximum ranks that a text names."""


def count_nonfinite(values: torch.Tensor) -> int:
    """Return how many of ``values``, a flat tensor, are NaN or infinity.

    Where the sum of all is finite none is: NaN and infinity never add up to a number. A sum is
    several times faster than to look at each, and reads at the speed of memory. It may overflow
    where every value is finite; then each is looked at.

    Example:
        >>> count_nonfinite(torch.tensor([1.0, float("nan"), float("inf")]))
        2
    """
    if values.sum(dtype=_SUMMED_IN.get(values.dtype)).isfinite():
        return 0
    return len(values) - int(values.isfinite().sum())


_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Flaw(NamedTuple):
    """The values of a gradient that are not finite."""

    values: int
    """Number of values that are not finite."""
    ranks: tuple[int, ...]
    """Ranks that pushed them; empty if every push was finite and only the sum was not."""


def describe(key: str, flaw: Flaw) -> str:
    """Return a text that describes the NaN and Inf in a gradient of ``key``."""
    what = "1 value" if flaw.values == 1 else f"{flaw.values} values"
    verb = "is" if flaw.values == 1 else "are"
    return f"{what} of key {key[:64]!r} {verb} not finite ({_source(flaw.ranks)})"


def _source(ranks: Sequence[int]) -> str:
    if not ranks:
        return "every push is finite, but their sum is not"
    if len(ranks) == 1:
        return f"from rank {ranks[0]}"
    named = some_of([str(rank) for rank in ranks], RANKS_MAX)
    return f"from some of ranks {named}, or from their sum"
