"""The parts of the documentation that are made from the code: doors of cores, layers, the map of the tree.

``docs/architecture.md`` has the doors, the layers, and the packages with the first line of each docstring;
``docs/internals/map.md`` has every module. ``python docs/map.py --write`` puts them there; without the flag
it only checks, and ends with 1 where a page is not what the code says.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
MAP = ROOT / "docs" / "internals" / "map.md"
WIDTH = 26
LINE = 110
CORES = {
    "scheduler": ("core/scheduler/scheduler.py", "Scheduler"),
    "server": ("core/server/server.py", "Server"),
    "worker": ("core/worker/worker.py", "Worker"),
    "kvps-worker": ("core/supervisor.py", "Supervisor"),
}


def main(arguments: list[str]) -> int:
    """Write or check the pages; return the exit code."""
    package = ROOT / "kvps"
    sections = {
        ARCHITECTURE: {"doors": doors(package), "layers": layers(), "packages": drawn(package, depth=2)},
        MAP: {"map": drawn(package)},
    }
    exit_code = 0
    for path, parts in sections.items():
        page = made = path.read_text("utf-8")
        for name, text in parts.items():
            begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
            before, rest = made.split(begin)
            made = f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
        if arguments == ["--write"]:
            path.write_text(made, "utf-8")
        elif made != page:
            where = path.relative_to(ROOT)
            print(f"{where}: a part is not what the code says; run python docs/map.py --write")
            exit_code = 1
    return exit_code


def doors(package: Path) -> str:
    """Return the methods of every core, as code, and a table of the further doors of each."""
    core = {method.name: method for method in _doors(package / "core/effects.py", "Core")}
    lines = ["```python", "class Core(Protocol):"]
    lines += [line for method in core.values() for line in _signature(method)]
    lines += ["```", "", "| core | further doors |", "|---|---|"]
    for role, (path, name) in CORES.items():
        own = [method for method in _doors(package / path, name) if method.name not in core]
        described = [f"`{method.name}`: {_first_line(method)}" for method in own]
        lines.append(f"| {role} | {'; '.join(described)} |")
    return "\n".join(lines) + "\n"


def _doors(path: Path, name: str) -> Iterator[ast.FunctionDef]:
    """Yield the public methods of a class that are told the time, and those by which the loop asks."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    is_told = method.args.args[-1].arg == "now" and ast.unparse(method.returns) == "None"
                    if is_told or method.name in ("admit", "deadline"):
                        yield method


def _signature(method: ast.FunctionDef) -> list[str]:
    """Return a method without its body, laid out as ruff does."""
    line = f"    {ast.unparse(method).splitlines()[0]} ..."
    if len(line) <= LINE:
        return [line]
    begin, rest = line.split("(", 1)
    arguments, end = rest.rsplit(") ->", 1)
    return [f"{begin}(", f"        {arguments}", f"    ) ->{end}"]


def _first_line(method: ast.FunctionDef) -> str:
    return (ast.get_docstring(method) or "").split("\n\n")[0].replace("\n", " ").removesuffix(".")


def layers() -> str:
    """Return the layers of imports as a block, the uppermost first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (found,) = (contract["layers"] for contract in contracts if contract["id"] == "layers")
    return "\n".join(["```", *(layer for layer in found if layer != "__main__"), "```"]) + "\n"


def drawn(package: Path, depth: int | None = None) -> str:
    """Return the map as a block; with ``depth``, only packages, down to so many levels."""
    return "\n".join(["```", f"{package.name}/", *_lines(package, "", depth), "```"]) + "\n"


def _lines(folder: Path, indent: str, depth: int | None) -> Iterator[str]:
    files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    folders = sorted(path for path in folder.iterdir() if (path / "__init__.py").exists())
    entries = [*files, *folders] if depth is None else folders
    for entry in entries:
        is_last = entry == entries[-1]
        name = f"{indent}{'└' if is_last else '├'}── {entry.name}{'/' if entry.is_dir() else ''}"
        source = entry / "__init__.py" if entry.is_dir() else entry
        yield f"{name:<{WIDTH + len(indent)}} {_summary(source)}"
        if entry.is_dir() and depth != 1:
            below = None if depth is None else depth - 1
            yield from _lines(entry, indent + ("    " if is_last else "│   "), below)


def _summary(source: Path) -> str:
    docstring = ast.get_docstring(ast.parse(source.read_text("utf-8"))) or ""
    first = docstring.split("\n\n")[0].replace("\n", " ")
    return first.removesuffix(".")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
