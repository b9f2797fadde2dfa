"""The layout of ``--help``: as wide as the terminal, up to a width that reads well.

Descriptions and epilogs are written for :data:`WIDTH_MAX` columns, and shown as they are where they fit. In a narrower
terminal their paragraphs and lists are filled anew, and examples stay as they are, to be copied.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from shutil import get_terminal_size

WIDTH_MAX = 110
"""Columns beyond which lines would be hard to read."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills what does not fit."""

    def __init__(self, prog: str) -> None:
        columns = min(get_terminal_size().columns, WIDTH_MAX)
        super().__init__(prog, max_help_position=24 if columns >= 72 else 12, width=columns - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        if max(map(len, lines), default=0) <= width + 2:
            return super()._fill_text(text, width, indent)
        return "\n".join(indent + line for line in _filled(lines, width))


def _filled(lines: list[str], width: int) -> Iterator[str]:
    is_example, block = False, ""
    for line in [*lines, ""]:
        depth = len(line) - len(line.lstrip())
        of_block = len(block) - len(block.lstrip())
        # A deeper line, and one behind a comma, continue the entry of a list.
        is_more = depth > of_block > 0 or (depth == of_block > 0 and block.endswith(","))
        if line and block and not is_example and (is_more or depth == of_block == 0):
            block += f" {line.strip()}"
            continue
        if block:
            yield from [block] if is_example and of_block else _wrapped(block, of_block, width)
        if line and depth == 0:
            is_example = line.startswith("example")
        if not line:
            yield ""
        block = line


def _wrapped(block: str, depth: int, width: int) -> list[str]:
    first, hang = " " * depth, " " * (depth + 2 if depth else 0)
    return textwrap.wrap(
        block.strip(),
        width,
        initial_indent=first,
        subsequent_indent=hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
