"""Children that fork where a new interpreter would start, of a process that was forked itself.

kvps-launch and kvps-worker start Pythons by ``subprocess.Popen``. A process cannot fork them itself: it has threads
and state of its own by then. So it forks a *nursery* before it runs anything, which forks for it. The kernel makes
such a process a child of the nursery's parent (CLONE_PARENT). All else is as with Popen: the descriptors,
``preexec_fn``, the session, the exit code.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import inspect
import json
import os
import pickle
import platform
import signal
import socket
import subprocess
from collections.abc import Mapping
from typing import Any

from tests.support.programs import program_of, show

MESSAGE_BYTES_MAX = 1 << 20
DESCRIPTORS_MAX = 253
"""How many a message may carry (SCM_MAX_FD)."""
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
PR_GET_TID_ADDRESS = 40
ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that the group of a process may get, of which the nursery is one."""


def settle(at_import: Mapping[str, str]) -> dict[str, Any] | None:
    """Give this process a nursery; return None in it, and the request in each process that is forked."""
    if platform.machine() not in SYS_CLONE:
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES_MAX)
    if os.fork() == 0:
        ours.close()
        return _serve(theirs)
    theirs.close()
    _replace_popen(ours, dict(at_import))
    return None


# --- the process that starts others ----------------------------------------------------------------


def _replace_popen(channel: socket.socket, at_import: dict[str, str]) -> None:
    class Popen(subprocess.Popen[Any]):
        """subprocess.Popen, which has Pythons forked."""

        def _execute_child(self, *args: Any) -> None:
            start = super()._execute_child  # type: ignore[misc]
            given = inspect.signature(start).bind(*args).arguments
            argv = [os.fsdecode(word) for word in given["args"]]
            env = dict(os.environ if given["env"] is None else given["env"])
            folder = os.path.abspath(given["cwd"] or ".")
            if given["shell"] or program_of(argv, env, at_import, folder) is None:
                start(*args)
                return
            request = {
                "argv": argv,
                "env": env,
                "cwd": folder,
                "stdio": [given["p2cread"], given["c2pwrite"], given["errwrite"]],
                "keeps": sorted(given["pass_fds"]),
                "leads": bool(given["start_new_session"]),
                "ignores": [item for item in ASKED if signal.getsignal(item) == signal.SIG_IGN],
                "before": base64.b64encode(pickle.dumps(given["preexec_fn"])).decode(),
            }
            while not _is_sent(channel, request):
                pass  # another thread, one of libzmq's, has closed a descriptor meanwhile
            self.pid = int(channel.recv(64))
            self._child_created = True
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]

    subprocess.Popen = Popen  # type: ignore[misc]


def _is_sent(channel: socket.socket, request: dict[str, Any]) -> bool:
    """Send a request with all descriptors that are open; return whether all still were."""
    numbers = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    numbers = [number for number in numbers if number != channel.fileno() and _is_open(number)]
    try:
        socket.send_fds(channel, [json.dumps(request | {"numbers": numbers}).encode()], numbers)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return False
    return True


def _is_open(number: int) -> bool:
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        return False
    return True


# --- the nursery -----------------------------------------------------------------------------------


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Fork for each request, until there is nobody to ask; return the request in what is forked."""
    for number in ASKED:
        signal.signal(number, signal.SIG_IGN)
    show(["(nursery)"], [])
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # what our parent writes to must break when it ends
        os.dup2(nothing, descriptor)
    os.close(nothing)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
        if not message:
            os._exit(0)
        is_ready, get_ready = os.pipe()
        pid = _fork_sibling()
        if pid == 0:
            channel.detach()  # its descriptor is closed with the others
            request: dict[str, Any] = json.loads(message)
            _arrange(request, descriptors, get_ready)
            return request
        for descriptor in (*descriptors, get_ready):
            os.close(descriptor)
        os.read(is_ready, 1)  # until it is closed: Popen returns when a process has its group
        os.close(is_ready)
        channel.send(b"%d" % pid)


def _fork_sibling() -> int:
    """Fork as os.fork() does, for our parent."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None)
    where = ctypes.c_void_p()  # the C library keeps the number of its thread there
    flags = CLONE_PARENT
    if libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(where)) == 0:
        flags |= CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID
    zero = ctypes.c_long(0)
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(
        ctypes.c_long(SYS_CLONE[platform.machine()]),
        ctypes.c_long(flags),
        zero,
        zero,
        where,
        where,  # x86_64 has the last two the other way
    )
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    assert pid >= 0, "the kernel refuses to clone"
    return pid


def _arrange(request: dict[str, Any], descriptors: list[int], last: int) -> None:
    """Do between fork and exec what Popen does; close ``last`` behind it.

    Only descriptors 0 to 2, and those to keep, stay open.
    """
    for signal_number in ASKED:
        signal.signal(signal_number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signal_number in request["ignores"]:
        signal.signal(signal_number, signal.SIG_IGN)
    numbers = request["numbers"]
    above = max([*numbers, *descriptors, last]) + 1
    last = fcntl.fcntl(last, fcntl.F_DUPFD, above)
    held = {
        number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, last + 1)
        for number, descriptor in zip(numbers, descriptors, strict=True)
    }
    os.closerange(3, above)
    for number, descriptor in held.items():
        os.dup2(descriptor, number)
    os.closerange(last + 1, max(held.values()) + 1)
    for number, source in enumerate(request["stdio"]):
        if source != -1:
            os.dup2(source, number)
    os.chdir(request["cwd"])
    if request["leads"]:
        os.setsid()
    before = pickle.loads(base64.b64decode(request["before"]))
    if before is not None:
        before()
    for number in range(3, above):
        if number not in request["keeps"]:
            os.closerange(number, number + 1)
    os.close(last)
