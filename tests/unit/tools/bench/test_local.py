"""The processes of one trial: what they say, how they fail, and that none is left."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvps.errors import KvpsError
from kvps.tools.bench import local as processes
from kvps.tools.bench.local import Group, times_in

SAY = 'print(\'RESULT {"rank": 0, "rounds_ms": [1.0, 2.0]}\')'
WAIT = "import signal; signal.pause()"
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"


class Held:
    """A reaper that only remembers."""

    def __init__(self) -> None:
        self.groups: set[int] = set()
        self.ever: set[int] = set()

    def start(self, argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        popen = subprocess.Popen(argv, start_new_session=True, **options)
        self.groups.add(popen.pid)
        self.ever.add(popen.pid)
        return popen

    def forget(self, group: int) -> None:
        self.groups.discard(group)


def start(group: Group, name: str, code: str, is_measured: bool = True) -> None:
    group.start(name, [sys.executable, "-c", code], os.environ, is_measured=is_measured)


def run(reaper: Held, limit_s: float = 30.0, **codes: str) -> None:
    """Run what measures, each under its name."""
    with Group(reaper, limit_s) as group:
        for name, code in codes.items():
            start(group, name, code)
        group.wait()


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_times_stand_in_lines_with_a_mark() -> None:
    output = 'hello\n[worker 0] RESULT {"rounds_ms": [1.5]}\nRESULT {"rounds_ms": [2, 3]}\n'
    assert times_in(output) == [[1.5], [2, 3]]


def test_a_trial_gives_the_times_of_all_that_measure() -> None:
    reaper = Held()
    with Group(reaper) as group:
        start(group, "a", SAY)
        start(group, "b", SAY)
        assert group.wait() == [[1.0, 2.0], [1.0, 2.0]]
    assert reaper.groups == set()


def test_serving_processes_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SERVERS_MAX_S", 0.1)
    reaper = Held()
    with Group(reaper) as group:
        start(group, "server", WAIT, is_measured=False)
        start(group, "worker", SAY)
        assert group.wait() == [[1.0, 2.0]]
    assert reaper.groups == set()
    assert all(map(is_gone, reaper.ever))


def test_failed_process_ends_the_trial_with_its_output() -> None:
    reaper = Held()
    words = r"bad ended with exit code 1; its last output:\nthe reason"
    with pytest.raises(KvpsError, match=words):
        run(reaper, good=WAIT, bad="import sys; sys.exit('the reason')")
    assert all(map(is_gone, reaper.ever))


def test_killed_process_is_named_with_its_signal() -> None:
    with pytest.raises(KvpsError, match="it was killed by signal 9"):
        run(Held(), it="import os; os.kill(os.getpid(), 9)")


def test_a_trial_that_takes_too_long_names_who_runs() -> None:
    with pytest.raises(KvpsError, match=r"after 0\.1 s still running: slow; measure fewer rounds"):
        run(Held(), limit_s=0.1, slow=WAIT)


def test_process_past_its_limit_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_MAX_S", 0.1)
    reaper = Held()
    with pytest.raises(KvpsError, match="stubborn"):
        run(reaper, limit_s=0.3, stubborn=STUBBORN)
    assert all(map(is_gone, reaper.ever))
