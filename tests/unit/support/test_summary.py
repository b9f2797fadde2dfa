"""What a run of the suite says of itself."""

import pytest

from tests.support.summary import Summary, expected, time_in_words


def report(nodeid: str, when: str, outcome: str, why: str = "") -> pytest.TestReport:
    longrepr = ("file.py", 1, f"Skipped: {why}") if why else None
    return pytest.TestReport(nodeid, ("file.py", 1, "test"), {}, outcome, longrepr, when, duration=0.5)


def test_the_time_that_a_run_takes() -> None:
    assert time_in_words({"a.py": 500, "b.py": 88}, 2) == "about 7 minutes on 2 cores"
    assert time_in_words({"a.py": 5}, 1) == "about 1 minute on 1 core"
    assert expected(2).endswith("minutes on 2 cores")


def test_a_line_per_folder_and_per_reason() -> None:
    summary = Summary()
    for when in ("setup", "call", "teardown"):
        summary.pytest_runtest_logreport(report("tests/unit/core/test_a.py::test_a", when, "passed"))
    summary.pytest_runtest_logreport(report("tests/unit/test_b.py::test_b", "call", "failed"))
    for name in ("a", "b"):
        skipped = report(f"tests/faults/test_c.py::{name}", "setup", "skipped", "no CUDA device")
        summary.pytest_runtest_logreport(skipped)
    skipped = report("tests/faults/test_c.py::c", "call", "skipped", "run with -m slow")
    summary.pytest_runtest_logreport(skipped)
    assert summary.lines() == [
        "tests/faults         3 skipped; 2 s of tests",
        "tests/unit           1 passed, 1 failed; 2 s of tests",
        "   2 skipped: no CUDA device",
        "   1 skipped: run with -m slow",
    ]
