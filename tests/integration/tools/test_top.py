"""kvps top as a process: a live screen in a terminal, one snapshot elsewhere."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.integration.processes import BIN, Cluster, Processes, until
from tests.support.terminal import Terminal

TRAINS = """
import os
import kvps, torch
kv = kvps.create("dist_sync", timeout=60, name="ours")
kv.init("w", torch.zeros(1 << 16))
print("ready", flush=True)
while not os.path.exists("stop"):
    kv.pushpull("w", torch.ones(1 << 16))
"""


@contextmanager
def training(processes: Processes) -> Iterator[Cluster]:
    cluster = processes.scheduler(1, 1)
    script = processes.script(TRAINS)
    members = [cluster.server(), cluster.worker(sys.executable, script)]
    members[1].expect("ready")
    yield cluster
    (processes.folder / "stop").touch()
    assert [item.wait() for item in (*members, cluster.process)] == [0, 0, 0]


def test_a_snapshot_goes_into_a_file(processes: Processes) -> None:
    with training(processes) as cluster:

        def shown() -> str:
            asked = processes.start("top", BIN / "kvps", "top", "--scheduler", cluster.endpoint)
            assert asked.wait() == 0, asked
            assert "\x1b" not in asked.out
            rate = re.search(r"([\d,.]+) rounds/s", asked.out)
            assert rate is not None
            return asked.out if float(rate[1]) > 0 else ""

        text = until(shown, "rate above 0")
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert re.search(r"[1-9][\d.]* [KMG]iB/s +[1-9][\d.]* [KMG]iB/s", lines["server 0"])
    assert " held " in lines["worker 0"]


@pytest.mark.parametrize("end", ["q", pytest.param("\x03", marks=pytest.mark.thorough)])
def test_a_terminal_shows_it_live_until_a_key_ends_it(processes: Processes, end: str) -> None:
    with training(processes) as cluster:
        terminal = Terminal(BIN / "kvps", "top", "--every", "0.2", "--scheduler", cluster.endpoint)
        try:
            terminal.expect(r"\x1b\[\?1049h")  # the other screen
            terminal.expect(r"[1-9][\d.]* rounds/s")
            terminal.expect("worker 0")
            terminal.expect("worker 0")  # and again
            terminal.expect("where")
            terminal.resize(12, 60)
            terminal.expect(r"(?m)^[^\n]*member(?!.*where)[^\n]*\n")  # a column is left out now
            terminal.type(end)
            assert terminal.wait() == 0
            assert "\x1b[?1049l" in terminal.text  # the screen is left as it was
        finally:
            terminal.close()
