"""Log lines as JSON: an object per line with the time, the level, the role and rank of its
process, and the event.

Text is the default, in the format of :mod:`kvps.cli.flags`. With ``--log-format json``, or
``KVPS_LOG_FORMAT=json``, every line that a command or the stores of a script write is an object::

    {"time": "2026-11-24T08:30:00.250000Z", "level": "warning", "role": "server", "rank": 0,
     "event": "store 'w': rounds close again", "fields": {"pid": 4711}}

A process has a speaker: the role and rank that its lines carry. A thread that runs another
member's loop has its own.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvps import config
from kvps.errors import ConfigError

FORMATS = ("text", "json")
VARIABLE = "KVPS_LOG_FORMAT"
LEVEL_VARIABLE = "KVPS_LOG_LEVEL"


class Speaker(NamedTuple):
    """The role and rank that log lines carry."""

    role: str
    rank: int | None = None
    """None while the process has no rank, and for commands that never have one."""


_process: Callable[[], Speaker] = lambda: Speaker("script")  # noqa: E731, replaced by speak_as
_threads = threading.local()


def speak_as(who: Callable[[], Speaker]) -> None:
    """Let the log lines of this process carry the role and rank that ``who()`` returns then."""
    global _process
    _process = who


def speak_in_thread_as(who: Callable[[], Speaker]) -> None:
    """Let the log lines of the calling thread carry another role and rank than its process's."""
    _threads.who = who


def speaker() -> Speaker:
    """Return the role and rank of the calling thread."""
    return getattr(_threads, "who", _process)()


def as_format(name: str, given: str) -> str:
    """Return a log format.

    Raises:
        ConfigError: if it is none.
    """
    if given.lower() not in FORMATS:
        raise ConfigError(f"{name}={given!r}: use one of {', '.join(FORMATS)}")
    return given.lower()


def line(level: str, event: str, who: Speaker, fields: Mapping[str, object], at: float | None = None) -> str:
    """Return one line.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        event: the text, as the text format has it.
        who: the role and rank of its process.
        fields: names and values that the text has in words; the process id, a traceback.
        at: seconds since 1970; now if None.

    Example:
        >>> line("info", "joined", Speaker("server", 1), {"pid": 7}, at=0.5)
        '{"time": "1970-01-01T00:00:00.500000Z", "level": "info", "role": "server", "rank": 1,
        "event": "joined", "fields": {"pid": 7}}'
    """
    seconds = time.time() if at is None else at
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    shown = {
        "time": f"{stamp}.{int(seconds % 1 * 1e6):06d}Z",
        "level": level,
        **who._asdict(),
        "event": event,
        "fields": dict(fields),
    }
    return json.dumps(shown, default=str)


def wrapped(text: bytes, who: Speaker, stream: str) -> bytes:
    """Return a line of another process's output as JSON: unchanged if it is a log line, else as an event.

    Args:
        text: the line, without its end.
        who: the role and rank of that process.
        stream: ``stdout`` or ``stderr``.
    """
    if text.startswith(b"{"):
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if isinstance(found, dict) and {"level", "event"} <= found.keys():
            return text
    return line("info", text.decode(errors="replace"), who, {"stream": stream}).encode()


class JsonLines(logging.Formatter):
    """Formats records as such lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        fields: dict[str, object] = {"pid": record.process, **getattr(record, "fields", {})}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        level, event = record.levelname.lower(), record.getMessage()
        return line(level, event, speaker(), fields, record.created)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # of stderr, whatever that is
    """Writes the lines of a script's stores."""


def begin_in_script() -> None:
    """Write the log of this process's stores to stderr as JSON, if ``KVPS_LOG_FORMAT`` says so.

    A script's own logging is left as it is: without the variable, nothing changes.

    Raises:
        ConfigError: if the variable, or ``KVPS_LOG_LEVEL``, has no such value.
    """
    given = config.text(VARIABLE)
    log = logging.getLogger("kvps")
    root = [present for present in logging.getLogger().handlers if isinstance(present.formatter, JsonLines)]
    is_begun = root or any(isinstance(present, _Handler) for present in log.handlers)
    if given is None or as_format(VARIABLE, given) == "text" or is_begun:
        return
    handler = _Handler()
    handler.setFormatter(JsonLines())
    log.addHandler(handler)
    log.propagate = False
    level = (config.text(LEVEL_VARIABLE) or "warning").upper()
    try:
        log.setLevel(level)
    except ValueError as error:
        raise ConfigError(f"{LEVEL_VARIABLE}={level.lower()!r}: there is no such level") from error


def wants_json(argv: list[str]) -> bool:
    """Return whether flags or the environment ask for JSON, before they are parsed."""
    flag = "--log-format"
    for at, word in enumerate(argv):
        if word == "--":
            break
        if word.startswith(flag):
            given = word.partition("=")[2] or "".join(argv[at + 1 : at + 2])
            return given.lower() == "json"
    return (config.text(VARIABLE) or "").lower() == "json"


def complaint(name: str, error: Exception) -> str:
    """Return the line by which a command ends with an error."""
    return line("error", str(error), Speaker(role_of(name)), {"pid": os.getpid()})


def role_of(name: str) -> str:
    """Return the role of a command.

    Example:
        >>> role_of("kvps-server"), role_of("kvps status")
        ('server', 'kvps status')
    """
    return name.removeprefix("kvps-")
