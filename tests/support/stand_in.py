"""A program that stands in for a Python: it has :mod:`tests.support.forkserver` fork one, and ends as that does.

mpirun and sshd start what they are told to, and cannot fork a Python. So they start a stand-in: it hands its
arguments, environment, folder, network and the descriptors 0 to 2 over, passes signals on, and has the same exit code. The
fork dies with it. It starts in 30 ms, as it imports next to nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path  # whose import takes as long as the others together

TEXT = """#!{python} -IS
import sys
sys.path.append({root!r})
from tests.support.stand_in import main
main({address!r}, {tests})
"""
ANSWER_BYTES_MAX = 256
NAMESPACES = ("net", "mnt")
"""What ``ip netns exec`` gives to a process: a network, and the files of /sys that describe it."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def write(path: Path, address: str) -> None:
    """Write a stand-in.

    Args:
        path: the file.
        address: where the fork server listens, to which this process is connected.
    """
    root = os.path.abspath(f"{__file__}/../../..")
    path.write_text(TEXT.format(python=sys.executable, root=root, address=address, tests=os.getpid()))
    path.chmod(0o755)


def main(address: str, tests: int) -> None:
    """Be the process that this one's arguments describe, as far as its parent sees."""
    argv = [sys.executable, *sys.argv[1:]]
    request = {"argv": argv, "env": dict(os.environ), "cwd": os.getcwd(), "tests": tests}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        server.connect(address)
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        places = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, *places])
        pid = json.loads(server.recv(ANSWER_BYTES_MAX))
        if pid is not None:
            for number in PASSED_ON:
                signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        if pid is None:  # a fork would differ
            os.execv(sys.executable, argv)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # what it reads must break when the fork ends
            os.dup2(nothing, number)
        status = json.loads(server.recv(ANSWER_BYTES_MAX))[1]
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) in PASSED_ON:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))
