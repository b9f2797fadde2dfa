"""The end of a run in lines: how many tests of each folder passed, and why tests were skipped.

Tests of the folders run side by side, so that only the end can say it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

RECORD = Path(__file__).resolve().parents[1] / "durations.json"
WORK = 0.7
"""The part of the processors' time that a run uses: tests wait for processes and timers."""


def time_in_words(costs: Mapping[str, float], cores: int) -> str:
    """Return how long the recorded tests take, if all processors have work.

    Args:
        costs: file -> seconds of a processor.
        cores: the number of processors.

    Example:
        >>> time_in_words({"a.py": 500, "b.py": 88}, 2)
        'about 7 minutes on 2 cores'
    """
    minutes = max(1, round(sum(costs.values()) / cores / WORK / 60))
    return f"about {minutes} minute{'s' * (minutes > 1)} on {cores} core{'s' * (cores > 1)}"


def expected(cores: int) -> str:
    """Return how long the everyday tests take."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return time_in_words({file: row["cost_s"] for file, row in record.items()}, cores)


class Summary:
    """Counts the results of all tests, in the process that gathers them."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        """By folder, the number of tests by outcome, and ``ms`` of their time."""
        self._reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test is over."""
        counts = self._counts["/".join(report.nodeid.split("/")[:2])]
        counts["ms"] += round(1000 * report.duration)
        if report.when == "call" or report.outcome != "passed":
            counts[report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self._reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def lines(self) -> list[str]:
        """Return a line per folder, then one per reason for which tests were skipped."""
        found = []
        for folder, counts in sorted(self._counts.items()):
            told = [f"{counts[item]:,} {item}" for item in ("passed", "failed", "skipped") if counts[item]]
            found.append(f"{folder:<20} {', '.join(told)}; {counts['ms'] / 1000:,.0f} s of tests")
        reasons = sorted(self._reasons.items(), key=lambda item: (-item[1], item[0]))
        return found + [f"{count:>4} skipped: {reason}" for reason, count in reasons]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write them."""
        if len(self._counts) > 1:
            terminalreporter.section("tests by folder")
            for line in self.lines():
                terminalreporter.write_line(line)
