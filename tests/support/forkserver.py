"""A process that has imported torch and kvps, and forks the Pythons of tests.

An interpreter needs between one and two seconds of a processor to import torch, which is most of what a test
of real processes costs; a fork needs 15 ms, its end included. A forked process is like one that was started, but for what reads the
environment when torch is imported: that has read the server's. :func:`tests.support.programs.program_of` refuses what
depends on it. kvps-launch and kvps-worker have their children forked in turn: see :mod:`tests.support.nursery`. So do
programs that are not Pythons, such as mpirun, if they start :mod:`tests.support.stand_in`.

One server serves all processes of a run of pytest: the first that forks starts it, and it ends after the last.
:class:`ForkServer` is the side of the tests. A request is one datagram of JSON with the descriptors 0 to 2, and so is the
answer to it, the process's id; ``[id, status, seconds of a processor]`` follows when the process has ended.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from tests.support import nursery, stand_in
from tests.support.programs import ROOM, ROOM_BYTES, Program, program_of, take_on, variables_at_import

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "KVPS_TEST_FORK_FOLDER"
"""The variable that names the folder of the run, where the server listens."""
REQUEST_BYTES_MAX = 1 << 20
FDS_MAX = 3 + len(stand_in.NAMESPACES)
BACKLOG = 64
NEVER_S = 1000.0
"""Seconds after which a thread would have to let another run."""
PEER = struct.Struct("3i")
"""The process, user and group at the other end of a socket."""
PRELOADED = (
    *("torch._dynamo", "kvps.store.server_store", "kvps.runtime.process"),
    *("kvps.cli.launch", "kvps.cli.scheduler", "kvps.cli.server", "kvps.cli.worker"),
    *("kvps.runtime.scheduler_process", "kvps.runtime.server_process"),
    *("kvps.tools.lenses", "kvps.tools.replay.values", "kvps.tools.dashboard.model"),
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
    """A connection to the server of this run; the first that connects starts it.

    Args:
        folder: the folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES_MAX)
        atexit.register(self._socket.close)
        with _locked(folder):
            try:
                self._socket.connect(self.address)
            except (FileNotFoundError, ConnectionRefusedError):
                self._begin(folder)
                self._socket.connect(self.address)
        self.ended: dict[int, int] = {}
        """Exit codes by process id, of those that have ended."""
        self.used_s = 0.0
        """The seconds of a processor that those have used that have ended, with what they have waited for."""
        self._started: list[int] = []

    def _begin(self, folder: Path) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.address)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.address)
            listener.listen(BACKLOG)  # from here on it can be connected to, before it has imported anything
            listener.set_inheritable(True)
            # Not by Popen, which warns of a process that outlives it, as this one may.
            os.posix_spawn(
                sys.executable,
                [*(sys.executable, "-P", __file__), *(str(listener.fileno()), str(folder), "." * ROOM_BYTES)],
                {**server_environment(), ROOM: "." * ROOM_BYTES},
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            )

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, out: Path, err: Path
    ) -> ForkedProcess:
        """Fork a process that runs ``argv``; its output goes to the files ``out`` and ``err``."""
        request = {"argv": argv, "env": env, "cwd": str(cwd), "tests": None}
        with open(os.devnull) as nothing, out.open("wb") as to_out, err.open("wb") as to_err:
            stdio = [item.fileno() for item in (nothing, to_out, to_err)]
            socket.send_fds(self._socket, [json.dumps(request).encode()], stdio)
            while not self._started:
                self.hear(None)
        pid = self._started.pop()
        assert pid, f"the fork server has another environment than {sorted(env)}"
        self.ended.pop(pid, None)  # ids are used again
        return ForkedProcess(self, pid, argv)

    def hear(self, limit_s: float | None) -> None:
        """Take in what the server says, for at most ``limit_s`` seconds; None waits for something."""
        while select.select([self._socket], [], [], limit_s)[0]:
            datagram = self._socket.recv(REQUEST_BYTES_MAX)
            assert datagram, "the fork server has ended"
            match json.loads(datagram):
                case [pid, status, used_s]:
                    self.ended[pid] = os.waitstatus_to_exitcode(status)
                    self.used_s += used_s
                case pid:
                    self._started.append(pid)
            limit_s = 0.0


_server: ForkServer | None = None


def fork_server() -> ForkServer:
    """Return the connection of this process to the fork server, and make it the first time."""
    global _server
    if _server is None:
        _server = ForkServer(Path(os.environ[FOLDER]))
    return _server


def used_s() -> float:
    """Return the seconds of a processor that the forks of this process have used that have ended."""
    if _server is None:
        return 0.0
    _server.hear(0.0)
    return _server.used_s


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock under which the server begins, ends, and is connected to by tests."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- the server's side ------------------------------------------------------------------------


