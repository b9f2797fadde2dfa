"""Flags, settings and logging that all commands share, the report of a wrong flag, and the layout
of ``--help``.

A setting comes from its flag, else from its ``KVPS_*`` variable, else from its default. What is
wrong with it is a :class:`~kvps.errors.ConfigError` that names the flag or the variable, and the
command ends with exit code 78.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from shutil import get_terminal_size
from typing import NoReturn, TypeVar

from kvps import __version__, config
from kvps.core.limits import TABLE, Limits
from kvps.core.membership_client import EXIT_CONFIG, EXIT_TEMPORARY
from kvps.errors import ConfigError, KvpsError, SchedulerLost, Unauthorized
from kvps.inquiry import inquire
from kvps.net.zap import Keys
from kvps.observe import logs
from kvps.observe.place import Place, as_place
from kvps.protocol.envelope import Answer, Message, Packet
from kvps.runtime.key_files import load_if_any

T = TypeVar("T")
EXIT_PIPE = 141
"""The exit code of a shell's command that SIGPIPE ends."""
LEVELS = ("debug", "info", "warning", "error")
INSECURE = "allow --bind to an address that other machines can reach, without --keys; KVPS_INSECURE=1"
NEEDLESS = "no effect here: no other machine can reach this command; every command accepts it"
EXIT_CODES = """\
exit codes:
  0   done
  75  temporary, start it again: the scheduler did not answer, or became silent
  78  wrong configuration, do not start it again: a bad flag, a port in use, keys that are
      refused, a rank whose process is alive
  1   any other error
"""


