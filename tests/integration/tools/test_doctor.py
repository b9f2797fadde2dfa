"""kvps doctor names what is wrong, with the advice for it; under the real condition wherever one can be made.

Emulated, at the edge of another process, are the clock of a scheduler and its version: one machine has one of each.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.processes import BIN, Cluster, Process, Processes, free_port, until

OTHER_SCHEDULER = """
import sys, time
import kvps
{change}
from kvps.cli.scheduler import main
sys.exit(main(sys.argv[1:]))
"""


def doctor(processes: Processes, *flags: object, **env: str) -> Process:
    return processes.start("doctor", BIN / "kvps", "doctor", *flags, **env)


def told(process: Process, code: int, limit_s: float = 60.0) -> dict[str, tuple[str, str, str]]:
    """What the doctor said: by name (level, figure, advice); the worst where there are several."""
    assert process.wait(limit_s) == code, process
    shown = json.loads(process.out)
    assert shown["exit_code"] == code
    order = ["skip", "ok", "warn", "fail"]
    findings = sorted(shown["findings"], key=lambda one: order.index(one["level"]))
    return {one["topic"]: (one["level"], one["text"], one["advice"]) for one in findings}


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


@pytest.mark.thorough
def test_another_service_at_that_port(processes: Processes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = examined(processes, 1, "--scheduler", f"tcp://127.0.0.1:{other.getsockname()[1]}")
    assert found["connection"][0] == "fail"
    assert "another service" in found["connection"][2]


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
def test_no_shared_memory(processes: Processes) -> None:
    """A file may not be as large as a segment, and a segment is a file: ``ulimit -f``."""
    cluster = processes.scheduler(1, 0)
    line = f"ulimit -f 4096; exec {BIN}/kvps doctor --json --scheduler {cluster.endpoint}"
    found = told(processes.start("doctor", "bash", "-c", line), 0)
    level, figure, advice = found["shared memory"]
    assert level == "warn"
    assert "cannot create a segment" in figure
    assert "ulimit -f unlimited" in advice
    insists = told(processes.start("doctor", "bash", "-c", line, KVPS_TRANSPORT="shm"), 1)
    assert insists["shared memory"][0] == "fail"
    cluster.process.signal(signal.SIGTERM)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("limit", "workers", "answers"), [(24, 1, False), (64, 40, True)], ids=["any", "this-job"]
)
def test_low_descriptor_limit(processes: Processes, limit: int, workers: int, answers: bool) -> None:
    cluster = processes.scheduler(workers, 0)
    line = f"ulimit -n {limit}; exec {BIN}/kvps doctor --json --scheduler {cluster.endpoint}"
    found = told(processes.start("doctor", "bash", "-c", line), 1)
    level, figure, advice = found["file descriptors"]
    assert level == "fail"
    assert f"limit {limit}" in figure
    assert re.search(r"ulimit -n \d\d", advice)
    assert (found["answer"][0] == "ok") is answers
    cluster.process.signal(signal.SIGTERM)


@contextmanager
def another_scheduler(processes: Processes, change: str) -> Iterator[Cluster]:
    """A real scheduler, in a process of which something was changed before it began."""
    processes.may_fork = False  # what was imported before the change would not see it
    script = processes.script(OTHER_SCHEDULER.format(change=change), "scheduler.py")
    flags = ("--workers", 1, "--servers", 0, "--bind", "tcp://127.0.0.1:0", "--log-level", "info")
    process = processes.python(script, *flags)
    yield Cluster(processes, process, process.expect(r"tcp://[\d.]+:\d+").group())
    process.signal(signal.SIGTERM)


@pytest.mark.thorough
def test_version_mismatch(processes: Processes) -> None:
    with another_scheduler(processes, "kvps.__version__ = '0.0.7'") as cluster:
        found = examined(processes, 0, "--scheduler", cluster.endpoint)
    level, figure, advice = found["versions"]
    assert level == "warn"
    assert "the scheduler has 0.0.7" in figure
    assert "install one version" in advice


@pytest.mark.thorough
def test_another_framing(processes: Processes) -> None:
    change = "from kvps.protocol import wire; wire.VERSION = 2"
    with another_scheduler(processes, change) as cluster:
        found = examined(processes, 1, "--scheduler", cluster.endpoint, "--timeout", "1")
    level, _, advice = found["answer"]
    assert level == "fail"
    assert "kvps --version" in advice


@pytest.mark.thorough
def test_clock_skew(processes: Processes) -> None:
    change = "now = time.time; time.time = lambda: now() + 90"
    with another_scheduler(processes, change) as cluster:
        found = examined(processes, 0, "--scheduler", cluster.endpoint)
    level, figure, advice = found["clock"]
    assert level == "warn"
    skew = re.fullmatch(r"the scheduler's clock is ([\d.]+) s ahead", figure)
    assert skew is not None
    assert abs(float(skew[1]) - 90) < 2
    assert "chrony" in advice


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


RATE_BITS = 2_000_000


@pytest.mark.thorough
def test_slow_link(processes: Processes, has_namespaces: None, tmp_path: Path) -> None:
    """A namespace whose only way out is a pair of interfaces of 2 Mbit/s in each direction."""
    name = f"kvps-{os.getpid()}"
    near, far = f"kd{os.getpid() % 100000}a", f"kd{os.getpid() % 100000}b"
    shape = f"root tbf rate {RATE_BITS}bit burst 4kb latency 500ms"
    made = [
        f"ip netns add {name}",
        f"ip link add {near} type veth peer name {far} netns {name}",
        f"ip addr add 10.231.17.1/30 dev {near}",
        f"ip link set {near} up",
        f"ip -n {name} addr add 10.231.17.2/30 dev {far}",
        f"ip -n {name} link set {far} up",
        f"tc qdisc add dev {near} {shape}",
        f"tc -n {name} qdisc add dev {far} {shape}",
    ]
    try:
        for command in made:
            subprocess.run(command.split(), check=True)
        bind = ("--bind", "tcp://10.231.17.1:0", "--insecure", "--log-level", "info")
        scheduler = processes.kvps("scheduler", "--workers", 1, "--servers", 0, *bind)
        endpoint = scheduler.expect(r"tcp://10.231.17.1:\d+").group()
        words = ("ip", "netns", "exec", name, BIN / "kvps", "doctor", "--json")
        found = told(processes.start("doctor", *words, "--scheduler", endpoint), 0)
        scheduler.signal(signal.SIGTERM)
        scheduler.wait()
    finally:
        subprocess.run(["ip", "link", "delete", near], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
    level, figure, advice = found["bandwidth"]
    assert level == "warn"
    rate = re.match(r"slow link: ([\d.]+) Mbit/s", figure)
    assert rate is not None, figure
    assert 0.5 < float(rate[1]) * 1e6 / RATE_BITS < 2, figure
    assert "compression" in advice


@pytest.mark.thorough
def test_a_wrong_flag(processes: Processes) -> None:
    asked = doctor(processes, "--scheduler", "here")
    assert asked.wait() == 78
    assert "tcp://HOST:PORT" in asked.err
