"""The report of ``make gpu``, which is written also where a part fails."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu

MACHINE = {"device": "a device", "torch": "2", "python": "3", "cores": "16", "date": "2026-11-26"}


def test_a_part_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.LIMITS_S, "copies", 0.01)
    monkeypatch.setattr(gpu, "PATIENCE", 1)
    assert "took longer than 0.01 s" in gpu.part("copies")["failed"]


def test_report_is_written_where_a_test_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = {"tests": {"passed": 1, "failed": {"test_one": "not equal"}}, "codecs": {"fp16": "3.71"}}
    monkeypatch.setattr(gpu, "part", parts.__getitem__)
    monkeypatch.setattr(sys, "argv", ["gpu", *parts, "--out", str(tmp_path / "new")])
    assert gpu.main() == 1
    written = json.loads((tmp_path / "new/gpu.json").read_text())
    assert {name: written[name] for name in parts} == parts
    assert "not equal" in (tmp_path / "new/gpu.md").read_text()


@pytest.mark.skipif(not gpu.IS_REHEARSAL, reason="there is a device, and nothing to rehearse")
@pytest.mark.thorough
def test_rehearsed_front_ends_copy_the_model_once_in_each_direction() -> None:
    """None of it goes through pageable memory, and its small arrays cross together."""
    found = gpu.part("copies")
    copies = dict.fromkeys(("down", "up"), "1 copies, 1.000 of the model")
    assert [found[name] for name in gpu.FRONT_ENDS] == [copies] * 4
    assert "REHEARSAL" in gpu.machine()["device"]


def test_the_report_has_every_part_and_its_failures() -> None:
    tests = {"passed": 31, "failed": {"test_one": "not equal"}}
    codecs = {"table": ["codec  write", "fp16   3.71"]}
    report = {"machine": MACHINE, "tests": tests, "speed": {"failed": "exit 1:\nno memory"}, "codecs": codecs}
    told = gpu.paragraph(report)
    for text in (
        "a device, torch 2",
        "passed: 31",
        "not equal",
        "* speed: failed, no memory",
        "  fp16   3.71",
    ):
        assert text in told
