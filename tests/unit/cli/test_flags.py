"""The flags that every command takes."""

import importlib
import pkgutil

import pytest

import kvps.cli
from kvps.cli import checkpoint, flags, launch, main
from kvps.core.membership_client import EXIT_CONFIG

MODULES = {
    iter_module.name: importlib.import_module(f"kvps.cli.{iter_module.name}")
    for iter_module in pkgutil.iter_modules(kvps.cli.__path__)
} | {name: main.module_of(name) for name in main.COMMANDS}
COMMANDS = [
    (name, words)
    for name, module in MODULES.items()
    if hasattr(module, "main")
    for words in ([], *([action] for action in checkpoint.ACTIONS if name == "checkpoint"))
]


def test_all_commands_are_looked_at() -> None:
    names = {name for name, _ in COMMANDS}
    assert names == {"scheduler", "server", "worker", "launch", "main", *main.COMMANDS}


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=str)
def test_every_command_takes_the_common_flags(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        MODULES[name].main([*words, "--help"])
    assert ended.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    for flag in ("--log-level", "--version", "--insecure", "--keys DIR"):
        assert flag in told
    meanings = {"scheduler": flags.INSECURE, "server": flags.INSECURE, "launch": launch.KEYLESS}
    meanings["demo"] = MODULES["demo"].INSECURE
    assert meanings.get(name, flags.NEEDLESS) in told


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=str)
def test_help_fits_the_terminal_and_reads_well_in_a_wide_one(
    name: str,
    words: list[str],
    columns: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        MODULES[name].main([*words, "--help"])
    text = capsys.readouterr().out
    is_example = False
    for line in text.splitlines():
        is_example = line.startswith("example") or (is_example and line[:1] in ("", " "))
        assert len(line) <= min(columns, 110) or is_example, line
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit):
        MODULES[name].main([*words, "--help"])
    assert capsys.readouterr().out.split() == text.split(), "the same words at any width"


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=str)
def test_accepted_flags_are_not_named_in_the_error_of_a_wrong_line(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--", "true"] if name in ("worker", "launch") else []
    code = MODULES[name].main([*words, "--log-level", "info", "--insecure", "--nonsense", *more])
    assert code == EXIT_CONFIG
    told = capsys.readouterr().err
    if name != "main" and (name, words) != ("checkpoint", []):  # these want a word first
        assert "--insecure" not in told