class Parser(argparse.ArgumentParser):
    """A parser of flags whose help keeps its lines, and whose mistakes end with 78.

    It has the flags that every command takes, so that one line of a script serves them all.

    Args:
        name: the command.
        page: its help, as the docstring of its module: a title, which is not printed, the description, and
            the text behind the flags. ``{exit_codes}`` stands for :data:`EXIT_CODES`.
        insecure: the help of ``--insecure``, where the flag has an effect.
        values: texts for other names in braces.
    """

    def __init__(self, name: str, page: str | None, *, insecure: str = "", **values: str) -> None:
        _, what, more = (page or "\n\n\n\n").split("\n\n", 2)  # python -OO strips docstrings
        super().__init__(
            prog=name,
            description=what,
            epilog=more.format(name=name, exit_codes=EXIT_CODES, **values),
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        self.add_flags(
            {
                "--log-level LEVEL": f"{', '.join(LEVELS)}; KVPS_LOG_LEVEL (warning: no output unless "
                "something is wrong)",
                "--log-format FORMAT": "text, or json: one object per line with time, level, role, rank, "
                "event and fields; KVPS_LOG_FORMAT (text)",
                "--insecure": insecure or NEEDLESS,
                "--keys DIR": "a directory of keys from 'kvps keygen', or a file with the keys of this "
                "process; KVPS_KEYS (none)",
            }
        )
        self.add_argument("--version", action="version", version=f"{name} {__version__}")

    def add_flags(self, table: Mapping[str, str]) -> None:
        """Add the flags of a table, each with its help.

        Example:
            >>> Parser("kvps", None).add_flags({"-n --workers N": "number", "--env NAME=VALUE ...": "repeated"})
        """
        for words, what in table.items():
            names = [word for word in words.split() if word.startswith("-")]
            metavar = " ".join([word for word in words.split() if word not in (*names, "...")])
            if metavar:
                action = "append" if words.endswith(" ...") else "store"
                self.add_argument(*names, action=action, metavar=metavar, help=what)
            else:
                self.add_argument(*names, action="store_true", help=what)

    def error(self, message: str) -> NoReturn:
        """Print the error in the flags, and end."""
        raise ConfigError(f"{message}; see {self.prog} --help")


SCHEDULER = {
    "--scheduler tcp://HOST:PORT": f"where kvps-scheduler listens; KVPS_SCHEDULER ({config.DEFAULT_SCHEDULER})"
}
GRACE = {
    "--grace SECONDS": "after SIGTERM, let COMMAND finish its current round and leave; kill it after this "
    "time; KVPS_GRACE",
}
CHECKPOINT_EVERY = {
    "--checkpoint-every SECONDS": "interval of checkpoints; 0: only on kv.checkpoint(); KVPS_CHECKPOINT_EVERY (0)",
}
HTTP = {
    "--http HOST:PORT": "serve /livez, /readyz, /metrics and /statusz there; port 0: any free port; /metrics "
    "needs kvps[metrics]; KVPS_HTTP, which takes a free port where its own is in use (no endpoints)",
}


def asking(default_s: float) -> dict[str, str]:
    """Return the flags of commands that ask a scheduler; :func:`timeout_of` reads one of them."""
    return {**SCHEDULER, "--timeout SECONDS": f"how long to wait for an answer; KVPS_TIMEOUT ({default_s:g})"}


def limits_flag(role: str) -> dict[str, str]:
    """Return ``--limit``, for the named limits of a role."""
    names = ", ".join([f"{limit.name} ({limit.default})" for limit in TABLE.values() if role in limit.roles])
    return {
        "--limit NAME=NUMBER ...": "set a limit, beyond which requests are refused; may be repeated: "
        f"{names}; KVPS_LIMITS (separated by commas)",
    }


def limits_of(parsed: argparse.Namespace, role: str) -> Limits:
    """Return the named limits.

    Raises:
        ConfigError: if one is not known to this role, or is no number.
    """
    return config.limits(parsed.limit or (), role)


def http_of(parsed: argparse.Namespace) -> Place | None:
    """Return where to serve HTTP; None for nowhere.

    Raises:
        ConfigError: if the value is no address, or other machines can reach it and nothing protects it.
    """
    place = setting(parsed, "http", as_place, None)
    if place is not None:
        place.demand_safe(is_insecure(parsed))
    return place


def setting(parsed: argparse.Namespace, name: str, read: Callable[[str, str], T], default: T) -> T:
    """Return the setting ``name``: of its flag, its variable, or the default.

    Raises:
        ConfigError: if ``read``, which gets the name and the text, does not accept the value.
    """
    flag = vars(parsed).get(name)
    if flag is not None:
        return read(f"--{name.replace('_', '-')}", flag)
    variable = f"KVPS_{name.upper()}"
    given = config.text(variable)
    return default if given is None else read(variable, given)


def timeout_of(parsed: argparse.Namespace, default_s: float) -> float:
    """Return for how many seconds an answer is awaited.

    Raises:
        ConfigError: if the value is no number of seconds.
    """
    return setting(parsed, "timeout", config.as_seconds, default_s)


def scheduler_of(parsed: argparse.Namespace) -> str:
    """Return where the scheduler is.

    Raises:
        ConfigError: if the value is no address.
    """
    found = config.dmlc_cluster()
    default = config.DEFAULT_SCHEDULER if found is None else found.scheduler
    return setting(parsed, "scheduler", config.as_address, default)


def ask(
    name: str,
    parsed: argparse.Namespace,
    role: str,
    default_s: float,
    request: Callable[[float], Message],
    answer: type[Answer],
    more_s: float = 0.0,
) -> Packet:
    """Return the scheduler's answer to a request of a command, with the flags of :func:`asking`.

    Args:
        name: the command, for its log.
        parsed: its flags.
        role: the role whose key it needs.
        default_s: seconds that the answer may take, without ``--timeout``.
        request: returns what to ask, of these seconds.
        answer: the class of the answer.
        more_s: seconds that the answer may take beyond.

    Raises:
        KvpsError: if a value cannot be used, or the scheduler refuses or does not answer.
    """
    start_log(name, parsed)
    limit_s = timeout_of(parsed, default_s)
    return inquire(scheduler_of(parsed), request(limit_s), answer, keys_of(parsed, role), limit_s + more_s)


def is_insecure(parsed: argparse.Namespace) -> bool:
    """Return whether the operator insists on listening without keys."""
    return bool(parsed.insecure) or config.switch("KVPS_INSECURE")


def keys_of(parsed: argparse.Namespace, role: str) -> Keys | None:
    """Return the keys of this process; None where none were given.

    Args:
        parsed: the flags.
        role: the role of the process, as in :func:`kvps.runtime.key_files.load`.

    Raises:
        ConfigError: if a value cannot be used.
    """
    return load_if_any(parsed.keys or config.keys_path(), role)


def split(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags, and the command behind ``--``.

    Raises:
        ConfigError: if there is none.
    """
    given = list(argv)
    at = given.index("--") if "--" in given else len(given)
    parsed, command = parser.parse_args(given[:at]), given[at + 1 :]
    if not command:
        parser.error("no command: put it after --, as in '-- python train.py'")
    return parsed, command


def level(name: str, given: str) -> str:
    """Return a log level.

    Raises:
        ConfigError: if it is none.
    """
    if given.lower() not in LEVELS:
        raise ConfigError(f"{name}={given!r}: use one of {', '.join(LEVELS)}")
    return given.lower()


def command(name: str) -> Callable[[Callable[[Sequence[str]], int]], Callable[..., int]]:
    """Return a decorator of a command: it gets the words of the command line, and returns the exit code.

    An error of kvps is printed, and becomes an exit code.
    """

    def decorate(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
        @wraps(main)
        def run(argv: Sequence[str] | None = None) -> int:
            words = list(sys.argv[1:] if argv is None else argv)
            try:
                try:
                    return main(words)
                finally:
                    print(end="", flush=True)  # an error at the interpreter's end cannot be caught
            except BrokenPipeError:  # the reader, such as head, has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                return EXIT_PIPE
            except KvpsError as error:
                is_json = logs.wants_json(words)
                print(logs.complaint(name, error) if is_json else f"{name}: {error}", file=sys.stderr)
                if isinstance(error, ConfigError | Unauthorized):
                    return EXIT_CONFIG
                return EXIT_TEMPORARY if isinstance(error, SchedulerLost) else 1
            except KeyboardInterrupt:
                return 130

        return run

    return decorate


def start_log(name: str, parsed: argparse.Namespace, handler: logging.Handler | None = None) -> str:
    """Send the log to ``handler``, else to stderr; return its level.

    Raises:
        ConfigError: for an unknown level or format.
    """
    chosen = setting(parsed, "log_level", level, "warning")
    sink = handler or logging.StreamHandler()
    if log_format(parsed) == "json":
        sink.setFormatter(logs.JsonLines())
        logging.captureWarnings(True)
    else:
        sink.setFormatter(_Lines(name))
    logs.speak_as(lambda: logs.Speaker(logs.role_of(name)))
    logging.basicConfig(level=chosen.upper(), handlers=[sink])
    return chosen


def log_format(parsed: argparse.Namespace) -> str:
    """Return the format of log lines: ``text`` or ``json``.

    Raises:
        ConfigError: for an unknown format.
    """
    return setting(parsed, "log_format", logs.as_format, "text")


class _Lines(logging.Formatter):
    """``kvps-server: error: text``, and for an expert's eyes the time before it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        text = f"{self._name}: {record.levelname.lower()}: {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if logging.getLogger().level <= logging.INFO:
            text = f"{self.formatTime(record, '%H:%M:%S')}.{record.msecs:03.0f} {text}"
        return text


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
