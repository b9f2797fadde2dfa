"""Fixtures of the tests that break things: whatever happens, nothing may be left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import has_namespaces as has_namespaces
from tests.integration.processes import Processes, made


def namespaces() -> set[str]:
    """Return the network namespaces of this machine that are ours."""
    if shutil.which("ip") is None:
        return set()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines() if f"kvps-{os.getpid()}-" in line}


def listening(pids: set[int]) -> set[int]:
    """Return those of ``pids`` that have a listening TCP socket."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            inodes |= {f"socket:[{line.split()[9]}]" for line in file if line.split()[3] == "0A"}
    found = set()
    for pid in pids:
        try:
            links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        if inodes.intersection(links):
            found.add(pid)
    return found


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Processes of which none may be left when the test ends."""
    yield from made(tmp_path)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that a test leaves no process, shared memory, listening port or namespace.

    Processes and shared memory of the job are checked where they are made; here is what a test
    may have opened in this process, or on this machine.
    """
    ports, shared = listening({os.getpid()}), set(os.listdir("/dev/shm"))
    yield
    assert listening({os.getpid()}) == ports, "this process still listens"
    assert not {item for item in set(os.listdir("/dev/shm")) - shared if "kvps" in item}
    assert not namespaces(), "network namespaces are left"
