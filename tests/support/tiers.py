"""The tiers of the suite: what is run every day, and what only with ``--all``.

The everyday tier has every requirement of the protocol and every exhaustive small case; of seeds it plays
a quarter, another each day, and it leaves out what is marked ``thorough``: cases that repeat a path with other
sizes, and what takes more than some ten seconds. Of the cases of tests marked ``pairwise`` it plays some
(:mod:`tests.support.pairwise`). KVPS_DAY=N plays the seeds of another day.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

SECONDS_OF_A_DAY = 86_400
RECORD = Path(__file__).resolve().parents[1] / "durations.json"


def configure(config: pytest.Config) -> None:
    """Decide on the tier and the day, once, for this process and those that run tests for it."""
    if config.getoption("--all"):
        os.environ["KVPS_ALL"] = "1"
    os.environ.setdefault("KVPS_DAY", str(int(time.time()) // SECONDS_OF_A_DAY))
    # Tests run side by side: several threads of torch would mostly wait for each other, and spin meanwhile.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


def day() -> int:
    """Return the day whose seeds are played."""
    return int(os.environ.get("KVPS_DAY", "0"))


def plays_all() -> bool:
    """Whether nothing is left out."""
    return os.environ.get("KVPS_ALL") == "1"


class Durations:
    """The seconds of each file's tests, as a plugin of the process that gathers all reports."""

    def __init__(self) -> None:
        self._files: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._files[report.nodeid.split("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        rows = {
            file: round(seconds, 1) for file, seconds in self._files.most_common() if seconds > 1
        }
        RECORD.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
