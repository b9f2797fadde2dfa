"""The checks of a wheel before a release, on wheels that lack something."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvps import __version__

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy"))
import release  # noqa: E402  (a script of deploy/)

FILES = {"kvps/__init__.py": "", "kvps/cli/main.py": "", "kvps/py.typed": ""}
ENTRIES = "[console_scripts]\nkvps = kvps.cli.main:main\n"
ABOUT = f"Name: kvps\nVersion: {__version__}\nRequires-Python: >=3.11\n"


def wheel(folder: Path, name: str = "kvps-1-py3-none-any.whl", **changes: str | None) -> Path:
    """Make a wheel; ``changes`` replace its files, or leave them out."""
    info = "kvps-1.dist-info"
    licenses = {f"{info}/licenses/{item}": "" for item in release.PROJECT["license-files"]}
    made = {**FILES, f"{info}/METADATA": ABOUT, f"{info}/entry_points.txt": ENTRIES, **licenses}
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in {**made, **changes}.items():
            if content is not None:
                archive.writestr(file, content)
    return path


def faults(path: Path) -> list[str]:
    return list(release.faults_of(path, set(FILES)))


def test_a_sound_wheel_has_no_faults(tmp_path: Path) -> None:
    assert faults(wheel(tmp_path)) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kvps/py.typed": None}, "kvps/py.typed is missing"),
        ({"kvps/more.py": ""}, "kvps/more.py is not in git"),
        ({"tests/test_all.py": ""}, "tests/test_all.py is not in git"),
        (
            {"kvps-1.dist-info/METADATA": ABOUT.replace(__version__, "9.9")},
            f"has version 9.9, and kvps/__init__.py {__version__}",
        ),
        ({"kvps-1.dist-info/METADATA": ABOUT.replace("3.11", "3.8")}, "requires Python >=3.8"),
        ({"kvps-1.dist-info/licenses/LICENSE": None}, "the license LICENSE is missing"),
        (
            {"kvps-1.dist-info/entry_points.txt": ENTRIES.replace("cli.main", "cli.gone")},
            "kvps runs kvps.cli.gone:main, which is not there",
        ),
    ],
)
def test_faults_are_named(tmp_path: Path, changes: dict[str, str | None], says: str) -> None:
    assert faults(wheel(tmp_path, **changes)) == [says]


def test_a_wheel_of_one_python_is_not_for_all(tmp_path: Path) -> None:
    path = wheel(tmp_path, "kvps-1-cp311-cp311-linux_x86_64.whl")
    assert faults(path) == ["is not for every Python and processor"]


def test_the_package_in_git_has_what_the_commands_run() -> None:
    files = release.tracked()
    assert {"kvps/__init__.py", "kvps/py.typed", "kvps/tools/dashboard/page/index.html"} <= files
    assert all(Path(file).parts[0] == "kvps" for file in files)
    for target in release.PROJECT["scripts"].values():
        assert target.partition(":")[0].replace(".", "/") + ".py" in files
    assert release.version() == __version__


def test_a_command_that_fails_ends_it_with_what_it_printed() -> None:
    with pytest.raises(SystemExit, match="exit code 3\nbroken"):
        release.run(sys.executable, "-c", "import sys; print('broken'); sys.exit(3)", quiet=True)


def test_pythons_that_do_not_start_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in (("python3.12", 0), ("python3.13", 127)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert release.pythons() == [str(tmp_path / "python3.12")]
    (tmp_path / "python3.12").unlink()
    with pytest.raises(SystemExit, match="name some with --python"):
        release.pythons()


def test_help_says_what_it_does() -> None:
    argv = [sys.executable, ROOT / "deploy" / "release.py", "--help"]
    told = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert "--no-torch" in told
