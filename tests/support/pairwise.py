"""Pairwise covers: the few cases of a test with many parameters in which each pair of values occurs.

Most defects need one value, or two that meet. So the everyday tier plays, of a test that is marked ``pairwise``, a
set of cases in which any two values of any two parameters occur together; ``--all`` plays the product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Pair = frozenset[tuple[str, str]]


def cover(cases: Sequence[Mapping[str, str]]) -> set[int]:
    """Return the indices of some of ``cases`` that have all pairs of values that all of them have.

    Args:
        cases: for each, its parameters, each with its value in words.
    """
    pairs = [_pairs(case) for case in cases]
    left = set[Pair]().union(*pairs)
    chosen: set[int] = set()
    while left:
        best = max(range(len(cases)), key=lambda index: len(pairs[index] & left))
        chosen.add(best)
        left -= pairs[best]
    return chosen


def _pairs(case: Mapping[str, str]) -> set[Pair]:
    """Return the pairs of a case; its values alone where there is but one parameter."""
    together = combinations(case.items(), 2) if len(case) > 1 else [[value] for value in case.items()]
    return {frozenset(values) for values in together}


def repeats(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return those cases of tests marked ``pairwise`` that the everyday tier can do without."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        is_case = isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if is_case and item.get_closest_marker("pairwise"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: list[pytest.Item] = []
    for cases in tests.values():
        chosen = cover(
            [{name: repr(value) for name, value in case.callspec.params.items()} for case in cases]
        )
        left_out += [case for index, case in enumerate(cases) if index not in chosen]
    return left_out
