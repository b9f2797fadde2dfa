"""Fixtures of the tests with real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Processes, made


@pytest.fixture
def has_namespaces() -> None:
    """Skip where no network namespace can be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces are for root")
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("iproute2 is not installed")
    name = f"kvps-{os.getpid()}-test"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespace can be made: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Processes of which none may be left when the test ends."""
    yield from made(tmp_path)


@pytest.fixture
def fresh_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each Python anew: for tests of the true entry points, and of the end of the interpreter."""
    monkeypatch.setenv("KVPS_TEST_FORK", "0")
