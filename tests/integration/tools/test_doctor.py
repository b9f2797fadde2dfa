"""kvps doctor names what is wrong, with the advice for it."""

import json
import re
import signal

import pytest

from tests.integration.processes import BIN, Process, Processes, free_port, until


def doctor(processes: Processes, *flags: object, **env: str) -> Process:
    return processes.start("doctor", BIN / "kvps", "doctor", *flags, **env)


def told(process: Process, code: int, limit_s: float = 60.0) -> dict[str, tuple[str, str, str]]:
    """What the doctor said: by name (level, figure, advice); the worst where there are several."""
    assert process.wait(limit_s) == code, process
    shown = json.loads(process.out)
    assert shown["exit_code"] == code
    order = ["skip", "ok", "warn", "fail"]
    findings = sorted(shown["findings"], key=lambda item: order.index(item["level"]))
    return {finding["topic"]: (finding["level"], finding["text"], finding["advice"]) for finding in findings}


def examined(processes: Processes, code: int, *flags: object, **env: str) -> dict[str, tuple[str, str, str]]:
    return told(doctor(processes, "--json", *flags, **env), code)


def test_a_job_that_is_well(processes: Processes) -> None:
    cluster = processes.scheduler(1, 1)
    server = cluster.server()
    worker = cluster.worker("sleep", "60")

    def findings() -> dict[str, tuple[str, str, str]]:
        found = examined(processes, 0, "--scheduler", cluster.endpoint)
        return found if found["members"][0] == "ok" else {}

    found = until(findings, "job that is well", 60)
    for name in ("address", "connection", "keys", "answer", "versions", "shared memory", "clock"):
        assert found[name][0] == "ok", found[name]
    assert re.match(r"[\d.]+ ms \(median of 7", found["round trip"][1])
    assert re.search(r"[MG]bit/s to the scheduler \(\d+ KiB there and back\)", found["bandwidth"][1])
    assert "a worker of this job needs" in found["file descriptors"][1]
    shown = doctor(processes, "--scheduler", cluster.endpoint)
    assert shown.wait() == 0
    assert re.search(r"^ok +address +tcp://127.0.0.1:\d+ is 127.0.0.1$", shown.out, re.MULTILINE)
    assert "\x1b" not in shown.out
    assert shown.err == ""
    worker.signal(signal.SIGTERM)
    worker.wait()
    cluster.process.signal(signal.SIGTERM)
    server.wait()


def test_wrong_address(processes: Processes) -> None:
    refused = examined(processes, 1, "--scheduler", f"tcp://127.0.0.1:{free_port()}")
    level, figure, advice = refused["connection"]
    assert (level, "refuses connections" in figure) == ("fail", True)
    assert "start kvps-scheduler" in advice
    assert refused["answer"][0] == "skip"
    # A resolver may wait for name servers that do not answer.
    unknown = told(doctor(processes, "--json", "--scheduler", "tcp://no-such-host.invalid:9091"), 1, 120.0)
    assert unknown["address"][0] == "fail"
    assert "DNS" in unknown["address"][2]


def test_busy_port(processes: Processes) -> None:
    cluster = processes.scheduler(1, 0)
    found = examined(processes, 1, "--scheduler", cluster.endpoint, "--bind", cluster.endpoint)
    level, figure, advice = found["port"]
    assert level == "fail"
    assert "Address already in use" in figure
    assert f"process {cluster.process.pid}" in figure
    assert "port 0" in advice
    cluster.process.signal(signal.SIGTERM)


def test_wrong_and_missing_key(processes: Processes) -> None:
    for folder in ("ours", "theirs"):
        assert processes.start(folder, BIN / "kvps", "keygen", folder).wait() == 0
    cluster = processes.scheduler(1, 0, "--keys", "ours")
    missing = examined(processes, 1, "--scheduler", cluster.endpoint)
    assert missing["keys"][0] == "fail"
    assert "--keys DIR" in missing["keys"][2]
    wrong = examined(processes, 1, "--scheduler", cluster.endpoint, "--keys", "theirs")
    assert wrong["keys"][0] == "fail", wrong
    assert "keys of this job" in wrong["keys"][2]
    right = examined(processes, 0, "--scheduler", cluster.endpoint, "--keys", "ours")
    assert right["keys"][0] == "ok"
    assert right["bandwidth"][0] in ("ok", "warn")
    cluster.process.signal(signal.SIGTERM)


@pytest.mark.thorough
def test_dead_server(processes: Processes) -> None:
    cluster = processes.scheduler(1, 1)
    server = cluster.server("--log-level", "info")
    server.expect("server at")

    def joined() -> bool:
        found = examined(processes, 0, "--scheduler", cluster.endpoint)
        return "server 0" not in found["members"][1]

    until(joined, "server that has joined", 60)
    server.signal(signal.SIGKILL)
    server.wait()

    def findings() -> dict[str, tuple[str, str, str]]:
        asked = doctor(processes, "--json", "--scheduler", cluster.endpoint)
        found = told(asked, 1 if asked.wait(60) else 0)
        return found if found["members"][0] == "fail" else {}

    _, figure, advice = until(findings, "server that is lost", 60)["members"]
    assert "server 0" in figure
    assert "start kvps-server again" in advice
    cluster.process.signal(signal.SIGTERM)
