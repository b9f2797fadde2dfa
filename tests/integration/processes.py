"""Real processes for tests: started with a mark, watched with deadlines, and none left behind."""

from __future__ import annotations

import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from tests.support import stand_in
from tests.support.forkserver import STACKS, ForkedProcess, can_fork, fork_server

T = TypeVar("T")
BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
MARK = "KVPS_TEST_MARK"
WAIT_S = 30.0
PORTS_FROM = 10_000
"""The least port that :func:`free_port` returns, if the kernel's own begin above it."""
QUICK_S, QUICK = 0.3, 5
"""Seconds of a processor that a quick command takes at most; on a slow one, so many times what :data:`USUAL` takes."""
USUAL = "import argparse, asyncio, inspect, json, logging"
STACK = "(most recent call first)"
"""A line of each stack that a process prints."""
ENDPOINT = re.compile(r"tcp://[\d.]+:\d+")
SUM = """
import os, sys
import kvps, torch
kv = kvps.create("dist_sync", timeout=60)
kv.init("w", torch.zeros(4))
print("sum", kv.pushpull("w", torch.full((4,), kv.rank + 1.0)).tolist(), flush=True)
"""
"""A script in which the workers sum a tensor, and print the sum."""


def until(look: Callable[[], T], what: str, limit_s: float = WAIT_S) -> T:
    """Return the first true thing that ``look`` returns."""
    deadline = time.monotonic() + limit_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} in {limit_s:g} s")
        time.sleep(0.01)


def has_checkpoint(folder: Path) -> bool:
    """Whether the scheduler knows of a complete checkpoint, as it began the one after the next.

    The first manifest may lie there a moment before that: a server killed in it takes the job along.
    """
    return len(list(folder.glob("cut-*/manifest.json"))) > 1


