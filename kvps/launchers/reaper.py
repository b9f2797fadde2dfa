"""The reaper: whatever ends a process, even SIGKILL, ends the process groups that it started.

It is a second process, forked before anything else happens, that does nothing but read a pipe.
When the pipe breaks, because its owner is gone, it kills the groups that it was told of and not
told to forget, and removes the folders that it was told of.

It looks like its owner, so that ``pkill -9`` by name kills both at once. The kernel therefore kills
what :meth:`Reaper.start` has started as well, though not what such a process starts in its turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
REMOVE_MAX_S = 2.0
"""Seconds of attempts to remove a directory: a process that was just killed may still write there."""
AGAIN_S = 0.05
PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
"""Arguments of :meth:`Reaper.start` for a process whose output is read."""


class Reaper:
    """The owner's end of a reaper. Make it before the process has threads."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        self._owner = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._writer)
                _hold(reader)
            finally:
                os._exit(0)
        os.close(reader)

    def start(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own; its group ends if our owner ends.

        The process says so itself, so that there is no moment at which it runs and is not held. The
        kernel kills it also without the reaper.

        Call this in the main thread: the kernel takes the end of the thread that forks for that of the owner.

        Args:
            argv: its command line.
            options: further arguments of Popen.
        """
        return subprocess.Popen(argv, start_new_session=True, preexec_fn=self._hold_me, **options)

    def _hold_me(self) -> None:
        """End the calling process's group if our owner ends: between fork and exec, by system calls alone."""
        os.write(self._writer, b"+%d\n" % os.getpid())
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._owner:  # it was gone before it could be told to the kernel
            os._exit(128 + signal.SIGKILL)

    def hold_folder(self, folder: str) -> None:
        """Remove this folder, and all that is in it, when we end."""
        os.write(self._writer, b"=%s\n" % os.fsencode(folder))

    def forget(self, group: int) -> None:
        """This process group has ended; its number may be given again."""
        os.write(self._writer, b"-%d\n" % group)

    def close(self) -> None:
        """End the reaper, and the processes that it still holds; its folders are removed by then."""
        os.close(self._writer)
        os.waitpid(self._pid, 0)


def kill(group: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process group, if there is one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _hold(reader: int) -> None:
    os.setsid()  # away from the terminal, whose Ctrl-C is for the owner
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # what our owner writes to must break when it ends
        os.dup2(nothing, fd)
    os.closerange(3, reader)
    os.closerange(reader + 1, os.sysconf("SC_OPEN_MAX"))
    groups: set[int] = set()
    folders: list[str] = []
    rest = b""
    while got := os.read(reader, 4096):
        *lines, rest = (rest + got).split(b"\n")
        for line in lines:
            match line[:1]:
                case b"=":
                    folders.append(os.fsdecode(line[1:]))
                case b"+":
                    groups.add(int(line[1:]))
                case _:
                    groups.discard(int(line[1:]))
    for group in groups:
        kill(group)
    until = time.monotonic() + REMOVE_MAX_S
    for folder in folders:
        while os.path.exists(folder):
            shutil.rmtree(folder, ignore_errors=True)
            if time.monotonic() >= until:
                break
            time.sleep(AGAIN_S)
