"""The tiers of the suite: what is run every day, and what only with ``--all``.

The everyday tier has every requirement of the protocol and every single fault of the smallest jobs; of seeds, and
of faults of larger jobs, it plays an eighth, another each day, and it leaves out what is marked ``thorough``:
cases that repeat a path with other sizes, and what takes more than some ten seconds. Of the cases of tests marked ``pairwise`` it plays some
(:mod:`tests.support.pairwise`), of those marked ``in_turn`` an eighth. KVPS_DAY=N plays what another day plays.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support import forkserver, summary

SECONDS_OF_A_DAY = 86_400
DAYS = 8
"""The number of days in which the everyday tier plays all seeds, all faults of larger jobs, and all cases in turn."""
EXAMPLES_MIN = 10
"""The least number of examples that hypothesis draws for a test in a day."""
ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "durations.json"

FAILED = pytest.StashKey[bool]()
TERMINAL_VARIABLES = ("LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Variables by which a caller's terminal would change what tests see."""


def share_processors() -> None:
    """Let torch take little of the processors while it waits, in this process and in those that it starts.

    torch reads this when it is imported, as the conftest of a folder may do before :func:`configure` is called.
    """
    # Tests run side by side: several threads of torch would mostly wait for each other, and spin meanwhile.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Real processes have as many threads of torch as a user's; they sleep at once while they wait for each other.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


def go_around_proxies() -> None:
    """Let tests ask this machine by HTTP, also where the environment names a proxy for all that is asked."""
    given = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if given != "*":
        hosts = [*filter(None, given.split(",")), "127.0.0.1", "localhost"]
        os.environ["no_proxy"] = ",".join(dict.fromkeys(hosts))


def hear_signals() -> None:
    """Let Ctrl-C and SIGHUP end what tests start, also where this run began in the background, with both ignored.

    Commands of kvps leave a signal ignored that was ignored at their start.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def configure(config: pytest.Config) -> None:
    """Decide on the tier and the day, once, for this process and those that run tests for it."""
    if config.getoption("--all"):
        os.environ["KVPS_ALL"] = "1"
    os.environ.setdefault("KVPS_DAY", str(int(time.time()) // SECONDS_OF_A_DAY))
    if not hasattr(config, "workerinput"):
        folder = os.environ[forkserver.FOLDER] = tempfile.mkdtemp(prefix="kvps-tests-")
        os.environ["TMPDIR"], tempfile.tempdir = folder, None  # for all files of the run
        if config.option.basetemp is None:  # a short path: those of sockets have a limit
            config.option.basetemp = os.path.join(folder, "t")
        config.add_cleanup(lambda: _remove(config, folder))
        config.pluginmanager.register(summary.Summary())
    if config.getoption("--record"):
        config.pluginmanager.register(Costs(is_last=not hasattr(config, "workerinput")))


def _remove(config: pytest.Config, folder: str) -> None:
    """Remove all files of a run, unless a test failed, which left there what explains it."""
    if config.stash.get(FAILED, False):
        sys.stderr.write(f"the files of this run are left in {folder}\n")
    else:
        shutil.rmtree(folder, ignore_errors=True)


def pin_terminal(config: pytest.Config) -> None:
    """Have text wrapped as without a terminal, in tests and in what they start; pytest's own lines keep their width."""
    if config.pluginmanager.has_plugin("terminalreporter"):
        writer = config.get_terminal_writer()
        writer.fullwidth = writer.fullwidth
    for name in TERMINAL_VARIABLES:
        os.environ.pop(name, None)
    os.environ["COLUMNS"] = "80"


def day() -> int:
    """Return the day whose seeds are played."""
    return int(os.environ.get("KVPS_DAY", "0"))


def part_of_today() -> int:
    """Return which of :data:`DAYS` parts is played today, from 0."""
    return day() % DAYS


def plays_all() -> bool:
    """Whether nothing is left out."""
    return os.environ.get("KVPS_ALL") == "1"


def examples(count: int, **more: Any) -> hypothesis.settings:
    """Return settings of hypothesis that play ``count`` examples, and every day an eighth of so many, drawn anew."""
    today = count if plays_all() else max(EXAMPLES_MIN, count // DAYS)
    return hypothesis.settings(max_examples=today, deadline=None, **more)


def of_other_days(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return those cases of tests marked ``in_turn`` that today does not play.

    The cases of a test have days one after another; the day of the first depends on the name of the test.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("in_turn"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [
        case
        for name, cases in tests.items()
        for day, case in enumerate(cases, zlib.crc32(name.encode()))
        if day % DAYS != part_of_today()
    ]


def spread(items: list[pytest.Item], processes: int) -> None:
    """Sort tests so that half of the processes that run them begin with the longest files, the others with quick tests.

    Long tests wait for processes and timers, quick ones compute: side by side they leave no processor idle. Each
    process gets a part of the list, as long as every other, and takes from the end of another part when it is done.
    What runs last is short.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    took = {file: row["took_s"] for file, row in record.items()}
    quick: list[pytest.Item] = []
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        (files.setdefault(file, []) if file in took else quick).append(item)
    parts: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for index, file in enumerate(sorted(files, key=lambda file: -took[file])):
        parts[2 * index % (processes + processes % 2)].extend(files[file])
    share = -(-len(items) // processes)
    for part in parts:
        room = max(0, share - len(part))
        part += quick[:room]
        del quick[:room]
    items[:] = [item for part in parts for item in part] + quick


class Costs:
    """The time that each file's tests take and use of a processor, as a plugin of each process that runs some.

    What they use is much the same on a busy machine. What a test's processes use counts when they have ended, and
    have been waited for.
    """

    def __init__(self, is_last: bool) -> None:
        self._is_last = is_last
        """Whether this process gathers the reports of all."""
        self._took: Counter[str] = Counter()
        self._cost: Counter[str] = Counter()
        self._used = 0.0

    def pytest_collection_finish(self) -> None:
        self._used = used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before, self._used = self._used, used_s()
        report.cost_s = self._used - before  # type: ignore[attr-defined]  # a report takes any
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._took[file] += report.duration  # type: ignore[assignment]  # a Counter takes floats, too
        self._cost[file] += getattr(report, "cost_s", 0.0)

    def pytest_sessionfinish(self) -> None:
        if self._is_last:
            rows = json.loads(RECORD.read_text(encoding="utf-8"))
            rows |= {
                file: {"took_s": round(took, 1), "cost_s": round(self._cost[file], 1)}
                for file, took in self._took.items()
            }
            rows = {file: row for file, row in rows.items() if row["took_s"] > 1 and (ROOT / file).exists()}
            rows = dict(sorted(rows.items(), key=lambda row: -row[1]["took_s"]))
            RECORD.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def used_s() -> float:
    """Return the seconds of a processor that this process, its children and its forks have used."""
    return sum(os.times()[:4]) + forkserver.used_s()
