"""``make size``: the lines that count, and the budgets that fail."""

import pytest

from tests.support.scripts import script

size = script(".ci/size.py")
SOURCE = '''\
"""A module
of two lines."""

import os  # counts

LIMIT = 3
"""An attribute's docstring."""


def text() -> str:
    # a comment
    return """two
lines"""
'''
BUDGETS = {"packages": {"core": 10, "tools": 10}, "totals": {"parameter server": 10, "kvps": 15, "tests": 5}}


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    assert size.size_of(SOURCE) == size.Size(files=1, code=5, docstrings=3, lines=13)


@pytest.mark.parametrize(
    ("core", "tools", "tests", "over"),
    [(10, 5, 5, []), (11, 4, 5, ["core", "parameter server"]), (8, 8, 5, ["kvps"]), (8, 7, 6, ["tests"])],
)
def test_each_budget_fails_by_itself(core: int, tools: int, tests: int, over: list[str]) -> None:
    sizes = {"core": size.Size(code=core), "tools": size.Size(code=tools)}
    rows = list(size.rows_of(sizes, tests, BUDGETS))
    assert [row[0] for row in rows if size.fault_of(*row)] == over


def test_package_without_budget_fails() -> None:
    rows = size.rows_of({"new": size.Size(code=1)}, 1, BUDGETS)
    faults = [fault for row in rows if (fault := size.fault_of(*row))]
    assert faults == [
        "kvps/new has no budget: add its 1 lines of code to .ci/budgets.toml, and say in an ADR what pays for it"
    ]


def test_budgets_are_lowered_and_never_raised() -> None:
    sizes = {"core": size.Size(code=4), "tools": size.Size(code=20)}
    assert size.lowered(sizes, 9, BUDGETS) == {
        "packages": {"core": 4, "tools": 10},
        "totals": {"parameter server": 4, "kvps": 15, "tests": 5},
    }
