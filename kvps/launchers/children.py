"""Processes of a launch, on this machine or on another, as one class: output, reports, signals.

A process on this machine is a child, and its two streams are its own. One on another host has a child
here that is ssh or srun: its stdout carries frames (:mod:`kvps.launchers.agent`), its stderr is what ssh
or srun itself has to say, and its stdin takes signals to the agent.

A foothold for ``kvps-launch``: the port and the private directory that let it restart the scheduler.

The scheduler keeps in the folder what a restart must know, and removes it when the job is over. So
what lies there tells a scheduler that was killed from one that has nothing more to do.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvps.errors import ConfigError
from kvps.launchers.agent import ERROR, OUT, FrameReader, StartOrder
from kvps.launchers.output import LineBuffer
from kvps.launchers.reaper import PIPED, Reaper, kill
from kvps.runtime.scheduler_process import STATE_FILE

ORDER_BYTES_MAX = 60_000
"""The bytes that a pipe takes before a process reads it; Linux has room for 65,536."""


@dataclass(slots=True, eq=False)
class Child:
    """One process that was started."""

    role: str
    rank: int
    number: int
    """The number of its colour."""
    process: subprocess.Popen[bytes]
    life: int = 0
    """How often it was started again."""
    host: str | None = None
    """The host on which it runs; None for this machine."""
    is_told: bool = False
    """A worker's end was reported, or seen."""
    lines: tuple[LineBuffer, LineBuffer] = field(default_factory=lambda: (LineBuffer(), LineBuffer()))
    """Its output: stdout and stderr."""
    _frames: FrameReader = field(default_factory=FrameReader)

    @property
    def name(self) -> str:
        """The prefix of its lines."""
        return self.role if self.role == "scheduler" else f"{self.role} {self.rank}"

    @property
    def fds(self) -> tuple[int, int]:
        """The descriptors of the streams that are read from it."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return self.process.stdout.fileno(), self.process.stderr.fileno()

    @property
    def has_begun(self) -> bool:
        """Whether it runs, as far as can be seen: on another host, whether its agent has answered."""
        return self.host is None or self._frames.version is not None

    def parts(self, fd: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Return the bytes read from a descriptor as (stream, bytes): OUT, ERROR or REPORT.

        Raises:
            ValueError: if another host sends what no agent writes.
        """
        is_out = fd == self.fds[0]
        if is_out and self.host is not None:
            yield from self._frames.feed(data)
        else:
            yield OUT if is_out else ERROR, data

    def signal(self, number: int) -> None:
        """Send it a signal; SIGKILL ends all that it has started, too."""
        if self.host is not None:
            self._tell(b"signal %d\n" % number)
        elif number == signal.SIGKILL:
            kill(self.process.pid)
        else:
            self.process.send_signal(number)

    def abandon(self) -> None:
        """Kill it, without waiting for another host: the agent there notices the end of its input."""
        if self.host is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
        kill(self.process.pid)

    def close(self) -> None:
        """Close the streams."""
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _tell(self, line: bytes) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            os.write(self.process.stdin.fileno(), line)


def start_here(
    argv: list[str], env: dict[str, str], fds: list[int], reaper: Reaper
) -> subprocess.Popen[bytes]:
    """Start a process on this machine, in a session of its own.

    Args:
        argv: its command line.
        env: its environment.
        fds: descriptors that it inherits.
        reaper: ends it when we end.
    """
    return _opened(reaper.start(argv, env=env, stdin=subprocess.DEVNULL, pass_fds=fds, **PIPED))


def start_there(argv: list[str], order: StartOrder, reaper: Reaper) -> subprocess.Popen[bytes]:
    """Start a process on another host.

    Args:
        argv: the command line of ssh or srun.
        order: for the agent there.
        reaper: ends ssh or srun when we end.

    Raises:
        ConfigError: if the order is too long, or the command is not there.
    """
    line = order.line()
    if len(line) > ORDER_BYTES_MAX:
        raise ConfigError(
            f"the command and the variables for another host are {len(line)} bytes, above "
            f"{ORDER_BYTES_MAX}: put what is long into a file"
        )
    try:
        process = reaper.start(argv, stdin=subprocess.PIPE, **PIPED)
    except OSError as error:
        raise ConfigError(
            f"cannot start {argv[0]}: {error.strerror}. Install it, or name another with --rsh"
        ) from error
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended; its exit code says so
        os.write(process.stdin.fileno(), line)
    return _opened(process)


def _opened(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
    return process


PREFIX = "kvps-launch-"


class Foothold:
    """A port of this machine and a private folder; the reaper removes the folder when we end."""

    def __init__(self, reaper: Reaper, host: str = "127.0.0.1") -> None:
        """Take both.

        Args:
            reaper: removes the folder.
            host: the address of this machine at which the scheduler listens.

        Raises:
            ConfigError: if the folder cannot be made.
        """
        try:
            self._folder = tempfile.mkdtemp(prefix=PREFIX)  # nobody else can read it
        except OSError as error:
            raise ConfigError(
                f"cannot create the directory for the scheduler's state ({error}), which "
                "--max-restarts needs: free space, or set TMPDIR to a writable directory"
            ) from error
        reaper.hold_folder(self._folder)
        # Bound and not listened on, so that nobody else gets the port while there is no scheduler.
        self._kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind((host, 0))

    @property
    def bind(self) -> str:
        """Where the scheduler listens, each time."""
        host, port = self._kept.getsockname()
        return f"tcp://{host}:{port}"

    @property
    def flags(self) -> list[str]:
        """Return the flags of the scheduler."""
        return ["--bind", self.bind, "--state", self._folder]

    def has_job(self, code: int) -> bool:
        """Whether the job goes on, of which a scheduler ended with ``code``; by 128 + N, signal N."""
        state = Path(self._folder, STATE_FILE)
        if not state.exists():
            return code > 128  # it was killed before there was anything to keep
        return state.stat().st_size > 0  # an empty one says that the job is over

    def close(self) -> None:
        """Give the port back."""
        self._kept.close()
