"""Every line of the docs that says what holds names a test that there is."""

import ast

import pytest

from tests.support.claims import ROOT, TEST, lines


@pytest.mark.parametrize("line", lines())
def test_guarantee_names_a_test_that_exists(line: str) -> None:
    named = TEST.search(line)
    assert named, "this line names no test"
    tree = ast.parse((ROOT / named[1]).read_text(encoding="utf-8"))
    functions = {field.name for field in tree.body if isinstance(field, ast.FunctionDef)}
    assert named[2] is None or named[2] in functions
    assert any(name.startswith("test_") for name in functions)
