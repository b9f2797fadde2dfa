"""The stand-in for a Python, which has one forked: what its parent sees, and what it passes on."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.processes import Processes, until
from tests.support import forkserver

IS_FORKED = "import sys; print('torch' in sys.modules, flush=True)"


class Started:
    """A stand-in that this process starts, as mpirun would."""

    def __init__(self, processes: Processes, *words: object, **env: str) -> None:
        self.popen = subprocess.Popen(
            [processes.interpreter, *map(str, words)],
            env=processes.env | env,
            cwd=processes.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        """Return the next line that it prints."""
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().rstrip("\n")

    def end(self) -> None:
        """Kill it."""
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def started(processes: Processes) -> Iterator[list[Started]]:
    """Stand-ins that end with the test; the fork server has begun, which takes its time."""
    assert processes.python("-c", "").wait() == 0
    all_: list[Started] = []
    yield all_
    for item in all_:
        item.end()


def test_the_fork_has_all_that_the_stand_in_has(processes: Processes, started: list[Started]) -> None:
    code = f"{IS_FORKED}; import os; print(sys.argv[1:], os.environ['A'], os.getcwd(), input(), flush=True); os._exit(7)"
    item = Started(processes, "-c", code, "x", "y z", A="a")
    started.append(item)
    out, _ = item.popen.communicate("typed\n", timeout=30.0)
    assert out == f"True\n['x', 'y z'] a {processes.folder} typed\n"
    assert item.popen.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stand_in_ends_as_the_fork_does(
    processes: Processes, started: list[Started], number: signal.Signals
) -> None:
    item = Started(processes, "-c", f"import os; os.kill(os.getpid(), {int(number)})")
    started.append(item)
    assert item.popen.wait(30.0) == -number


def test_signals_reach_the_fork(processes: Processes, started: list[Started]) -> None:
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(5)); print('ready', flush=True)"
    item = Started(processes, "-c", f"{code}; signal.pause()")
    started.append(item)
    assert item.line() == "ready"
    item.popen.send_signal(signal.SIGTERM)
    assert item.popen.wait(30.0) == 5


def test_the_fork_does_not_outlive_it(processes: Processes, started: list[Started]) -> None:
    item = Started(processes, "-c", "import os, signal; print(os.getpid(), flush=True); signal.pause()")
    started.append(item)
    pid = int(item.line())
    assert pid in processes.running()
    assert pid != item.popen.pid
    item.popen.kill()
    until(lambda: pid not in processes.running(), "end of the fork")


def test_options_that_a_fork_cannot_follow_start_an_interpreter(
    processes: Processes, started: list[Started]
) -> None:
    item = Started(processes, "-c", IS_FORKED, PYTHONHASHSEED="1")
    started.append(item)
    assert item.line() == "False"
    assert item.popen.wait(30.0) == 0


@pytest.mark.usefixtures("started")
def test_client_that_ends_with_its_answer_unread_harms_no_other(processes: Processes) -> None:
    request = {
        "argv": [sys.executable, "-c", ""],
        "env": processes.env,
        "cwd": str(processes.folder),
        "tests": None,
    }
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
        open(os.devnull, "r+b") as nothing,
    ):
        connection.connect(forkserver.fork_server().address)
        socket.send_fds(connection, [json.dumps(request).encode()], [nothing.fileno()] * 3)
        assert select.select([connection], [], [], 30.0)[0], "an answer"
    assert processes.python("-c", "").wait() == 0


def test_to_tell_one_that_has_gone_is_no_error() -> None:
    for unread in (b"", b"an answer"):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here:
            if unread:
                here.send(unread)
            there.close()
            forkserver._tell(here, 1)


@pytest.mark.usefixtures("fresh_interpreters")
def test_interpreter_is_python_itself_where_nothing_is_forked(processes: Processes) -> None:
    assert os.fspath(processes.interpreter) == sys.executable
