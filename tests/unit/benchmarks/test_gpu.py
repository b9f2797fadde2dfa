"""The report of ``make gpu``, which is written also where a part fails."""

import pytest

from benchmarks.gpu import paragraph, part

MACHINE = {"device": "a device", "torch": "2", "python": "3", "cores": "16", "date": "2026-11-26"}


def test_a_part_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "exit 1: this machine has no CUDA device" in part("copies")["failed"]


def test_the_report_has_every_part_and_its_failures() -> None:
    tests = {"passed": 31, "failed": {"test_one": "not equal"}}
    codecs = {"table": ["codec  write", "fp16   3.71"]}
    report = {"machine": MACHINE, "tests": tests, "speed": {"failed": "exit 1:\nno memory"}, "codecs": codecs}
    told = paragraph(report)
    for text in (
        "a device, torch 2",
        "passed: 31",
        "not equal",
        "* speed: failed, no memory",
        "  fp16   3.71",
    ):
        assert text in told
