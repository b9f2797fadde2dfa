"""A leash: whatever ends a process, even SIGKILL, ends the process groups that it started.

It is a second process, forked before anything else happens, that does nothing but read a pipe.
When the pipe breaks, because its owner is gone, it kills the groups that it was told of and not
told to forget.
"""

from __future__ import annotations

import contextlib
import os
import signal


class Leash:
    """The owner's end of a leash. Make it before the process has threads."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._writer)
                _hold(reader)
            finally:
                os._exit(0)
        os.close(reader)

    def hold(self, group: int) -> None:
        """End this process group if we end."""
        os.write(self._writer, b"+%d\n" % group)

    def hold_me(self) -> None:
        """End the calling process's group if our owner ends.

        For ``preexec_fn`` of a Popen with ``start_new_session=True``: said by the new process itself, so
        that there is no moment at which it runs and is not held. It runs between fork and exec, and
        does no more than this one write.
        """
        os.write(self._writer, b"+%d\n" % os.getpid())

    def forget(self, group: int) -> None:
        """This process group has ended; its number may be given again."""
        os.write(self._writer, b"-%d\n" % group)

    def close(self) -> None:
        """End the leash, and what it still holds."""
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
    rest = b""
    while got := os.read(reader, 4096):
        *lines, rest = (rest + got).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        kill(group)
