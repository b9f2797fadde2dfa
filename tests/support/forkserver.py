"""A process that has imported torch and kvps, and forks the Pythons of tests.

An interpreter needs between one and two seconds of a processor to import torch, which is most of what a test
of real processes costs; a fork needs 20 ms. A forked process is like one that was started, except that:

- ``/proc/PID/environ`` and ``/proc/PID/cmdline`` are those of the server; it is a session leader, by which
  it and its children are found;
- what reads the environment when torch is imported has read the server's. :func:`can_fork` refuses
  what depends on it.

:class:`ForkServer` is the side of the tests. A request is one datagram of JSON, and so is the answer to it,
the process's id; ``[id, status]`` follows when the process has ended.
"""

from __future__ import annotations

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
from collections.abc import Mapping, Sequence
from pathlib import Path

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
REQUEST_BYTES_MAX = 1 << 20
AT_IMPORT = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "MKL_", "OPENBLAS_", "TORCH_")
"""Variables that act when an interpreter, or torch, starts."""
PRELOADED = ("torch._dynamo", "kvps.cli.server", "kvps.runtime.server_process", "kvps.torch")
HARMLESS = ("PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR")


def can_fork(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a fork runs ``argv`` as a new process would: a server, or a script, started as usual."""
    is_script = argv[0] == sys.executable and argv[1].endswith(".py")
    if not is_script and argv[0] != str(BIN / "kvps-server"):
        return False
    return _at_import(env) == _at_import(server_environment())


def _at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name.startswith(AT_IMPORT) and name not in HARMLESS
    }


def server_environment() -> dict[str, str]:
    """Return the environment of the fork server."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    return {**os.environ, "PYTHONPATH": path}


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
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                env=server_environment(),
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


_server: ForkServer | None = None


def fork_server() -> ForkServer:
    """Return the fork server of this process, and start it the first time."""
    global _server
    if _server is None:
        _server = ForkServer()
    return _server


# --- the server's side ------------------------------------------------------------------------


def serve(channel: socket.socket) -> dict[str, object] | None:
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
                request: dict[str, object] = json.loads(datagram)
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


def become(request: dict[str, object]) -> None:
    """Be the process that ``request`` asks for: its environment, files, arguments, and what it runs."""
    import torch

    os.setsid()
    for path, number in ((request["out"], 1), (request["err"], 2)):
        opened = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.chdir(str(request["cwd"]))
    env, argv = request["env"], request["argv"]
    assert isinstance(env, dict)
    assert isinstance(argv, list)
    os.environ.clear()
    os.environ.update(env)
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    if argv[0] == sys.executable:
        del argv[0]
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    sys.argv = argv
    main = _new_main()
    main["__file__"] = argv[0]
    exec(compile(Path(argv[0]).read_bytes(), argv[0], "exec"), main)


def _new_main() -> dict[str, object]:
    """Return the namespace of an empty ``__main__``."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__["__builtins__"] = __builtins__
    return module.__dict__


def main() -> None:
    """Import what takes long, and serve."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    cache = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # torch makes it on import

    for module in PRELOADED:
        importlib.import_module(module)
    request = serve(channel)
    if request is None:
        shutil.rmtree(cache, ignore_errors=True)
    else:
        become(request)


if __name__ == "__main__":
    main()
