"""Nothing in the package runs code that came as data: no pickle, no eval, no import by a name from elsewhere."""

import ast

import pytest

from tests.support.sources import ROOT, trees

MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__", "loads_pickle", "load_module", "exec_module"}
ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("torch", "package"),
    ("runpy", "run_path"),
    ("runpy", "run_module"),
    ("code", "interact"),
    ("np", "load"),
    ("numpy", "load"),
}
BY_NAME = {
    "__init__.py": "a table of public names and their modules",
    "annexes.py": "a table of the modules of the annexes",
    "backend_name.py": "a constant, a module of torch",
    "cli/main.py": "the subcommand, one of a table",
    "platforms/ray/__init__.py": "a table of public names and their modules",
    "runtime/server_process.py": "--plugin, which the server's operator says",
}
"""The files that import by a name, and where the name comes from."""
RUN = {"tools/bench/steps.py": "the training script that who calls `kvps doctor` names"}
"""The files that run a script, and whose."""
WORDS = {
    *(MODULES | {f"{name}(" for name in CALLS} | {f"{of}.{name}" for of, name in ATTRIBUTES}),
    *("allow_pickle", "weights_only", "import_module", "reload", "find_spec", "exec_module"),
}
"""The words of what :func:`faults` finds."""


def faults(tree: ast.AST) -> list[str]:
    """Return what a module does that could run code from data."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [field.name for field in names if field.name.partition(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                found.append(name)
            case ast.Attribute(value=ast.Name(id=of), attr=name) if (of, name) in ATTRIBUTES:
                found.append(f"{of}.{name}")
            case ast.keyword(arg="allow_pickle" | "weights_only"):
                found.append("allow_pickle")
            case ast.Attribute(attr="import_module" | "reload" | "find_spec" | "exec_module"):
                found.append("import by name")
            case ast.ImportFrom(module="importlib", names=names):
                found += ["import by name" for field in names if field.name == "import_module"]
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "importlib.import_module(name)",
        "from importlib import import_module",
    ],
)
def test_code_from_data_is_found(source: str) -> None:
    assert faults(ast.parse(source))


def test_no_code_comes_from_data() -> None:
    found = {}
    for name, tree in trees(WORDS):
        may = {*["import by name"] * (name in BY_NAME), *["runpy.run_path"] * (name in RUN)}
        wrong = set(faults(tree)) - may
        if wrong:
            found[name] = wrong
    assert not found


def test_each_exception_is_needed() -> None:
    for name in BY_NAME:
        assert "import by name" in faults(ast.parse((ROOT / name).read_text())), name
