"""``python -m kvps`` tells a newcomer where to begin, and runs commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvps import __version__
from kvps.__main__ import main, start
from kvps.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


def test_help_names_every_command_and_where_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert __version__ in told
    for name in COMMANDS:
        assert re.search(rf"^  kvps {name} ", told, re.MULTILINE)
    for name in ("kvps-launch", "kvps-scheduler", "kvps-server", "kvps-worker"):
        assert name in told
    for place in ("examples/README.md", "docs/quickstart.md"):
        assert str(ROOT / place) in told
    assert max(map(len, told.splitlines())) <= 120


def test_an_installed_package_names_the_source(tmp_path: Path) -> None:
    text = start(tmp_path)
    assert "examples/README.md in the source" in text
    assert str(tmp_path) not in text


def test_arguments_are_those_of_kvps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "--help"])
    assert ended.value.code == 0
    assert "usage: kvps checkpoint" in capsys.readouterr().out


def test_kvps_runs_as_a_module_without_torch() -> None:
    code = "import runpy, sys; sys.argv = ['kvps']\n"
    code += "try: runpy.run_module('kvps', run_name='__main__')\n"
    code += "except SystemExit as end: assert end.code == 0\n"
    code += "assert 'torch' not in sys.modules"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "kvps-launch" in told.stdout