class Forks:
    """The loop of the server, and the clients for which it forks.

    Args:
        listener: where clients connect.
        folder: the folder of the run.
        at_import: what :func:`~tests.support.programs.variables_at_import` says of the server.
    """

    def __init__(self, listener: socket.socket, folder: Path, at_import: Mapping[str, str]) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._folder = folder
        self._at_import = at_import
        self._clients: set[socket.socket] = set()
        self._owners: dict[int, socket.socket] = {}
        """Process id -> the client that asked for it."""
        self._held: dict[int, int] = {}
        """Process id of a fork that ends with its client, a stand-in -> that of the tests, which count what it uses."""

    def serve(self) -> dict[str, Any] | None:
        """Fork for each request; return the request in the child, and None when all clients have gone."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._accept()
        while True:
            ready, _, _ = select.select([self._listener, woken, *self._clients], [], [])
            if woken in ready:
                os.read(woken, 4096)
                self._reap()
            if self._listener in ready:
                self._accept()
            for client in self._clients.intersection(ready):
                message, fds = _heard(client)
                if not message:
                    self._forget(client)
                    if not self._clients and self._is_over():
                        return None
                    continue
                request = self._fork(client, json.loads(message), fds)
                if request is not None:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(woken)
                    os.close(wake)
                    return request

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            self._clients.add(self._listener.accept()[0])

    def _fork(
        self, client: socket.socket, request: dict[str, Any], fds: Sequence[int]
    ) -> dict[str, Any] | None:
        """Fork, and answer with the process's id, or with null if a fork is not what was asked for."""
        argv, env, cwd = (request[name] for name in ("argv", "env", "cwd"))
        can = program_of(argv, env, self._at_import, cwd) is not None
        pid = os.fork() if can else None
        if pid == 0:
            for item in (self._listener, *self._clients):
                item.close()
            for number, source in enumerate(fds[:3]):
                os.dup2(source, number)
            for place in fds[3:]:
                _enter(place)
            for source in fds:
                os.close(source)
            if request["tests"] is not None:
                os.setsid()
            os.chdir(cwd)
            return request
        for source in fds:
            os.close(source)
        if pid is not None:
            self._owners[pid] = client
            if request["tests"] is not None:
                self._held[pid] = request["tests"]
        _tell(client, pid)
        return None

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status, used = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                tests = self._held.pop(pid, None)
                told = [item for item in self._clients if _pid_of(item) == tests]
                if (client := self._owners.pop(pid, None)) is not None:
                    told.append(client)
                for effect in told:
                    _tell(effect, [pid, status, used.ru_utime + used.ru_stime])

    def _forget(self, client: socket.socket) -> None:
        self._clients.discard(client)
        client.close()
        for pid in [pid for pid, owner in self._owners.items() if owner is client]:
            del self._owners[pid]
            if pid in self._held:
                os.kill(pid, signal.SIGKILL)

    def _is_over(self) -> bool:
        """Whether no client is left, not even one that connects now; from then on, none finds this server."""
        with _locked(self._folder):
            self._accept()
            if not self._clients:
                (self._folder / "socket").unlink(missing_ok=True)
            return not self._clients


def _pid_of(client: socket.socket) -> int:
    """Return the process that has connected."""
    peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    pid: int = PEER.unpack(peer)[0]
    return pid


def _enter(place: int) -> None:
    """Make a namespace this process's, unless it is."""
    here = [os.stat(f"/proc/self/ns/{name}").st_ino for name in stand_in.NAMESPACES]
    if os.fstat(place).st_ino not in here:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(place, 0) == 0, os.strerror(ctypes.get_errno())


def _heard(client: socket.socket) -> tuple[bytes, list[int]]:
    """Return a request and its descriptors; nothing if the client has gone, perhaps before it read all that it was told."""
    try:
        message, fds, _, _ = socket.recv_fds(client, REQUEST_BYTES_MAX, FDS_MAX)
    except ConnectionResetError:
        return b"", []
    return message, fds


def _tell(client: socket.socket, what: object) -> None:
    # It has gone, which the next select() says; the other error is that of a client that left something unread.
    with suppress(BrokenPipeError, ConnectionResetError):
        client.send(json.dumps(what).encode())


def become(request: dict[str, Any], at_import: Mapping[str, str]) -> NoReturn:
    """Be the process that ``request`` asks for, or one of those that it starts."""
    take_on(request["argv"], request["env"])
    program = program_of(request["argv"], request["env"], at_import, os.getcwd())
    assert program is not None
    if program.starts_others and (inner := nursery.settle(at_import)) is not None:
        become(inner, at_import)
    _end(_run(program))


def _run(program: Program) -> int | None:
    """Run a program, and return its exit code as Python does; None if Ctrl-C has ended the program."""
    try:
        program.run()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    except BaseException as error:
        # As Python does, keep what the frames hold.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return None if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(code: int | None) -> NoReturn:
    """End this process as an interpreter ends, but tear down only what the program has made.

    Python would touch all strings and modules that were imported before, and each page of them is copied first: this takes
    four times as long as the fork.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    except KeyboardInterrupt:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.setswitchinterval(NEVER_S)  # no other thread may miss what goes now
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            code = 120
            sys.stderr.write(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}\n")
    if code is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def main() -> None:
    """Import what takes long, and serve."""
    listener, folder = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
    cache = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # torch makes it on import

    for module in PRELOADED:
        importlib.import_module(module)
    at_import = variables_at_import(os.environ)
    faulthandler.register(STACKS)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # no fork ends what is the server's
    gc.freeze()
    request = Forks(listener, folder, at_import).serve()
    if request is None:
        shutil.rmtree(cache, ignore_errors=True)
        os._exit(0)
    become(request, at_import)


if __name__ == "__main__":
    main()