class Process:
    """One process, and what it printed."""

    def __init__(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], folder: Path, may_fork: bool = True
    ) -> None:
        self.name = name
        self.argv = argv
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        self.is_forked = may_fork and can_fork(argv, env, folder)
        self.popen: subprocess.Popen[bytes] | ForkedProcess
        if self.is_forked:
            self.popen = fork_server().start(argv, env, folder, self._out, self._err)
        else:
            with self._out.open("wb") as out, self._err.open("wb") as err:
                self.popen = subprocess.Popen(
                    argv, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err
                )
        self.pid = self.popen.pid

    @property
    def out(self) -> str:
        """What it printed on stdout."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """What it printed on stderr."""
        return self._err.read_text(errors="replace")

    def wait(self, limit_s: float = WAIT_S) -> int:
        """Return its exit code."""
        try:
            return self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.print_stacks()
            raise AssertionError(f"{self.name} runs after {limit_s:g} s: {self}") from None

    def expect(self, pattern: str, limit_s: float = WAIT_S) -> re.Match[str]:
        """Wait until it has printed something that matches ``pattern``."""

        def look() -> re.Match[str] | None:
            found = re.search(pattern, self.out + self.err)
            if found is None and self.popen.poll() is not None:
                found = re.search(pattern, self.out + self.err)
                assert found, f"{self.name} ended without {pattern!r}: {self}"
            return found

        try:
            return until(look, f"{pattern!r} from {self.name}", limit_s)
        except AssertionError as error:
            self.print_stacks()
            raise AssertionError(f"{error}: {self}") from None

    def print_stacks(self, limit_s: float = 3.0) -> None:
        """Have it, and all forked processes below it, print where their threads are: it was to be elsewhere by now."""
        asked = [pid for pid in _family(self.pid) if _catches(pid, STACKS)]
        due = self.err.count(STACK) + len(asked)
        for pid in asked:
            with suppress(ProcessLookupError):
                os.kill(pid, STACKS)
        with suppress(AssertionError):  # one that is stopped prints nothing
            until(lambda: self.err.count(STACK) >= due, "stacks", limit_s)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.popen.send_signal(number)

    def __repr__(self) -> str:
        return f"\n--- out\n{self.out}\n--- err\n{self.err}\n---"


class Processes:
    """All processes of one test."""

    def __init__(self, folder: Path) -> None:
        self.may_fork = os.environ.get("KVPS_TEST_FORK") != "0"
        """Whether Pythons are forked from one that has imported torch, and not started anew.

        Set it to False before the first process where a test is about the true entry points.
        """
        self.folder = folder
        self.temp = folder / "temporary"
        self.temp.mkdir()
        self._mark = uuid.uuid4().hex
        self._all: list[Process] = []
        self._shared_before = _shared()
        place = ("KVPS_", "DMLC_", "OMP_", "MASTER_", "SLURM_", "OMPI_")
        own = {key: item for key, item in os.environ.items() if not key.startswith(place)}
        self.env = {
            **own,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
            "PYTHONUNBUFFERED": "1",
            "KVPS_RECORD_DIR": str(folder / "records"),
            "TMPDIR": str(self.temp),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),  # made by any torch.optim.Optimizer
            MARK: self._mark,
        }

    def start(self, name: str, *argv: object, **env: str) -> Process:
        """Start a process; ``env`` is added to its environment."""
        words = [str(argument) for argument in argv]
        process = Process(f"{len(self._all)}-{name}", words, {**self.env, **env}, self.folder, self.may_fork)
        self._all.append(process)
        return process

    @property
    def interpreter(self) -> Path:
        """The Python that programs which are no Pythons are to start: one that is forked, where that is allowed."""
        if not self.may_fork:
            return Path(sys.executable)
        path = self.folder / "python"
        if not path.exists():
            stand_in.write(path, fork_server().address)
        return path

    def kvps(self, command: str, *flags: object, **env: str) -> Process:
        """Start one of our commands."""
        return self.start(command, BIN / f"kvps-{command}", *flags, **env)

    def python(self, *argv: object, **env: str) -> Process:
        """Start a Python."""
        return self.start("python", sys.executable, *argv, **env)

    def scheduler(self, workers: int, servers: int, *flags: object, **env: str) -> Cluster:
        """Start a scheduler at a free port."""
        words = (
            *("--workers", workers, "--servers", servers),
            *("--bind", "tcp://127.0.0.1:0", "--log-level", "info", *flags),
        )
        process = self.kvps("scheduler", *words, **env)
        return Cluster(self, process, process.expect(ENDPOINT.pattern).group())

    def script(self, text: str, name: str = "train.py") -> Path:
        """Write a script."""
        path = self.folder / name
        path.write_text(text)
        return path

    def running(self) -> dict[int, str]:
        """Return every process that began here, or below one that did, and lives."""
        found = {}
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                pid = int(folder.name)
                if self._mark.encode() in (folder / "environ").read_bytes():
                    line = (folder / "cmdline").read_bytes().rstrip(b"\0")
                    found[pid] = line.replace(b"\0", b" ").decode()
        return found

    def pids(self, pattern: str) -> list[int]:
        """Return those whose command line matches ``pattern``, oldest first."""
        return sorted(pid for pid, line in self.running().items() if re.search(pattern, line))

    def check_nothing_left(self, limit_s: float = 20.0) -> None:
        """Assert that no process, no shared memory and no temporary file is left."""
        try:
            until(lambda: not self.running(), "end of all processes", limit_s)
        except AssertionError:
            raise AssertionError(f"left running: {self.running()}") from None
        assert not list(self.temp.iterdir()), "temporary files are left"
        left = _shared() - self._shared_before
        assert not {item for item in left if "kvps" in item or "torch" in item}, f"left: {left}"

    def end(self) -> None:
        """Kill what a failed test left."""
        for pid in self.running():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for process in self._all:
            process.popen.wait()


class Cluster:
    """A scheduler that runs, and what joins it."""

    def __init__(self, processes: Processes, process: Process, endpoint: str) -> None:
        self.processes = processes
        self.process = process
        self.endpoint = endpoint

    def server(self, *flags: object, **env: str) -> Process:
        """Start a server."""
        return self.processes.kvps("server", "--scheduler", self.endpoint, *flags, **env)

    def worker(self, *command: object, flags: Sequence[object] = (), **env: str) -> Process:
        """Start a kvps-worker that runs ``command``."""
        return self.processes.kvps("worker", "--scheduler", self.endpoint, *flags, "--", *command, **env)

    def plain(self, script: Path, **env: str) -> Process:
        """Start a script that is a worker by itself."""
        return self.processes.python(script, KVPS_SCHEDULER=self.endpoint, **env)


def _family(pid: int) -> list[int]:
    """Return a process and all that began below it and live."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            parents.setdefault(int(parent), []).append(int(folder.name))
    family = [pid]
    for member in family:
        family += parents.get(member, [])
    return family


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with suppress(OSError):
        found = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
        return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)
    return False


def free_port() -> int:
    """Return a port that is free now, of those that the kernel gives to nobody who asks for any.

    Until the process begins that is to have it, others that run beside this test ask for many.
    """
    ours = 0
    with suppress(OSError):  # not every sandbox shows it
        kernels = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        ours = max(0, int(kernels[0]) - PORTS_FROM)
    while True:
        with socket.socket() as connection, suppress(OSError):
            connection.bind(("127.0.0.1", PORTS_FROM + secrets.randbelow(ours) if ours else 0))
            port: int = connection.getsockname()[1]
            return port


def made(folder: Path) -> Iterator[Processes]:
    """Yield processes for a test, as a fixture; check that the test leaves nothing behind."""
    processes = Processes(folder)
    try:
        yield processes
        processes.check_nothing_left()
    finally:
        processes.end()


def _shared() -> set[str]:
    return set(os.listdir("/dev/shm"))


def is_quick(processes: Processes, attempts: int, *command: object, **env: str) -> bool:
    """Whether one of some attempts of a command takes little time of the processor, which other tests use beside it."""

    def cost_s(*words: object) -> float:
        began = _cpu_s()
        assert processes.start("measured", *words, **env).wait() == 0
        return _cpu_s() - began

    for _ in range(attempts):
        limit_s = max(QUICK_S, QUICK * cost_s(sys.executable, "-c", USUAL))
        if cost_s(*command) <= limit_s:
            return True
    return False


def _cpu_s() -> float:
    """Return the seconds of processor that this process's children have used that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
