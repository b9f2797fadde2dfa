"""Logs as JSON: every line of every process parses, and names its process; text stays as it is."""

import json
import sys

import pytest

from tests.integration.processes import Processes

TRAINS = """
import warnings
import kvps, torch
kv = kvps.create("dist_sync", timeout=60)
kv.init("w", torch.zeros(2))
print("loss", 0.5, flush=True)
warnings.warn("careful")
kv.pushpull("w", torch.ones(2))
"""


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_line_of_a_launch_parses_and_names_its_process(processes: Processes) -> None:
    script = processes.script(TRAINS)
    flags = ("-n", 2, "-s", 1, "--log-format", "json", "--log-level", "info")
    launch = processes.kvps("launch", *flags, "--", sys.executable, script)
    assert launch.wait(120) == 0, launch
    shown = [*lines(launch.out), *lines(launch.err)]
    assert all(item.keys() == {"time", "level", "role", "rank", "event", "fields"} for item in shown)
    said = {(item["role"], item["rank"], item["event"]) for item in shown}
    assert {("worker", 0, "loss 0.5"), ("worker", 1, "loss 0.5")} <= said
    assert any(item["role"] == "launch" and "workers" in str(item["event"]) for item in shown)
    joined = [item for item in shown if "worker 1 joined" in str(item["event"])]
    assert [item["role"] for item in joined] == ["scheduler"]
    fields = joined[0]["fields"]
    assert isinstance(fields, dict)
    assert fields["member"] == "worker 1"
    ends = [item for item in shown if "server 0 ends" in str(item["event"])]
    assert [(end["role"], end["rank"]) for end in ends] == [("server", 0)]


def test_a_complaint_is_json_too(processes: Processes) -> None:
    server = processes.kvps("server", "--log-format", "json", "--scheduler", "nowhere")
    assert server.wait() == 78
    (said,) = lines(server.err)
    assert (said["level"], said["role"]) == ("error", "server")
    assert "nowhere" in str(said["event"])
    bad = processes.kvps("server", KVPS_LOG_FORMAT="xml")
    assert bad.wait() == 78
    assert bad.err == "kvps-server: KVPS_LOG_FORMAT='xml': use one of text, json\n"


@pytest.mark.thorough
def test_a_script_without_a_launcher_logs_json(processes: Processes) -> None:
    script = processes.script(TRAINS)
    process = processes.python(script, KVPS_LOG_FORMAT="json", PYTHONWARNINGS="ignore")
    assert process.wait(60) == 0, process
    (said,) = lines(process.err)
    assert (said["role"], said["level"]) == ("worker", "warning")
    assert "KVPS_SCHEDULER is not set" in str(said["event"])
