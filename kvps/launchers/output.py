"""The output of several processes on one screen: whole lines with names, and equal tracebacks once.

A progress bar is a line that is written over and over: "\r 10%", "\r 20%". In a terminal the
newest of them stands below the last whole line; anywhere else only its end is shown.

Theory of operation
-------------------
A mistake in a script ends all its workers, and each prints the same traceback. The lines of the
first process pass at once, and are kept. From the line ``Traceback (most recent call last):`` on,
the lines of another process are held back while they equal the kept ones. If they are equal to the
end, ranks take their place::

    [worker 0] Traceback (most recent call last):
    ...
    [worker 0] ValueError: no
    [workers 1-3] the same traceback as that of worker 0 above

If only the message differs, it is shown, and the calls are not. In any other case the held lines are shown. A
traceback ends with the output of its process, or :data:`PAUSE_S` after its last line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import StringIO
from shutil import get_terminal_size
from typing import BinaryIO, NamedTuple

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


HEADER = b"Traceback (most recent call last):"
PAUSE_S = 0.5
"""How long a line is held back, and how long the ranks of equal tracebacks are gathered."""
KEPT_MAX = 16
"""Tracebacks that are kept of each role; the oldest go."""
LINES_MAX = 1000
"""Lines that are kept of one."""
MESSAGE_MAX = 20
"""Lines of a message; what follows is other output."""
_RANK = re.compile(rb"^\[rank\d+\]: ?")
"""The prefix that torch.distributed gives each line of a traceback."""


class Who(NamedTuple):
    """A process."""

    role: str
    rank: int
    life: int = 0
    """How often it was started again."""

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


class Shown(NamedTuple):
    """Lines to show, and the processes that they are of: one, or those with the same traceback."""

    whose: tuple[Who, ...]
    lines: list[bytes]

    @property
    def name(self) -> str:
        """The prefix of each line, as ``workers 1-3``."""
        role, ranks = self.whose[0].role, sorted({who.rank for who in self.whose})
        return f"{role}{'s' if len(ranks) > 1 else ''} {', '.join(_spans(ranks))}"


def _spans(ranks: list[int]) -> Iterator[str]:
    begin = 0
    for at, rank in enumerate(ranks, 1):
        if at == len(ranks) or ranks[at] != rank + 1:
            first = ranks[begin]
            yield str(rank) if first == rank else f"{first}-{rank}"
            begin = at


@dataclass(slots=True, eq=False)
class _Traceback:
    """The traceback of one process, as far as it has come."""

    who: Who
    at: float
    """When its newest line came."""
    lines: list[bytes] = field(default_factory=list)
    """Without the rank that torch.distributed puts before each."""
    is_over: bool = False
    message: int = 0
    """Lines since the last call."""
    same: list[Who] = field(default_factory=list)
    """The processes with an equal traceback that were not told of yet."""
    same_at: float = 0.0

    def add(self, line: bytes, now: float) -> None:
        plain = _RANK.sub(b"", line)
        self.lines.append(plain)
        self.at = now
        self.message = 0 if plain.startswith(b" ") or plain == HEADER else self.message + 1
        if self.message >= MESSAGE_MAX or len(self.lines) >= LINES_MAX:
            self.is_over = True

    def may_become(self, other: _Traceback) -> bool:
        """Whether it begins like another one does."""
        both = min(len(self.lines), len(other.lines))
        is_within = both == len(self.lines) or not other.is_over
        return is_within and self.lines[:both] == other.lines[:both]


class TracebackFolder:
    """Holds back lines that were shown before, as lines of another process."""

    def __init__(self) -> None:
        self._kept: dict[str, list[_Traceback]] = {}
        """By role, the tracebacks of which at least the calls were shown."""
        self._own: dict[Who, _Traceback] = {}
        """Those whose lines are shown as they come."""
        self._held: dict[Who, tuple[_Traceback, list[bytes]]] = {}
        """Those that are equal to a kept one so far, with their lines as they came."""

    def feed(self, who: Who, lines: Iterable[bytes], now: float) -> list[bytes]:
        """Return the lines of a process that are to be shown now."""
        shown: list[bytes] = []
        for line in lines:
            shown += self._feed(who, line, now)
        return shown

    def _feed(self, who: Who, line: bytes, now: float) -> list[bytes]:
        if (own := self._own.get(who)) and (now > own.at + PAUSE_S or own.is_over):
            self._close(who)
        if who in self._held:
            return self._compare(who, line, now)
        if who in self._own:
            self._own[who].add(line, now)
            return [line]
        if _RANK.sub(b"", line) != HEADER:
            return [line]
        new = _Traceback(who, now)
        if any(kept.who != who for kept in self._kept.get(who.role, ())):
            self._held[who] = new, []
            return self._compare(who, line, now)
        new.add(line, now)
        self._keep(new)
        return [line]

    def _compare(self, who: Who, line: bytes, now: float) -> list[bytes]:
        """Hold a line back if it was shown before."""
        mine, held = self._held[who]
        before = self._like(mine)
        if any(other.is_over and other.lines == mine.lines for other in before):
            return [*self.end(who, now), *self._feed(who, line, now)]
        is_call = mine.lines and mine.lines[-1].startswith(b" ")
        mine.add(line, now)
        if self._like(mine):
            held.append(line)
            return []
        del self._held[who]
        self._keep(mine)
        if before and is_call and not mine.lines[-1].startswith(b" "):
            return [f"the same traceback as that of {before[0].who} above, with another end:".encode(), line]
        return [*held, line]

    def _like(self, mine: _Traceback) -> list[_Traceback]:
        kept = self._kept.get(mine.who.role, ())
        return [traceback for traceback in kept if traceback.who != mine.who and mine.may_become(traceback)]

    def _keep(self, traceback: _Traceback) -> None:
        self._own[traceback.who] = traceback
        kept = self._kept.setdefault(traceback.who.role, [])
        kept.append(traceback)
        while len(kept) > KEPT_MAX and not kept[0].same:
            kept.pop(0)

    def _close(self, who: Who) -> None:
        if own := self._own.pop(who, None):
            own.is_over = True

    def end(self, who: Who, now: float) -> list[bytes]:
        """A process prints nothing more for now; return the lines to be shown of it."""
        self._close(who)
        if who not in self._held:
            return []
        mine, held = self._held.pop(who)
        for other in self._like(mine):
            if other.lines == mine.lines:
                other.same.append(who)
                other.same_at = now
                return []
        return held

    def due(self) -> float | None:
        """Return when :meth:`on_time` has something to show."""
        times = [mine.at for mine, _ in self._held.values()]
        times += [traceback.same_at for kept in self._kept.values() for traceback in kept if traceback.same]
        return min(times) + PAUSE_S if times else None

    def on_time(self, now: float) -> Iterator[Shown]:
        """Yield the lines that were held back for long enough; with an infinite time, all lines."""
        for who, (mine, _) in list(self._held.items()):
            if now >= mine.at + PAUSE_S and (lines := self.end(who, mine.at)):
                yield Shown((who,), lines)
        for kept in self._kept.values():
            for traceback in kept:
                if traceback.same and now >= traceback.same_at + PAUSE_S:
                    yield Shown(
                        tuple(traceback.same),
                        [f"the same traceback as that of {traceback.who} above".encode()],
                    )
                    traceback.same = []
