"""What kvps-launch keeps for the next life of its scheduler."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvps import config
from kvps.errors import ConfigError
from kvps.launchers.children import Foothold
from kvps.launchers.reaper import Reaper
from kvps.runtime.scheduler_process import STATE_FILE


@pytest.fixture
def foothold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Foothold]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reaper = Reaper()
    made = Foothold(reaper)
    yield made
    made.close()
    reaper.close()
    assert not list(tmp_path.iterdir())


def state(foothold: Foothold) -> Path:
    return Path(foothold.flags[-1], STATE_FILE)


def test_a_job_that_was_kept_goes_on(foothold: Foothold) -> None:
    state(foothold).write_bytes(b"kept")
    assert foothold.has_job(137)
    assert foothold.has_job(1), "it failed by itself"


def test_a_job_that_is_over_does_not(foothold: Foothold) -> None:
    assert not foothold.has_job(1), "it has removed what it had kept"
    state(foothold).touch()
    assert not foothold.has_job(137), "it was killed as it ended"


def test_server_killed_before_it_kept_anything_begins_anew(foothold: Foothold) -> None:
    assert foothold.has_job(137)


def test_nobody_else_gets_the_port_while_there_is_no_scheduler(foothold: Foothold) -> None:
    port = config.port_of("--bind", foothold.bind)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    for _ in range(2):
        with socket.socket() as scheduler:
            scheduler.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            scheduler.bind(("127.0.0.1", port))
            scheduler.listen()


def test_where_no_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    reaper = Reaper()
    try:
        with pytest.raises(ConfigError, match="TMPDIR"):
            Foothold(reaper)
    finally:
        reaper.close()
