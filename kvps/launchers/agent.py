"""The agent: the process that ssh or srun starts on a host, and that starts one process of the job there.

Its first line of input is the *order*, as JSON: what to run, where, with which environment and keys. So no
secret is in a command line. What the process prints goes back in frames.
Further lines are signals for it. The end of the input means that the launch, or the way to it, is gone: the
agent then kills the process with all that it has started.

A login shell may print something before the agent runs. So the stream from an agent to its launch begins
where the agent says that it is one, and of which version::

    \\nkvps-agent VERSION\\n
    kind (1 byte)  length (4 bytes, big-endian)  the bytes themselves      again and again
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

from kvps import __version__, config
from kvps.core.membership_client import EXIT_CONFIG
from kvps.launchers.reaper import PIPED, Reaper, kill
from kvps.net.memory import share_bytes
from kvps.runtime.key_files import KeyMemory, parse

READ_BYTES = 1 << 16
MODULE = "kvps.launchers.agent"
OUT = 0
ERROR = 1
REPORT = 2
"""A line of the report pipe: how a worker's command ended."""
GREETING = b"\nkvps-agent "
NOISE_MAX = 1 << 16
"""Bytes before the greeting; a shell that prints more is not quietly read for ever."""
LENGTH_MAX = 1 << 20
_HEAD = struct.Struct("!BI")


@dataclass(frozen=True, slots=True)
class StartOrder:
    """One process of the job, as its host needs it."""

    module: str
    """The command's module, such as ``kvps.cli.worker``."""
    words: list[str]
    env: dict[str, str]
    """Variables that are set in any case."""
    folder: str
    """The working directory."""
    version: str = __version__
    keys: str | None = None
    """The keys of the job, as text."""
    has_report: bool = False
    """The command takes ``--report-fd``."""
    servers: int = 0
    """If it is a server: how many of them share this host's memory."""
    processes: int = 1
    """How many processes of the job share this host's cores."""

    def line(self) -> bytes:
        """Return it as the agent's first line of input."""
        return json.dumps(asdict(self)).encode() + b"\n"


class NotStarted(Exception):
    """The order cannot be carried out; the text says why."""


def main() -> int:
    """Run the agent; return the exit code of its process."""
    _write(greeting(__version__))
    reaper = Reaper()
    try:
        return _Agent(reaper).run()
    except NotStarted as error:
        _write(frame(ERROR, f"{error}\n".encode()))
        return EXIT_CONFIG
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    finally:
        reaper.close()  # which kills what is left


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


