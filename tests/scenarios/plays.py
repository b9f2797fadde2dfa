"""What all transcripts have in common: blocks of commands, options, and how they are performed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

Perform = Callable[[str], str]
"""Returns a transcript with the outputs of today."""


def plays(kind: str) -> list[Path]:
    """Return the transcripts of one kind."""
    return sorted(Path(__file__).parent.glob(f"{kind}-*.txt"))


def check(path: Path, perform: Perform, request: pytest.FixtureRequest) -> None:
    """Assert that a transcript is as it is today; with ``--rewrite``, make it so."""
    text = path.read_text(encoding="utf-8")
    now = perform(text)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(now, encoding="utf-8")
    else:
        assert now == text


def performed(text: str, show: Callable[[Sequence[str]], Sequence[str]]) -> str:
    """Return ``text`` with what ``show`` says comes of the commands of each block."""
    blocks = [block.split("\n----")[0] for block in text.strip("\n").split("\n\n")]
    return "\n".join(_performed(block.strip("\n").splitlines(), show) for block in blocks)


def _performed(lines: list[str], show: Callable[[Sequence[str]], Sequence[str]]) -> str:
    commands = [line for line in lines if not line.startswith("#")]
    if not commands:
        return "\n".join(lines) + "\n"
    return "\n".join([*lines, "----", *show(commands)]) + "\n"


def words_of(command: str) -> tuple[list[str], dict[str, object]]:
    """Return the words of a command, and its options."""
    given = command.split()
    options = [word.split("=") for word in given if "=" in word]
    words = [word for word in given if "=" not in word]
    return words, {name: value_of(value) for name, value in options}


def value_of(text: str) -> object:
    """Return what a Python literal means; other text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
