"""Every line of the docs that says what holds names a test that there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROWS = [
    line
    for line in (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| what holds")
]
SECURITY = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
ROWS += [
    line
    for line in SECURITY.partition("## Shown by")[2].splitlines()
    if line.startswith("| ") and not line.startswith("| what holds")
]


@pytest.mark.parametrize("row", ROWS)
def test_it_names_a_test_that_there_is(row: str) -> None:
    named = re.search(r"\| `(tests/[\w/]+/test_\w+\.py)(?:::(test_\w+))?` \|$", row)
    assert named, "this line names no test"
    tree = ast.parse((ROOT / named[1]).read_text(encoding="utf-8"))
    functions = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    assert named[2] is None or named[2] in functions
    assert any(name.startswith("test_") for name in functions)
