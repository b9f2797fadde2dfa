"""Sums of squares of one tensor: who has told them, and what they add up to."""

import pytest
import torch

from kvps.core.server.rules.whole_tensor import PartialNorms
from kvps.errors import Mismatch

ID = ("kv", "w", None, 3)
OTHERS = frozenset({0, 2})


def sums(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_all_add_in_one_order() -> None:
    """In float64 1e16 + 1 + 1 is 1e16, and 1 + 1 + 1e16 is more."""
    parts = {0: 1.0, 1: 1.0, 2: 1e16}
    totals = set()
    for me in parts:
        norm = PartialNorms(ID)
        for server in sorted(parts.keys() - {me}, reverse=True):
            norm.hear(server, (parts[server],))
        norm.measure(sums(parts[me]), 1, frozenset(parts) - {me})
        totals.add(norm.total(me).item())
    assert totals == {1e16 + 2}


def test_sums_of_another_optimizer() -> None:
    norm = PartialNorms(ID)
    norm.hear(0, (1, 2, 3))
    norm.hear(2, (1, 2))
    norm.measure(sums(1, 2), 1, OTHERS)
    assert norm.unheard == {0}
    with pytest.raises(Mismatch, match="key 'w': server 0 sent 3 sums of squares, expected 2"):
        norm.hear(0, (1, 2, 3))


def test_measuring_a_piece_twice_is_a_bug() -> None:
    norm = PartialNorms(ID)
    norm.measure(sums(1), 1, OTHERS)
    with pytest.raises(AssertionError, match="more pieces measured"):
        norm.measure(sums(1), 1, OTHERS)
