"""kvps demo as a process: a worker and a server are killed, and each step counts once."""

import re

from tests.integration.processes import BIN, Processes


def test_the_demo_loses_two_processes_and_no_update(processes: Processes) -> None:
    demo = processes.start("demo", BIN / "kvps", "demo", "--steps", 120)
    assert demo.wait(120) == 0, demo
    said = " ".join(demo.out.split())
    assert re.search(r"dashboard: http://127\.0\.0\.1:\d+/", said)
    assert re.search(r"killed worker 1 \(process \d+\): .* closed after \d+\.\d\d s", said)
    assert re.search(r"killed server 0 \(process \d+\): .* closed after \d+\.\d\d s", said)
    assert "no update was lost, and none counted twice" in said
    assert "Next: kvps-launch" in said
    assert "\x1b" not in demo.out
    assert demo.err == ""