class _Agent:
    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper
        self._input = b""
        self._selector = selectors.DefaultSelector()
        self._kinds: dict[int, int] = {}
        """The kind of frames for each stream that is read."""

    def run(self) -> int:
        order = self._order()
        report = os.pipe()
        with suppress(ValueError):  # not in the main thread, as in a test
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        process = self._start(order, report[1])
        os.close(report[1])
        assert process.stdout is not None
        assert process.stderr is not None
        self._kinds = {process.stdout.fileno(): OUT, process.stderr.fileno(): ERROR}
        self._kinds[report[0]] = REPORT
        for fd in (0, *self._kinds):
            self._selector.register(fd, selectors.EVENT_READ)
        ended, over = socket.socketpair()
        ended.setblocking(False)
        over.setblocking(False)
        signal.set_wakeup_fd(ended.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(over, selectors.EVENT_READ)
        self._obey(process)  # what came together with the order
        while process.poll() is None:
            for key, _ in self._selector.select():
                if key.fd == 0:
                    self._on_input(process)
                elif key.fileobj is over:
                    over.recv(4096)
                else:
                    self._relay(key.fd)
        for fd in list(self._kinds):
            os.set_blocking(fd, False)  # somebody who left its group may hold it open
            while fd in self._kinds and self._relay(fd):
                pass
        signal.set_wakeup_fd(-1)
        code = process.returncode
        return 128 - code if code < 0 else code

    def _order(self) -> StartOrder:
        while b"\n" not in self._input:
            got = os.read(0, READ_BYTES)
            if not got:
                raise NotStarted("the launch ended before it said what to start")
            self._input += got
        line, _, self._input = self._input.partition(b"\n")
        given = json.loads(line)
        host = socket.gethostname()
        if given.get("version") != __version__:
            raise NotStarted(
                f"host {host} has kvps {__version__}, and the launch has kvps {given.get('version')}: "
                "install the same version on both"
            )
        return StartOrder(**given)

    def _start(self, order: StartOrder, report_fd: int) -> subprocess.Popen[bytes]:
        host = socket.gethostname()
        try:
            os.chdir(order.folder)
        except OSError as error:
            raise NotStarted(
                f"host {host}: cannot go to the directory {order.folder} ({error.strerror}), where the "
                "launch was started: share it, or start from a directory that all hosts have"
            ) from error
        flags, fds = [], []
        if order.has_report:
            flags += ["--report-fd", str(report_fd)]
            fds.append(report_fd)
        if order.keys is not None:
            keys = KeyMemory(parse(order.keys, "the launch's order"))
            flags += ["--keys", f"/dev/fd/{keys.fd}"]
            fds.append(keys.fd)
        if order.servers and config.text("KVPS_MEMORY_LIMIT", env=order.env) is None:
            flags += ["--memory-limit", str(share_bytes(order.servers))]
        threads = max(1, len(os.sched_getaffinity(0)) // order.processes)
        defaults = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        argv = [sys.executable, "-P", "-m", order.module, *flags, *order.words]
        env = config.environment(order.env, defaults)
        return self._reaper.start(argv, env=env, stdin=subprocess.DEVNULL, pass_fds=fds, **PIPED)

    def _on_input(self, process: subprocess.Popen[bytes]) -> None:
        """Pass signals on; at the end of the input, kill the process."""
        got = os.read(0, READ_BYTES)
        if not got:
            self._selector.unregister(0)
            kill(process.pid)
            return
        self._input += got
        self._obey(process)

    def _obey(self, process: subprocess.Popen[bytes]) -> None:
        *lines, self._input = self._input.split(b"\n")
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"signal" and int(number) == signal.SIGKILL:
                kill(process.pid)
            elif word == b"signal":
                process.send_signal(int(number))

    def _relay(self, fd: int) -> bool:
        """Pass on the output of one stream that can be read now; return whether there was any."""
        try:
            got = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if got:
            _write(frame(self._kinds[fd], got))
        else:
            self._selector.unregister(fd)
            del self._kinds[fd]
        return bool(got)


def greeting(version: str) -> bytes:
    """Return the beginning of the stream."""
    return GREETING + version.encode() + b"\n"


def frame(kind: int, data: bytes) -> bytes:
    """Return one frame."""
    return _HEAD.pack(kind, len(data)) + data


class FrameReader:
    """The reader's end of one stream."""

    def __init__(self) -> None:
        self.version: str | None = None
        """The version that the agent gave; None until it has."""
        self._rest = b""

    def feed(self, more: bytes) -> Iterator[tuple[int, bytes]]:
        """Return the frames that end in ``more``.

        Raises:
            ValueError: if no agent writes this.
        """
        self._rest += more
        if self.version is None and not self._greeted():
            return
        while len(self._rest) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._rest)
            if kind > REPORT or length > LENGTH_MAX:
                raise ValueError(f"a frame of kind {kind} with {length} bytes")
            stop = _HEAD.size + length
            if len(self._rest) < stop:
                return
            data, self._rest = self._rest[_HEAD.size : stop], self._rest[stop:]
            yield kind, data

    def _greeted(self) -> bool:
        noise, found, after = self._rest.partition(GREETING)
        version, ends, rest = after.partition(b"\n")
        if found and ends:
            self.version, self._rest = version.decode(errors="replace"), rest
            return True
        if len(noise) > NOISE_MAX:
            raise ValueError(f"{len(noise)} bytes of something else")
        return False


if __name__ == "__main__":
    sys.exit(main())
