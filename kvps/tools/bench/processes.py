"""The processes of one trial: started together, waited for without polling, ended together.

A trial is over when all processes that measure have ended; those that serve them then get some
seconds to end by themselves. If one fails, all are ended, and the error has its last words.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Self

from kvps.errors import KvpsError
from kvps.launchers.reaper import Reaper
from kvps.tools.bench.rounds import RESULT

TRIAL_MAX_S = 1800.0
SERVERS_MAX_S = 10.0
"""Seconds that servers may take to end when all workers have."""
END_MAX_S = 15.0
"""Seconds that a process may take when it is asked to end; more than kvps-launch gives its own."""
WORDS = 8
"""The number of last lines of a failed process that are shown."""


@dataclass(slots=True)
class _Child:
    name: str
    popen: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]
    pidfd: int
    is_measured: bool


class Group:
    """The processes of one trial. Use it in a ``with`` block, which leaves none of them."""

    def __init__(self, reaper: Reaper, limit_s: float = TRIAL_MAX_S) -> None:
        self._reaper = reaper
        self._limit_s = limit_s
        self._children: list[_Child] = []
        self._outputs: list[str] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._selector.close()

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        is_measured: bool = False,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start a process; the trial is over when those that are measured have ended."""
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - see _take
        popen = subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # Ctrl-C is for us; we end them
            pass_fds=pass_fds,
            preexec_fn=self._reaper.hold_me,  # there is no moment at which it runs and is not held
        )
        self._reaper.hold(popen.pid)
        child = _Child(name, popen, out, err, os.pidfd_open(popen.pid), is_measured)
        self._children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, partial(self._take, child))

    def wait(self) -> list[list[float]]:
        """Wait until the trial is over; return its times, one list per worker.

        Raises:
            KvpsError: if a process failed, or the trial takes too long.
        """
        self._turn_until(lambda: not any(child.is_measured for child in self._children), self._limit_s)
        if any(child.is_measured for child in self._children):
            names = ", ".join(child.name for child in self._children)
            raise KvpsError(f"after {self._limit_s:g} s still running: {names}; measure fewer rounds")
        with suppress(KvpsError):  # the output of a server after the end of all workers is no news
            self._turn_until(lambda: not self._children, SERVERS_MAX_S)
        return [times for output in self._outputs for times in times_in(output)]

    def _turn_until(self, is_done: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not is_done() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                key.data()

    def _take(self, child: _Child) -> None:
        """A process has ended.

        Raises:
            KvpsError: if it did not end well.
        """
        with suppress(ProcessLookupError):  # the processes that it left running; its number is still its own
            os.killpg(child.popen.pid, signal.SIGKILL)
        code = child.popen.wait()
        self._forget(child)
        output, words = _read(child.out), _read(child.err)
        if code:
            said = "\n".join((words.strip() or output.strip()).splitlines()[-WORDS:])
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise KvpsError(f"{child.name} {how}; its last output:\n{said}")
        self._outputs.append(output)

    def _forget(self, child: _Child) -> None:
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        self._reaper.forget(child.popen.pid)
        self._children.remove(child)

    def _end(self) -> None:
        """End the processes that are left: terminate them, and after a while kill them."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + END_MAX_S
        for child in list(self._children):
            with suppress(subprocess.TimeoutExpired):
                child.popen.wait(max(0.0, deadline - time.monotonic()))
        self._signal(signal.SIGKILL)
        for child in list(self._children):
            child.popen.wait()
            self._forget(child)
            child.out.close()
            child.err.close()

    def _signal(self, number: int) -> None:
        for child in self._children:
            with suppress(ProcessLookupError):
                os.killpg(child.popen.pid, number)


def times_in(output: str) -> list[list[float]]:
    """Return the times in the output of a process: one list for each line with a result."""
    lines = (line.partition(RESULT) for line in output.splitlines())
    return [json.loads(found)["rounds_ms"] for _, mark, found in lines if mark]


def _read(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")
