"""kvps status as a process: one screen of a job, for a person and for a program."""

import json
import re
import signal
import sys
from typing import Any

import pytest

from tests.integration.processes import BIN, Process, Processes, free_port, until

WAITS = """
import os, time
import kvps, torch
kv = kvps.create("dist_sync", timeout=60, name="ours")
kv.init("w", torch.zeros(4))
users = kv.embedding("users", 2, optimizer="sgd", lr=0.1, evict={"rows": 100, "half_life": 1000})
for other in range(3): users.push([17, other], torch.ones(2, 2))
print("ready", flush=True)
while kv.rank and not os.path.exists("go"): time.sleep(0.01)
kv.pushpull("w", torch.ones(4))
"""


def status(processes: Processes, *flags: object, **env: str) -> Process:
    return processes.start("status", BIN / "kvps", "status", *flags, **env)


def test_members_and_rounds_that_wait_are_shown(processes: Processes) -> None:
    cluster = processes.scheduler(2, 1)
    server = cluster.server()
    script = processes.script(WAITS)
    workers = [cluster.worker(sys.executable, script, flags=["--rank", rank]) for rank in (0, 1)]
    for worker in workers:
        worker.expect("ready")
    processes.may_fork = False  # the command is as its users start it

    def seen() -> dict[str, list[dict[str, Any]]]:
        asked = status(processes, "--json", "--scheduler", cluster.endpoint)
        assert asked.wait() == 0, asked
        shown: dict[str, list[dict[str, Any]]] = json.loads(asked.out)
        return shown if shown["rounds"] and shown["hot_rows"] else {}

    shown = until(seen, "round that waits, and hot rows")
    (hot,) = shown["hot_rows"]
    assert (hot["store"], hot["table"], next(iter(hot["uses"].items()))) == (
        "ours",
        "users",
        ("17", pytest.approx(3, rel=0.01)),
    )
    (waits,) = shown["rounds"]
    assert (waits["store"], waits["key"], waits["number"]) == ("ours", "w", 0)
    assert (waits["server"], waits["missing"]) == (0, [1])
    names = [(item["role"], item["rank"], item["state"]) for item in shown["members"]]
    assert names == [("worker", 0, "held"), ("worker", 1, "held"), ("server", 0, "held")]
    assert {item["pid"] for item in shown["members"]} == {*(worker.pid for worker in workers), server.pid}
    assert all(isinstance(item["incarnation"], int) and item["incarnation"] for item in shown["members"])

    def screen() -> dict[str, str]:
        """Return the lines, once the worker's next beat has said where it waits."""
        asked = status(processes, KVPS_SCHEDULER=cluster.endpoint)
        assert asked.wait() == 0, asked
        assert " is running: " in asked.out
        assert asked.err == ""
        lines = {line.split("  ")[0]: line for line in asked.out.splitlines()}
        return lines if "alive, has waited in push() for " in lines["worker 0"] else {}

    lines = until(screen, "worker that waits in push()")
    assert "alive" in lines["worker 1"]
    assert "waits for" in lines["store"]
    assert re.fullmatch(r"ours +w +0 +\d+ s +rank 1 \(alive.*\)", lines["ours"])

    (processes.folder / "go").touch()
    assert [item.wait() for item in (*workers, server, cluster.process)] == [0, 0, 0, 0]


def test_a_job_that_forms_says_who_is_missing(processes: Processes) -> None:
    cluster = processes.scheduler(1, 1)
    asked = status(processes, "--scheduler", cluster.endpoint)
    assert asked.wait() == 0, asked
    assert " is forming: waiting for 1 of 1 workers (rank 0)" in asked.out
    assert asked.out.count("not joined yet") == 2
    assert "no round has been open for long" in asked.out
    cluster.process.signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--timeout", "0.3"], 75, "no answer from the scheduler at tcp://127.0.0.1:"),
        (["--timeout", "-1"], 78, "--timeout=-1: use a number of seconds above 0"),
    ],
)
def test_without_a_scheduler(processes: Processes, flags: list[str], code: int, says: str) -> None:
    asked = status(processes, "--scheduler", f"tcp://127.0.0.1:{free_port()}", *flags)
    assert asked.wait() == code
    assert says in asked.err
    assert asked.out == ""
