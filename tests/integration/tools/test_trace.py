"""Timelines of real jobs: one file of all processes on one clock, and what bounds a step, in words."""

import json
import re
import sys

import pytest

from kvps.protocol.envelope import Role
from kvps.tools.trace import chrome
from tests.integration.processes import BIN, Process, Processes

TRAIN = """
import os, time
import kvps, torch
kv = kvps.create("dist_sync", timeout=200)
count, pause = int(os.environ["COUNT"]), float(os.environ["PAUSE"].split(",")[kv.rank])
keys = ["a", "b"]
kv.init(keys, [torch.zeros(count) for _ in keys])
if "ADAM" in os.environ:
    kv.set_optimizer("adam", lr=0.1)
gradients = kv.empty_like(keys)
for one in gradients:
    one.fill_(1.0)
weights = [torch.zeros(count) for _ in keys]
print("ready", flush=True)
steps = int(os.environ.get("STEPS", "0"))
done = 0
# All ranks agree on the last step by what they pull: rank 0 pushes it.
flag = torch.zeros(1)
kv.init("end", flag)
while True:
    time.sleep(pause)
    kv.pushpull(keys, gradients, out=weights)
    done += 1
    is_end = done == steps or (not steps and os.path.exists("go"))
    ends = torch.zeros(1)
    kv.pushpull("end", torch.tensor([float(is_end and kv.rank == 0)]), out=ends)
    if ends.item():
        break
print("steps", done, flush=True)
"""


def trace(processes: Processes, *flags: object, **env: str) -> Process:
    return processes.start("trace", BIN / "kvps", "trace", *flags, **env)


def explained(processes: Processes, endpoint: str, seconds: float, *flags: object) -> str:
    """Record for so long; return the explanation."""
    asked = trace(processes, "--scheduler", endpoint, "--seconds", seconds, *flags, KVPS_INSECURE="1")
    assert asked.wait(120.0) == 0, asked
    return asked.out


def shares(text: str) -> dict[str, int]:
    """Return the percentages of an explanation, by what they are of."""
    lines = re.findall(r"^ +(\d+) %  ([^(\n]+?)(?: \(.*)?$", text, re.M)
    return {what: int(share) for share, what in lines}


def test_the_timeline_of_a_whole_job(processes: Processes) -> None:
    """A slow worker is named; every process is there, every request is joined, and the file is private."""
    script = processes.script(TRAIN)
    path = processes.folder / "trace.json"
    flags = ("-n", 2, "-s", 1, "--timeline", path)
    job = processes.kvps(
        "launch", *flags, "--", sys.executable, script, STEPS="25", COUNT="20000", PAUSE="0.01,0.12"
    )
    assert job.wait(120.0) == 0, job
    assert path.stat().st_mode & 0o777 == 0o600
    document = json.loads(path.read_text())
    events = document["traceEvents"]
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert sorted(name.partition(" (")[0] for name in named) == [
        *("scheduler", "server 0", "worker 0", "worker 1")
    ]
    kinds = {event["name"] for event in events if event["ph"] == "X"}
    assert kinds >= {"compute", "wait", "encode", "send", "reduce", "reply", "scatter"}
    # In every round, both workers' pushes lead to the server and back.
    found = chrome.load(path.read_text())
    by_role = {process.node: process for process in found.processes}
    (server,) = [item for node, item in by_role.items() if node.role is Role.SERVER]
    taken = {(s.rank, s.seq) for s in server.spans if s.kind.name == "REDUCE" and s.number}
    for rank in (0, 1):
        worker = by_role[next(node for node in by_role if node == (Role.WORKER, rank))]
        scattered = {s.seq for s in worker.spans if s.kind.name == "SCATTER"}
        # A worker is told to trace when it has joined, and may have sent its first request by then.
        first = min(s.seq for s in worker.spans if s.kind.name == "SEND" and s.seq)
        assert {seq for of, seq in taken if of == rank and seq >= first} <= scattered
    # One clock: what was sent is never handled before.
    assert found.error_ns is not None
    sent = {
        (process.node.rank, span.seq): span.begin
        for process in found.processes
        if process.node.role is Role.WORKER
        for span in process.spans
        if span.kind.name == "SEND" and span.role == Role.SERVER
    }
    late = [
        span.begin - sent[span.rank, span.seq]
        for span in server.spans
        if span.kind.name == "REDUCE" and (span.rank, span.seq) in sent
    ]
    assert late
    assert min(late) > -2 * found.error_ns
    said = trace(processes, "--explain", path)
    assert said.wait() == 0, said
    assert said.out.startswith("worker 1's compute bounds the step"), said
    assert "Worker 1 is slow" in said.out
    assert re.search(r"waiting for rank 1 takes \d+ % of the other workers' time", said.out)


@pytest.mark.thorough
def test_a_slow_worker_is_named_while_the_job_runs(processes: Processes) -> None:
    cluster = processes.scheduler(2, 1, KVPS_INSECURE="1")
    cluster.server()
    script = processes.script(TRAIN)
    env = {"COUNT": "20000", "PAUSE": "0.01,0.12"}
    workers = [cluster.plain(script, KVPS_RANK=str(rank), **env) for rank in range(2)]
    for worker in workers:
        worker.expect("ready")
    out = processes.folder / "trace.json"
    text = explained(processes, cluster.endpoint, 3, "--out", out)
    assert text.startswith("worker 1's compute bounds the step"), text
    assert shares(text)["worker 1's compute"] > 50
    assert len(chrome.load(out.read_text()).processes) == 4
    # A second one may be recorded, and what is wrong is said.
    assert "bounds the step" in explained(processes, cluster.endpoint, 1)
    wrong = trace(processes, "--scheduler", cluster.endpoint, "--seconds", 1000)
    assert wrong.wait() == 78
    assert "ask for more than 0 and at most 600 s" in wrong.err
    (processes.folder / "go").touch()
    for worker in workers:
        assert worker.wait(60.0) == 0, worker


def test_a_trace_without_a_scheduler_is_given_up(processes: Processes) -> None:
    asked = trace(processes, "--scheduler", "tcp://127.0.0.1:9", "--timeout", "0.5")
    assert asked.wait() == 75
    assert "no answer from the scheduler at tcp://127.0.0.1:9 for 0.5 s" in asked.err
    mixed = trace(processes, "--explain", "a", "--seconds", 3)
    assert mixed.wait() == 78
    assert "--explain reads a timeline" in mixed.err
    missing = trace(processes, "--explain", processes.folder / "none.json")
    assert missing.wait() == 78
    assert "cannot read" in missing.err
