"""Every command in the pages exists, with every flag, script, module, target and variable that it names."""

import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from benchmarks.compare.systems import SYSTEMS as MEASURED
from kvps.cli.main import COMMANDS, module_of

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").glob("**/*.md")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
OURS = re.compile(r"(?:KVPS_\w+=\S* )*(?:kvps(?:-\w+)?|python|make) +[-\w./]")
PROSE = re.compile(r"kvps [a-z]+ [a-z]+ [a-z]+ [a-z]+")
"""A sentence about kvps, and no command."""
OUTPUT = frozenset({"python", "text", "yaml", "abnf", "dockerfile", "ini", "json"})
SYSTEMS = frozenset(MEASURED)
"""Rows of the benchmark's table: "kvps fp16" is no command."""
OTHERS = {"tools/launch.py", "train.py", "survive.py", "use.py"}
"""Scripts that are the reader's, or another project's."""


def commands_of(text: str) -> Iterator[str]:
    """Yield the commands of a page."""
    for language, block in FENCED.findall(text):
        if language not in OUTPUT:
            for line in block.replace("\\\n", " ").splitlines():
                line = line.strip().removeprefix("$ ").removeprefix("sudo ")
                if OURS.match(line) and not PROSE.match(line):
                    yield line
    for code in INLINE.findall(FENCED.sub("", text)):
        if OURS.match(code) and code not in SYSTEMS:
            yield code


CASES = sorted(
    {
        (page.relative_to(ROOT).as_posix(), command)
        for page in PAGES
        if "_build" not in page.parts
        for command in commands_of(page.read_text("utf-8"))
    }
)


@cache
def help_of(command: str, *subcommands: str) -> str:
    """Return what a command prints for --help."""
    if command == "kvps":
        module, more = module_of(subcommands[0]), subcommands[1:]
    else:
        name = command.removeprefix("kvps-")
        module, more = importlib.import_module(f"kvps.cli.{name}"), subcommands
    printed = StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        module.main([*more, "--help"])
    return printed.getvalue()


def faults_of(words: list[str]) -> Iterator[str]:
    """Yield what a command names that there is not."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        name = words.pop(0).partition("=")[0]
        if name.startswith("KVPS_") and not is_in_source(name):
            yield f"no variable {name}"
    if not words:
        return
    command, *rest = words
    if command == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        yield from (f"no target {item}" for item in rest if item.islower() and item not in targets)
    elif command == "python":
        yield from faults_of_python(rest)
    elif command.startswith("kvps"):
        own, _, script = split(rest)
        names: list[str] = []
        if command == "kvps":
            names = own[: 2 if own[0] == "checkpoint" and own[1:2] and own[1].isalpha() else 1]
            if names[0] not in COMMANDS:
                yield f"no command kvps {names[0]}"
                return
        text = help_of(command, *names)
        for flag in own:
            if re.match(r"--?[a-zA-Z]", flag) and flag.split("=")[0] not in flags_in(text):
                yield f"{' '.join([command, *names])} has no flag {flag.split('=')[0]}"
        yield from faults_of(script)


def split(words: list[str]) -> tuple[list[str], str, list[str]]:
    """Return the words before a double dash, it, and those behind it."""
    if "--" in words:
        at = words.index("--")
        return words[:at], "--", words[at + 1 :]
    return words, "", []


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text))


def faults_of_python(words: list[str]) -> Iterator[str]:
    """Yield what a call of Python names that there is not."""
    if words[:1] == ["-m"]:
        module = words[1]
        if importlib.util.find_spec(module) is None:
            yield f"no module {module}"
        if module == "pytest":
            paths = [word.split("::")[0] for word in words[2:] if word.startswith("tests/")]
            yield from (f"no file {path}" for path in paths if not (ROOT / path).exists())
    elif words and words[0].endswith(".py") and words[0] not in OTHERS:
        script = ROOT / words[0]
        if not script.exists():
            yield f"no file {words[0]}"
            return
        source = script.read_text("utf-8")
        for flag in words[1:]:
            if flag.startswith("--") and flag.split("=")[0] not in source:
                yield f"{words[0]} has no flag {flag}"


@cache
def is_in_source(name: str) -> bool:
    files = [*(ROOT / "kvps").rglob("*.py"), *(ROOT / "tests" / "simulation").glob("*.py")]
    return any(name in path.read_text("utf-8") for path in files)


def test_commands_of_every_kind_exist() -> None:
    found = {command.split()[0] for _, command in CASES}
    assert {"kvps", "kvps-launch", "kvps-scheduler", "kvps-server", "kvps-worker"} <= found
    assert {"python", "make"} <= found
    assert len(CASES) > 60


@pytest.mark.parametrize("page", sorted({page for page, _ in CASES}))
def test_a_page_names_what_there_is(page: str) -> None:
    faults = [
        f"{command!r}: {fault}"
        for where, command in CASES
        if where == page
        for fault in faults_of(shlex.split(command.rstrip("& "), comments=True))
    ]
    assert not faults
