"""The report of ``make gpu``, which is written also where a part fails."""

import pytest

from benchmarks import gpu

MACHINE = {"device": "a device", "torch": "2", "python": "3", "cores": "16", "date": "2026-11-26"}


def test_a_part_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.LIMITS_S, "copies", 0.01)
    assert "took longer than 0.01 s" in gpu.part("copies")["failed"]


@pytest.mark.skipif(not gpu.IS_REHEARSAL, reason="there is a device, and nothing to rehearse")
@pytest.mark.thorough
def test_rehearsed_front_ends_copy_each_array_once_in_each_direction() -> None:
    """8 layers have 16 arrays, and none of them goes through pageable memory."""
    found = gpu.part("copies")
    assert [found[name] for name in gpu.FRONT_ENDS] == [{"down": "16 copies", "up": "16 copies"}] * 4
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
