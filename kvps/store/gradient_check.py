"""A check of a store's first calls: gradients are pushed, no optimizer is set, and the sum is
pulled into the weights.

Without an optimizer a store assigns the sum of a round to its key. A script that forgot
``set_optimizer()`` would go on with gradients for weights. The check needs a value that is the
``.grad`` of the tensor that the result is written to, or that the key was initialised with. Nobody
does that on purpose.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

LOOKS_MAX = 16
"""The number of calls that are checked: the mistake shows in the first."""


class GradientCheck:
    """Notes about the first calls of a store."""

    def __init__(self) -> None:
        self._leaves: dict[str, weakref.ref[torch.Tensor]] = {}
        """Key -> the trained tensor that it was initialised with."""
        self._pushed: dict[str, int] = {}
        """Key -> the address of the value that was last pushed."""
        self._looks = 0

    @property
    def is_over(self) -> bool:
        """Whether enough calls were checked."""
        return self._looks > LOOKS_MAX

    def initialised(self, names: Sequence[str], values: object) -> None:
        """Take note of trained tensors."""
        for name, value in _pairs(names, values):
            if _is_trained(value):
                self._leaves[name] = weakref.ref(value)

    def pushed(self, names: Sequence[str], values: object) -> None:
        """Note the values of a push."""
        self._looks += 1
        for name, value in _pairs(names, values):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self._pushed[name] = value.data_ptr()

    def mistaken(self, names: Sequence[str], out: object) -> str | None:
        """Return a key whose gradient was pushed, and whose weight is written to; None if there is none."""
        for name, tensor in _pairs(names, out):
            known = self._leaves.get(name)
            leaf = tensor if _is_trained(tensor) else known() if known is not None else None
            if leaf is None or not isinstance(tensor, torch.Tensor) or leaf.grad is None:
                continue
            is_weight = tensor.data_ptr() == leaf.data_ptr() != 0
            if is_weight and self._pushed.get(name) == leaf.grad.data_ptr():
                return name
        return None


def _pairs(names: Sequence[str], values: object) -> list[tuple[str, Any]]:
    """Return the first keys, each with its value: of a list of one per device, the first."""
    given = values if isinstance(values, list | tuple) and len(values) == len(names) else [values]
    firsts = [value[0] if isinstance(value, list | tuple) and value else value for value in given[:LOOKS_MAX]]
    return list(zip(names, firsts, strict=False))


def _is_trained(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
