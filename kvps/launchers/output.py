"""The output of several processes on one screen: whole lines, each with its process's name.

A progress bar is a line that is written over and over: "\r 10%", "\r 20%". In a terminal the
newest of them stands below the last whole line; anywhere else only its end is shown.
"""

from __future__ import annotations

import os
from io import StringIO
from shutil import get_terminal_size
from typing import BinaryIO

LINE_MAX = 1 << 16
"""Bytes after which a line that does not end is ended."""
BAR_WIDTH = 30
"""Columns of a progress bar."""
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_CLEAR = b"\r\x1b[2K"


class LineBuffer:
    """One stream of one process, cut into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, more: bytes) -> list[bytes]:
        """Return the lines that end in ``more``, without their ends."""
        *lines, self._rest = (self._rest + more).split(b"\n")
        if b"\r" in self._rest:
            is_written_over = self._rest.endswith(b"\r")
            self._rest = self.unfinished + b"\r" if is_written_over else b"\r" + self.unfinished
        while len(self._rest) > LINE_MAX:
            lines.append(self._rest[:LINE_MAX])
            self._rest = self._rest[LINE_MAX:]
        return [shown(line) for line in lines]

    @property
    def unfinished(self) -> bytes:
        """The visible part of the line that has no end yet."""
        return shown(self._rest)

    def end(self) -> list[bytes]:
        """Return the unfinished line when the stream ends."""
        rest, self._rest = self.unfinished, b""
        return [rest] if rest else []


def shown(line: bytes) -> bytes:
    """Return the visible part of a line that was written over."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def bar_text(done: int, total: int, what: str) -> str:
    """Return a progress bar as text, with its numbers.

    Example:
        >>> bar_text(1, 4, "processes have joined")
        '━━━━━━━╸                       1 of 4 processes have joined'
    """
    from rich.console import Console
    from rich.progress_bar import ProgressBar

    console = Console(file=StringIO(), width=BAR_WIDTH, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(ProgressBar(total, done, width=BAR_WIDTH), end="")
    return f"{captured.get():<{BAR_WIDTH}} {done} of {total} {what}"


class OutputMux:
    """Where lines go: stdout and stderr, of which each may be a terminal."""

    def __init__(self, out: BinaryIO, error: BinaryIO, colour: bool, *, is_json: bool = False) -> None:
        self._sinks = (out, error)
        self.is_json = is_json
        """Lines are JSON objects that name their process, so that no prefix does."""
        self._is_terminal = tuple(sink.isatty() for sink in self._sinks)
        self._colour = colour
        self._below = b""
        """The unfinished line that stands below all others."""
        self._status = b""
        """The text that stands there while no process has an unfinished line."""

    def prefix(self, name: str, number: int, sink: int) -> bytes:
        """Return what stands before each line of process ``number``."""
        text = f"[{name}]".encode()
        if not (self._colour and self._is_terminal[sink]):
            return text + b" "
        return b"\x1b[%dm%s\x1b[0m " % (_COLOURS[number % len(_COLOURS)], text)

    @property
    def has_status(self) -> bool:
        """Whether a status is shown: one of the streams is a terminal, and lines are not JSON."""
        return any(self._is_terminal) and not self.is_json

    def set_status(self, text: str) -> None:
        """Let ``text`` stand below all lines while no process has an unfinished one; empty for nothing."""
        is_free = self._below == self._status
        self._status = text.encode()
        if self.has_status and is_free:
            self._clear()
            self._draw(self._status)

    def write(self, sink: int, prefix: bytes, lines: list[bytes], unfinished: bytes = b"") -> None:
        """Show whole lines on stdout (0) or stderr (1), and perhaps an unfinished one.

        Raises:
            BrokenPipeError: if its reader is gone.
        """
        below = prefix + unfinished if unfinished and self._is_terminal[sink] else self._below
        if not lines and below == self._below:
            return
        if lines and below == self._below and below.startswith(prefix):
            below = b""  # that line is whole now
        below = below or self._status
        target = self._sinks[sink]
        try:
            self._clear()
            target.write(b"".join(prefix + line + b"\n" for line in lines))
            target.flush()
            self._draw(below)
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, target.fileno())  # else the end of the process would try again
            os.close(nothing)
            raise

    def close(self) -> None:
        """Leave the terminal as it should be."""
        self._status = b""
        self._clear()

    def _clear(self) -> None:
        if self._below:
            self._below = b""
            self._terminal().write(_CLEAR)
            self._terminal().flush()

    def _draw(self, below: bytes) -> None:
        if below:
            self._below = below
            text = below.decode(errors="replace")
            if "\x1b" not in text:  # else nobody knows how wide it is
                text = text[: get_terminal_size().columns - 1]
            self._terminal().write(text.encode())
            self._terminal().flush()

    def _terminal(self) -> BinaryIO:
        return self._sinks[0] if self._is_terminal[0] else self._sinks[1]
