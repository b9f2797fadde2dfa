"""Which processes are near each other."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvps.net import locality
from kvps.net.locality import machine
from kvps.runtime.member_process import own_machine


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that say where this process is."""
    (tmp_path / "boot").write_text("1f0c\n")
    (tmp_path / "network").touch()
    monkeypatch.setattr(locality, "_BOOT", tmp_path / "boot")
    monkeypatch.setattr(locality, "_NETWORK", tmp_path / "network")
    return tmp_path


def test_another_process_of_this_machine_has_the_same_number() -> None:
    code = "from kvps.net.locality import machine; print(machine())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(told.stdout) == machine() != 0


def test_machine_number_fits_into_a_message(elsewhere: Path) -> None:
    for boot in range(100):
        (elsewhere / "boot").write_text(str(boot))
        assert 0 < machine() < 2**63


def test_another_boot_is_another_machine(elsewhere: Path) -> None:
    before = machine()
    (elsewhere / "boot").write_text("1f0d\n")
    assert machine() != before


def test_another_network_is_another_machine(elsewhere: Path) -> None:
    before = machine()
    (elsewhere / "other").touch()
    (elsewhere / "other").replace(elsewhere / "network")
    assert machine() != before


@pytest.mark.parametrize("missing", ["boot", "network"])
def test_where_it_cannot_be_known_nobody_is_near(elsewhere: Path, missing: str) -> None:
    (elsewhere / missing).unlink()
    assert machine() == 0


def test_process_on_tcp_only_has_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, expected in (("auto", machine()), ("shm", machine()), ("tcp", 0)):
        monkeypatch.setenv("KVPS_TRANSPORT", setting)
        assert own_machine() == expected
