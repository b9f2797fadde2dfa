"""Progress in a terminal: of a launch until all have joined, and of the restore of a checkpoint."""

import sys
from pathlib import Path

import pytest
import torch

import kvps
from kvps.checkpoint import reading
from tests.integration.processes import BIN, Processes
from tests.support.terminal import Terminal

PRINTS = """
import kvps, torch
kv = kvps.create("dist_sync", timeout=60)
kv.init("w", torch.zeros(2))
print("trained", flush=True)
"""


def test_a_launch_shows_how_many_have_joined(processes: Processes) -> None:
    script = processes.script(PRINTS)
    words = (processes.interpreter, BIN / "kvps-launch", "-n", 1, "-s", 1, "--", sys.executable, script)
    terminal = Terminal(*words, PYTHONPATH=processes.env["PYTHONPATH"])
    try:
        terminal.expect("0 of 2 processes have joined")
        terminal.expect("━.* 1 of 2 processes have joined")
        terminal.expect("trained")
        assert terminal.wait() == 0
        assert "have joined" not in terminal.text
    finally:
        terminal.close()


RESTORES = """
import kvps, torch
kv = kvps.create("local")
kv.init("w", torch.zeros(1 << 22))
kv.checkpoint()
kv.restore()
print("restored")
"""


@pytest.mark.thorough
def test_a_restore_shows_its_progress(processes: Processes, tmp_path: Path) -> None:
    script = processes.script(RESTORES)
    folder = tmp_path / "ckpt"
    terminal = Terminal(sys.executable, script, KVPS_CHECKPOINT_DIR=str(folder))
    try:
        terminal.expect("restoring checkpoint 1")
        terminal.expect("restored")
        assert terminal.wait() == 0
    finally:
        terminal.close()


def test_a_restore_elsewhere_and_a_small_one_show_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPS_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setattr(reading, "RESTORE_AT_LEAST_BYTES", 0)
    with kvps.create("local") as kv:
        kv.init("w", torch.zeros(1 << 10))
        kv.checkpoint()
        kv.restore()
    assert capfd.readouterr().err == ""
