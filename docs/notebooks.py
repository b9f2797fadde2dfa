"""The notebooks of examples/notebooks, made from the scripts of examples/: a cell for each part,
and a cluster to run it in.

``python docs/notebooks.py --write`` makes them; without the flag it only checks, and ends with 1
where a notebook is not what its script says. They have no outputs: a test runs them.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
FOLDER = EXAMPLES / "notebooks"
PICTURE = "curve.png"


class Run(NamedTuple):
    """The last cell of a notebook: how its script's ``main`` is run there."""

    flags: tuple[str, ...]
    workers: int = 2
    """Workers of the cluster; 0 for a script that starts its own."""
    has_picture: bool = True


RUNS = {
    "digits": Run(("--epochs", "6", "--min-accuracy", "0.9")),
    "linear_numpy": Run((), workers=3),
    "gluon_digits": Run(("--epochs", "4", "--min-accuracy", "0.9")),
    "horovod_digits": Run(("--epochs", "4", "--min-accuracy", "0.9")),
    "gpt": Run(("--steps", "60", "--max-loss", "3.5")),
    "word_vectors": Run(("--seconds", "8", "--min-gain", "0")),
    "async_vs_sync": Run(("--seconds", "3"), workers=0),
    "compressed_digits": Run(
        ("--codecs", "fp16", "2bit", "--epochs", "4", "--min-accuracy", "0.9"), workers=0, has_picture=False
    ),
}
"""Script -> how it is run, shorter than by itself. Scripts that start processes, or measure their
own, have no notebook."""


def main(arguments: list[str]) -> int:
    """Write or check the notebooks; return the exit code."""
    stale = []
    for name in RUNS:
        path, made = FOLDER / f"{name}.ipynb", notebook(name)
        if arguments == ["--write"]:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(made, "utf-8")
        elif not path.exists() or path.read_text("utf-8") != made:
            stale.append(path.relative_to(ROOT).as_posix())
    if stale:
        print(f"{', '.join(stale)}: not what the script says; run python docs/notebooks.py --write")
    return 1 if stale else 0


def notebook(name: str) -> str:
    """Return the notebook of a script, as a file."""
    source = (EXAMPLES / f"{name}.py").read_text("utf-8")
    cells = [*_cells(name, source)]
    for number, cell in enumerate(cells):
        cell["id"] = f"{name.replace('_', '-')}-{number}"
    made = {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _cells(name: str, source: str) -> Iterator[dict[str, Any]]:
    tree = ast.parse(source)
    title, _, rest = (ast.get_docstring(tree) or "").partition("\n\n")
    paragraphs = [one for one in rest.split("\n\n") if not one.startswith("    ")]
    text = "\n\n".join(
        [
            f"# {title.removesuffix('.')}",
            *[one.replace("``", "`") for one in paragraphs],
            f"The cells are those of `examples/{name}.py`. The last one runs them, for a shorter time. "
            "You need `pip install 'kvps[examples]'`.",
        ]
    )
    yield _markdown(text)
    if "from digits import" in source:
        yield _code('import sys\n\nsys.path.insert(0, "..")  # digits.py is there')
    for part in _parts(source, tree):
        yield _code(part)
    yield from _run(RUNS[name])


def _parts(source: str, tree: ast.Module) -> Iterator[str]:
    """Yield the top-level code of a script: imports and constants together, each function and class alone."""
    lines = source.splitlines()
    body = tree.body[1:]  # without the docstring
    body = [one for one in body if not isinstance(one, ast.If)]  # and without the call of main()
    begin = tree.body[0].end_lineno or 0
    gathered: list[str] = []
    for node in body:
        chunk = "\n".join(lines[begin : node.end_lineno]).strip("\n")
        begin = node.end_lineno or begin
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if gathered:
                yield "\n".join(gathered).strip("\n")
                gathered = []
            yield chunk
        else:
            gathered.append(("\n" if lines[node.lineno - 2] == "" else "") + chunk)
    if gathered:
        yield "\n".join(gathered).strip("\n")


def _run(run: Run) -> Iterator[dict[str, Any]]:
    flags = [*run.flags, *(("--plot", PICTURE) if run.has_picture else ())]
    arguments = json.dumps(flags)
    if run.workers:
        yield _markdown(
            f"## Run it\n\n`LocalCluster` starts a scheduler, 2 servers and {run.workers} workers "
            "in this process. Rank 0 "
            "prints."
        )
        code = [
            "import kvps",
            "",
            f"with kvps.LocalCluster(workers={run.workers}, servers=2) as cluster:",
            f"    codes = cluster.run(lambda rank: main({arguments}))",
            f"assert codes == [0] * {run.workers}, codes",
        ]
    else:
        yield _markdown("## Run it\n\nThe script starts a cluster of its own.")
        code = [f"assert main({arguments}) == 0"]
    yield _code("\n".join(code))
    if run.has_picture:
        yield _code(f'from IPython.display import Image\n\nImage("{PICTURE}")')


def _markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": "", "metadata": {}, "source": text.splitlines(keepends=True)}


def _code(text: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": "",
        "metadata": {},
        "outputs": [],
        "source": text.splitlines(keepends=True),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
