"""Plug-ins of a server: found in the working directory, but not in place of a package."""

import sys
from pathlib import Path

import pytest

from kvps.errors import ConfigError
from kvps.runtime import server_process


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Yield the search path of modules, which has no working directory."""
    found = [item for item in sys.path if item]
    monkeypatch.setattr(sys, "path", found)
    return found


def test_a_module_of_the_working_directory_stands_behind_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: list[str]
) -> None:
    """Or a file of any name there would take the place of whatever is imported later."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvps_plugin_of_a_test.py").write_text("FOUND = True\n")
    (tmp_path / "wave.py").write_text("raise RuntimeError('not the library')\n")
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    server_process._load("kvps_plugin_of_a_test")
    assert sys.modules.pop("kvps_plugin_of_a_test").FOUND
    assert path.count("") == 1
    server_process._load("wave")
    assert sys.modules["wave"].__file__ != str(tmp_path / "wave.py")


def test_a_plugin_that_there_is_not(path: list[str]) -> None:
    with pytest.raises(ConfigError, match="cannot import --plugin kvps_no_such_module"):
        server_process._load("kvps_no_such_module")
