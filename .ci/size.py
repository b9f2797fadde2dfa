"""The sizes of kvps and of its tests, and the budgets that they stay under.

``python .ci/size.py`` prints a table and ends with 1 where a package is over its budget.
``--verbose`` adds the short files with a single importer; ``--lower`` lowers the budgets in
``.ci/budgets.toml`` to the sizes of the tree, and raises none. Code is every line that has code,
imports included; blank lines, comments and docstrings are none. Of tests all lines count.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = ROOT / ".ci" / "budgets.toml"
ANNEXES = ("compat", "platforms", "tools")
HEAD = """\
# Lines of code that each package of kvps may have, imports included, and lines that the tests may have.
# `make size` compares. Lower a budget when code goes; only an ADR raises one (docs/decisions/0041-*.md).
# The goal: parameter server 31,500, kvps 45,000, tests 80,000."""
SHORT = 80
"""Lines below which a file with a single importer is listed."""
SKIPPED = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)
"""Tokens that make no line one of code."""


class Size(NamedTuple):
    """The size of a file, or of several."""

    files: int = 0
    code: int = 0
    docstrings: int = 0
    lines: int = 0

    def plus(self, other: Size) -> Size:
        """Return the sum of both sizes."""
        return Size(*map(sum, zip(self, other, strict=True)))


def main(arguments: list[str]) -> int:
    """Print the table; return the exit code."""
    sizes, tests = measured(ROOT)
    budgets = tomllib.loads(BUDGETS.read_text("utf-8"))
    if "--lower" in arguments:
        budgets = lowered(sizes, tests, budgets)
        BUDGETS.write_text(text_of(budgets), "utf-8")
    rows = list(rows_of(sizes, tests, budgets))
    print("\n".join(table(rows)))
    if "--verbose" in arguments:
        print("\n".join(["", *short_files(ROOT)]))
    faults = [fault for row in rows if (fault := fault_of(*row))]
    missing = sorted(set(budgets["packages"]) - set(sizes))
    faults += [f"{BUDGETS.name}: there is no kvps/{name}; omit its budget" for name in missing]
    print("\n".join(["", *faults]) if faults else "", end="\n" if faults else "")
    return 1 if faults else 0


def measured(root: Path) -> tuple[dict[str, Size], int]:
    """Return the size of each package of kvps, and the lines of all tests."""
    sizes: dict[str, Size] = defaultdict(Size)
    for path in sorted((root / "kvps").rglob("*.py")):
        parts = path.relative_to(root / "kvps").parts
        sizes[parts[0] if len(parts) > 1 else "(top level)"] = sizes[
            parts[0] if len(parts) > 1 else "(top level)"
        ].plus(size_of(path.read_text("utf-8")))
    tests = sum(path.read_text("utf-8").count("\n") for path in sorted((root / "tests").rglob("*.py")))
    return dict(sizes), tests


def size_of(source: str) -> Size:
    """Return the size of a file.

    Example:
        >>> size_of('def one():\\n    "Return 1."\\n\\n    return 1  # always\\n')
        Size(files=1, code=2, docstrings=1, lines=4)
    """
    docstrings = set(docstring_lines(ast.parse(source)))
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIPPED:
            code.update(range(token.start[0], token.end[0] + 1))
    return Size(1, len(code - docstrings), len(docstrings), source.count("\n"))


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of docstrings, those of attributes included."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), end_lineno=int(end)):
                yield from range(node.lineno, end + 1)


def rows_of(
    sizes: Mapping[str, Size], tests: int, budgets: Mapping[str, Mapping[str, int]]
) -> Iterator[tuple[str, Size, int | None]]:
    """Yield (name, size, budget) of each package, and of the totals."""
    packages, totals = budgets["packages"], budgets["totals"]
    core = {name: size for name, size in sizes.items() if name not in ANNEXES}
    for group, total in ((core, "parameter server"), (sizes, "kvps")):
        listed = group if group is core else {name: sizes[name] for name in ANNEXES if name in sizes}
        for name in sorted(listed, key=lambda name: -listed[name].code):
            yield name, sizes[name], packages.get(name)
        yield total, added(group), totals[total]
    yield "tests", Size(code=tests, lines=tests), totals["tests"]


def lowered(
    sizes: Mapping[str, Size], tests: int, budgets: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Return the budgets, each no higher than its size."""
    now = {name: size.code for name, size, _ in rows_of(sizes, tests, budgets)}
    return {
        group: {name: min(limit, now[name]) for name, limit in limits.items() if name in now}
        for group, limits in budgets.items()
    }


def text_of(budgets: Mapping[str, Mapping[str, int]]) -> str:
    """Return the table of budgets as its file has it."""
    lines = [HEAD]
    for group, limits in budgets.items():
        lines += ["", f"[{group}]", *(f'"{name}" = {limit}' for name, limit in limits.items())]
    return "\n".join(lines) + "\n"


def added(sizes: Mapping[str, Size]) -> Size:
    """Return the sum of several sizes."""
    total = Size()
    for size in sizes.values():
        total = total.plus(size)
    return total


def table(rows: list[tuple[str, Size, int | None]]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"{'':<18}{'files':>7}{'docstrings':>12}{'code':>9}{'budget':>9}{'left':>8}"
    for name, size, budget in rows:
        is_total = name in ("parameter server", "kvps", "tests")
        if is_total:
            yield "─" * 63
        shown = f"{size.files:>7}{size.docstrings:>12,}" if name != "tests" else " " * 19
        allowed = f"{'none':>9}" if budget is None else f"{budget:>9,}{budget - size.code:>8,}"
        yield f"{name:<18}{shown}{size.code:>9,}{allowed}"
        if is_total:
            yield ""


def fault_of(name: str, size: Size, budget: int | None) -> str:
    """Return what is wrong with a row; empty where nothing is."""
    what = "test lines" if name == "tests" else "lines of code"
    if budget is None:
        return (
            f"kvps/{name} has no budget: add its {size.code:,} {what} to .ci/{BUDGETS.name}, and "
            "say in an ADR what pays for it"
        )
    if size.code <= budget:
        return ""
    return (
        f"{name}: {size.code:,} {what}, {size.code - budget:,} over the budget of {budget:,}. "
        "Delete what the change "
        f"makes dead, or merge what repeats; only an ADR raises a budget (.ci/{BUDGETS.name})"
    )


def short_files(root: Path) -> Iterator[str]:
    """Yield the files below :data:`SHORT` lines that a single module imports: each may belong to
    its importer."""
    names = {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for path in sorted((root / "kvps").rglob("*.py"))
    }
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    for name, path in names.items():
        for imported in imports_of(ast.parse(path.read_text("utf-8")), names):
            importers[imported].add(name)
    found = [
        (path.read_text("utf-8").count("\n"), name)
        for name, path in names.items()
        if path.name != "__init__.py" and len(importers[name]) == 1
    ]
    short = sorted((lines, name) for lines, name in found if lines < SHORT)
    total = sum(lines for lines, _ in short)
    yield f"{len(short)} files under {SHORT} lines with one importer, {total:,} lines"
    for name, number in sorted(Counter(name.split(".")[1] for _, name in short).items()):
        yield f"  {name}: {number}"
    for lines, name in short:
        yield f"  {lines:>4}  {name.replace('.', '/')}.py, for {next(iter(importers[name]))}"


def imports_of(tree: ast.Module, names: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of kvps that a module imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases if alias.name in names)
            case ast.ImportFrom(module=str(module), names=aliases):
                for alias in aliases:
                    whole = f"{module}.{alias.name}"
                    if whole in names:
                        yield whole
                    elif module in names:
                        yield module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
