"""Sums of squares of one tensor: who has told them, and what they add up to."""

from __future__ import annotations

import pytest
import torch

from kvps.core.server.rules.whole_tensor import PartialNorms
from kvps.errors import Mismatch

ID = ("kv", "w", None, 3)
OTHERS = frozenset({0, 2})


def sums(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_whole_tensor_on_one_server() -> None:
    norm = PartialNorms(ID)
    assert (norm.mine, norm.complete) == ((), False)
    norm.measure(sums(1, 2), pieces=2, holders=frozenset())
    assert (norm.mine, norm.complete) == ((), False)
    norm.measure(sums(3, 4), pieces=2, holders=frozenset())
    assert (norm.mine, norm.complete) == ((4, 6), True)
    assert norm.total(1).tolist() == [4, 6]


def test_parts_on_other_servers_may_be_told_before_and_after() -> None:
    norm = PartialNorms(ID)
    norm.hear(2, (5, 6))
    norm.measure(sums(1, 2), pieces=1, holders=OTHERS)
    assert (norm.unheard, norm.complete) == ({0}, False)
    norm.hear(2, (5, 6))
    norm.hear(0, (7, 8))
    norm.hear(9, (100, 100))  # holds no part
    assert (norm.unheard, norm.complete) == (frozenset(), True)
    assert norm.total(1).tolist() == [13, 16]


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


def test_sums_that_are_no_numbers_travel_as_minus_one() -> None:
    one, other = PartialNorms(ID), PartialNorms(ID)
    one.measure(sums(float("inf"), 2), 1, frozenset({2}))
    other.measure(sums(1, float("nan")), 1, frozenset({1}))
    assert (one.mine, other.mine) == ((-1, 2), (1, -1))
    one.hear(2, other.mine)
    other.hear(1, one.mine)
    assert one.total(1).isnan().all()
    assert other.total(2).isnan().all()


def test_counts_are_what_sums_under_two_rules_have_in_common() -> None:
    norm = PartialNorms(ID, counts=True)
    norm.hear(0, (2, 5, 6), (7,))
    norm.measure(sums(0, 1, 1), pieces=2, holders=OTHERS)
    norm.measure(sums(1), pieces=2, holders=OTHERS, culprits=(4, 3))
    norm.hear(2, (0, 1, 1, 1, 1))
    assert norm.complete
    assert norm.total(1).tolist() == [3]
    assert norm.told == ((1,), (3, 4, 7))
