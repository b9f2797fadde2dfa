"""Tables by name: each starts what exists, with the flags that follow."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare import __main__ as command
from benchmarks.compare import named

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("name", named.TABLES)
def test_table_names_a_benchmark_that_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[list[str]] = []

    def start(argv: list[str]) -> subprocess.CompletedProcess[bytes]:
        run.append(argv)
        return subprocess.CompletedProcess(argv, 7)

    monkeypatch.setattr(named.subprocess, "run", start)
    assert command.main([name, "--quick"]) == 7
    assert (run[0][0], run[0][-1]) == (sys.executable, "--quick")
    words = named.TABLES[name].words
    files = [word for word in words if word.endswith(".py")]
    modules = [word.replace(".", "/") for word in words if word.startswith("benchmarks.")]
    assert files or modules
    assert all((ROOT / file).exists() for file in files)
    assert all((ROOT / f"{path}.py").exists() or (ROOT / path / "__main__.py").exists() for path in modules)


def test_tables_are_listed_in_the_help_and_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parser().parse_args(["--help"])
    said, readme = capsys.readouterr().out, (ROOT / "benchmarks" / "README.md").read_text()
    for name in named.TABLES:
        assert f"\n  {name}" in said
        assert f"`{name}`" in readme
