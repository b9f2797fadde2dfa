"""One trial of one system on this machine: its processes and their environments.

Every system gets one thread per process and ports of its own. kvps runs under ``kvps-launch`` as
for a user; the workers of gloo are started here.

The processes of one trial: started together, waited for without polling, ended together.

A trial is over when all processes that measure have ended; those that serve them then get some
seconds to end by themselves. If one fails, all are ended, and the error has its last words.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Self

from kvps import config
from kvps.errors import KvpsError
from kvps.launchers.reaper import Reaper
from kvps.tools.bench.figures import Case, TrialTimes, slowest
from kvps.tools.bench.rounds import RESULT
from kvps.tools.bench.systems import System

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
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        popen = self._reaper.start(argv, env=env, cwd=cwd, pass_fds=pass_fds, **streams)
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


LOOPBACK = "127.0.0.1"
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
KVPS_WORKER = "kvps.tools.bench.worker"
GLOO_WORKER = "kvps.tools.bench.gloo"


def measure(system: System, case: Case, rounds: int, reaper: Reaper) -> TrialTimes:
    """Run a system once.

    Raises:
        KvpsError: if it fails, or one of its workers says nothing.
    """
    start = _start_kvps if system.kind == "kvps" else _start_gloo
    with Group(reaper) as group:
        start(group, system, case, rounds)
        return trial_of(group.wait(), case.workers, system.name)


def trial_of(workers: list[list[float]], expected: int, name: str) -> TrialTimes:
    """Return the trial that has these times of its workers.

    Raises:
        KvpsError: if there are too few.
    """
    if len(workers) != expected:
        raise KvpsError(
            f"{name}: {len(workers)} of {expected} workers reported the times of their rounds; "
            "run this system alone with --systems, and check which other processes use memory"
        )
    return TrialTimes(slowest(workers))


def worker_flags(system: System, case: Case, rounds: int) -> list[str]:
    """Return the configuration of a worker."""
    return [system.how, case.workload, system.rule, str(rounds)]


def module(name: str, python: str = sys.executable) -> list[str]:
    """Return the start of a command that runs a module, even where this folder has a file of that name."""
    return [python, "-P", "-m", name]


def _start_kvps(group: Group, system: System, case: Case, rounds: int) -> None:
    sizes = ["-n", str(case.workers), "-s", str(case.servers), "--"]
    worker = [*module(KVPS_WORKER), *worker_flags(system, case, rounds)]
    env = config.environment({**THREADS, **system.env}, {})
    argv = [*module("kvps.cli.launch"), *sizes, *worker]
    group.start("kvps-launch", argv, env, is_measured=True)


def _start_gloo(group: Group, system: System, case: Case, rounds: int) -> None:
    argv = [*module(GLOO_WORKER), *worker_flags(system, case, rounds)]
    port = free_port()
    for rank in range(case.workers):
        env = gloo_environment(rank, case.workers, LOOPBACK, port)
        group.start(f"gloo worker {rank}", argv, env, is_measured=True)


def gloo_environment(rank: int, workers: int, master: str, port: int) -> dict[str, str]:
    """Return the environment of a worker of gloo."""
    place = {"RANK": rank, "WORLD_SIZE": workers, "MASTER_ADDR": master, "MASTER_PORT": port}
    return config.environment({**THREADS, **{name: str(setting) for name, setting in place.items()}}, {})


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port: int = free.getsockname()[1]
        return port
