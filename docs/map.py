"""The map of the packages in architecture.md, made from the first line of each module's docstring.

``python docs/map.py --write`` puts it there; without the flag it only checks, and ends with 1 where the page
is not what the tree says.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- map -->\n", "<!-- end of map -->\n"
WIDTH = 26


def main(arguments: list[str]) -> int:
    """Write or check the map; return the exit code."""
    page = PAGE.read_text("utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    made = f"{before}{BEGIN}\n```\n{drawn(ROOT / 'kvps')}```\n\n{END}{after}"
    if arguments == ["--write"]:
        PAGE.write_text(made, "utf-8")
        return 0
    if made != page:
        print("docs/architecture.md: the map is not that of the tree; run python docs/map.py --write")
        return 1
    return 0


def drawn(package: Path) -> str:
    """Return the map as text."""
    return "\n".join([f"{package.name}/", *_lines(package, "")]) + "\n"


def _lines(folder: Path, indent: str) -> Iterator[str]:
    files = sorted(one for one in folder.glob("*.py") if one.name != "__init__.py")
    folders = sorted(one for one in folder.iterdir() if (one / "__init__.py").exists())
    entries = [*files, *folders]
    for entry in entries:
        is_last = entry == entries[-1]
        name = f"{indent}{'└' if is_last else '├'}── {entry.name}{'/' if entry.is_dir() else ''}"
        source = entry / "__init__.py" if entry.is_dir() else entry
        yield f"{name:<{WIDTH + len(indent)}} {_summary(source)}"
        if entry.is_dir():
            yield from _lines(entry, indent + ("    " if is_last else "│   "))


def _summary(source: Path) -> str:
    docstring = ast.get_docstring(ast.parse(source.read_text("utf-8"))) or ""
    first = docstring.split("\n\n")[0].replace("\n", " ")
    return first.removesuffix(".")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
