"""A process that has imported torch and kvps, and forks the Pythons of tests.

An interpreter needs between one and two seconds of a processor to import torch, which is most of what a test
of real processes costs; a fork needs 20 ms. A forked process is like one that was started, but for what reads the
environment when torch is imported: that has read the server's. :func:`tests.support.programs.program_of` refuses what
depends on it. kvps-launch and kvps-worker have their children forked in turn: see :mod:`tests.support.nursery`.

:class:`ForkServer` is the side of the tests. A request is one datagram of JSON, and so is the answer to it,
the process's id; ``[id, status]`` follows when the process has ended.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import nursery
from tests.support.programs import ROOM, ROOM_BYTES, program_of, take_on, variables_at_import

ROOT = Path(__file__).resolve().parents[2]
REQUEST_BYTES_MAX = 1 << 20
PRELOADED = (
    *("torch._dynamo", "kvps.store.server_store", "kvps.runtime.process"),
    *("kvps.cli.launch", "kvps.cli.scheduler", "kvps.cli.server", "kvps.cli.worker"),
    *("kvps.runtime.scheduler_process", "kvps.runtime.server_process"),
)
"""Not kvps.torch, whose import changes the rendezvous of torch.distributed."""
STACKS = signal.SIGRTMIN
"""At this signal a forked process prints the stacks of its threads to stderr."""


def can_fork(argv: Sequence[str], env: Mapping[str, str], folder: Path) -> bool:
    """Whether a fork runs ``argv`` as a new process would."""
    at_import = variables_at_import(server_environment())
    return program_of(argv, env, at_import, str(folder)) is not None


def server_environment() -> dict[str, str]:
    """Return the environment of the fork server: without the number of threads that tests have."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    own = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    return {**own, "PYTHONPATH": path}


class ForkedProcess:
    """One forked process, with as much of subprocess.Popen as tests use."""

    def __init__(self, server: ForkServer, pid: int, argv: Sequence[str]) -> None:
        self.pid = pid
        self.argv = argv
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            self._server.hear(0.0)
            self.returncode = self._server.ended.get(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the process has ended.

        Raises:
            subprocess.TimeoutExpired: if it has not after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0.0:
                raise subprocess.TimeoutExpired(list(self.argv), timeout or 0.0)
            self._server.hear(min(left, 1.0))
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is known to have ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """The server as seen by the tests; it ends with the process that made it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES_MAX)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), "." * ROOM_BYTES],
                env={**server_environment(), ROOM: "." * ROOM_BYTES},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self.ended: dict[int, int] = {}
        """Exit codes by process id, of those that have ended."""
        self._started: list[int] = []

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, out: Path, err: Path
    ) -> ForkedProcess:
        """Fork a process that runs ``argv``; its output goes to the files ``out`` and ``err``."""
        for path in (out, err):
            path.touch()
        request = {"argv": argv, "env": env, "cwd": str(cwd), "out": str(out), "err": str(err)}
        self._socket.send(json.dumps(request).encode())
        while not self._started:
            self.hear(None)
        pid = self._started.pop()
        self.ended.pop(pid, None)  # ids are used again
        return ForkedProcess(self, pid, argv)

    def hear(self, limit_s: float | None) -> None:
        """Take in what the server says, for at most ``limit_s`` seconds; None waits for something."""
        while select.select([self._socket], [], [], limit_s)[0]:
            datagram = self._socket.recv(REQUEST_BYTES_MAX)
            assert datagram, "the fork server has ended"
            match json.loads(datagram):
                case [pid, status]:
                    self.ended[pid] = os.waitstatus_to_exitcode(status)
                case pid:
                    self._started.append(pid)
            limit_s = 0.0

    def used_s(self) -> float:
        """Return the seconds of a processor that it has used, and all that has ended below it."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = sum(int(one) for one in fields[11:15])  # fields 14 to 17 of proc(5)
        return ticks / os.sysconf("SC_CLK_TCK")


_server: ForkServer | None = None


def fork_server() -> ForkServer:
    """Return the fork server of this process, and start it the first time."""
    global _server
    if _server is None:
        _server = ForkServer()
    return _server


def used_s() -> float:
    """Return the seconds of a processor that the fork server of this process and its forks have used."""
    return 0.0 if _server is None else _server.used_s()


# --- the server's side ------------------------------------------------------------------------


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return the request in the child, and None when the tests have gone."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([channel, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(channel)
        if channel in ready:
            datagram = channel.recv(REQUEST_BYTES_MAX)
            if not datagram:
                return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                channel.close()
                os.close(woken)
                os.close(wake)
                request: dict[str, Any] = json.loads(datagram)
                for name, number in (("out", 1), ("err", 2)):
                    opened = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                    os.dup2(opened, number)
                    os.close(opened)
                os.chdir(request["cwd"])
                return request
            channel.send(json.dumps(pid).encode())


def _reap(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        channel.send(json.dumps([pid, status]).encode())


def become(request: dict[str, Any] | None, at_import: Mapping[str, str]) -> None:
    """Be the process that ``request`` asks for, or one of those that it starts."""
    while request is not None:
        take_on(request["argv"], request["env"])
        program = program_of(request["argv"], request["env"], at_import, os.getcwd())
        assert program is not None
        request = nursery.settle(at_import) if program.starts_others else None
    program.run()


def spare_the_end(kept: dict[str, types.ModuleType]) -> None:
    """Let forks end without tearing down what has been imported so far.

    To free it all takes ten times as long as a fork, as each page of it is copied first. What a program
    makes itself ends as ever.
    """
    kept.update(sys.modules)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # leaves out the destructors of libraries, which would come next
    gc.freeze()


def _keep(modules: Mapping[str, types.ModuleType]) -> None:
    for name in modules.keys() - {"sys", "builtins", "__main__"}:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules[name]))
        sys.modules.pop(name, None)


def main() -> None:
    """Import what takes long, and serve."""
    kept: dict[str, types.ModuleType] = {}
    atexit.register(_keep, kept)  # first, so it is called last
    channel = socket.socket(fileno=int(sys.argv[1]))
    cache = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # torch makes it on import

    for module in PRELOADED:
        importlib.import_module(module)
    at_import = variables_at_import(os.environ)
    faulthandler.register(STACKS)
    spare_the_end(kept)
    request = serve(channel)
    if request is None:
        shutil.rmtree(cache, ignore_errors=True)
    else:
        become(request, at_import)


if __name__ == "__main__":
    main()
