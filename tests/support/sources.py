"""The files of the package as syntax trees, for tests that allow something in few of them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import kvps

ROOT = Path(kvps.__file__).parent


def trees(words: Collection[str], folders: Collection[str] = ()) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path within the package, and the tree, of each file that has one of ``words`` in its text.

    To parse all files takes two seconds: a test names the words of what it looks for. ``folders`` are those of the package
    in which it looks, with all below them; none means everywhere.
    """
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 200
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        if not folders or name.rpartition("/")[0].partition("/")[0] in folders:
            text = file.read_text(encoding="utf-8")
            if any(word in text for word in words):
                yield name, ast.parse(text)
