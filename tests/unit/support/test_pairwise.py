"""The cases that the everyday tier plays of a test with many parameters."""

from itertools import product

from tests.support.pairwise import cover


def test_every_pair_of_values_occurs() -> None:
    cases = [{"a": a, "b": b, "c": c, "d": d} for a, b, c, d in product("123", "123", "12", "12")]
    chosen = [cases[index] for index in cover(cases)]
    assert len(chosen) < 12 < len(cases)
    for item, other in ("ab", "ac", "ad", "bc", "bd", "cd"):
        pairs = {(case[item], case[other]) for case in chosen}
        assert pairs == {(case[item], case[other]) for case in cases}


def test_cases_that_do_not_exist_are_not_missed() -> None:
    cases = [{"a": "0", "b": "0", "c": c} for c in "01"] + [{"a": "1", "b": "1", "c": "1"}]
    assert cover(cases) == {0, 1, 2}


def test_single_and_paired_parameters_are_covered_completely() -> None:
    assert cover([{"a": value} for value in "12345"]) == set(range(5))
    two = [{"a": a, "b": b} for a, b in product("123", "1234")]
    assert cover(two) == set(range(12))
    assert cover([]) == set()
