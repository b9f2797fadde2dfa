"""Servers whose seats move between real processes: no call fails, and the bits are those of a run without a move."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.processes import BIN, Process, Processes, until

SCRIPT = """
import hashlib, os, sys, time
import torch
import kvps
import kvps.torch
sync = kvps.create("dist_sync", timeout=60, bigarray_bound=1000)
asynchronous = kvps.create("dist_async", timeout=60, bigarray_bound=1000)
rank, folder = sync.rank, sys.argv[1]
names, sizes = [f"w{at}" for at in range(4)], [10, 1000, 20000, 7]
random = torch.Generator().manual_seed(7 + rank)
weights = [torch.zeros(size) for size in sizes]
sync.init(names, [torch.arange(size, dtype=torch.float32) / size for size in sizes])
sync.init("rows", torch.ones(50, 4))
sync.set_optimizer("adam", learning_rate=0.01)
asynchronous.init(["a0", "a1"], [torch.zeros(3000), torch.zeros(3000)])
asynchronous.set_optimizer("sgd", learning_rate=0.1, momentum=0.5)
torch.manual_seed(3)
first, second = torch.nn.Linear(20, 200), torch.nn.Linear(20, 200)
trainer = kvps.Trainer(first, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore="dist_sync")
optimizer = kvps.torch.DistributedOptimizer(
    torch.optim.Adam(second.parameters(), lr=0.01), second.named_parameters()
)
last, rows = torch.zeros(3000), torch.zeros(50, 4)

def train(steps):
    for _ in range(steps):
        sync.pushpull(names, [torch.randn(size, generator=random) for size in sizes], out=weights)
        sync.push("rows", (torch.tensor([rank, 7]), torch.randn(2, 4, generator=random)))
        asynchronous.push(f"a{rank}", torch.randn(3000, generator=random))
        for model, step in ((first, lambda: trainer.step(2)), (second, optimizer.step)):
            model.zero_grad()
            model(torch.randn(8, 20, generator=random)).square().sum().backward()
            step()
    sync.pull("rows", out=rows)
    asynchronous.pull(f"a{rank}", out=last)

for phase in range(4):
    print("phase", phase, flush=True)
    train(25)
    while not os.path.exists(f"{folder}/{phase}"):
        time.sleep(0.01)
    sync.barrier()
shared = [*weights, rows, *first.state_dict().values(), *second.state_dict().values()]
for what, tensors in (("shared", shared), ("own", [last])):
    print(what, rank, hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest(), flush=True)
"""


def ask(processes: Processes, launch: Process, *words: object) -> None:
    """Run ``kvps drain`` or ``kvps scale``, and see it end well."""
    said = re.search(r"--keys (\S+)", launch.err)
    found = re.search(r"listens on (\S+)", launch.err)
    assert said is not None
    assert found is not None
    asked = processes.start(
        "kvps", BIN / "kvps", *words, "--scheduler", found[1], "--keys", said[1], "--timeout", 60
    )
    assert asked.wait(70.0) == 0, asked


def weights_of(processes: Processes, name: str, servers: str, replicas: int, moves: bool) -> list[str]:
    """Run the script while seats move, or without; return what the ranks have in the end."""
    folder: Path = processes.folder / name
    folder.mkdir()
    flags = ("-n", 2, "-s", servers, "--replicas", replicas, "--log-level", "info")
    launch = processes.kvps("launch", *flags, "--", sys.executable, processes.script(SCRIPT), folder)
    for phase in range(4):
        until(lambda phase=phase: launch.out.count(f"phase {phase}") == 2, f"phase {phase}", 60.0)
        if moves and replicas and phase == 0:
            until(lambda: launch.err.count("is level: 2 of 2 copies") >= 2, "two level copies", 60.0)
        if moves and phase == 0:
            ask(processes, launch, "drain", "server-1")
            until(
                lambda: "server 1 ended with 0" in launch.err or "server 1 ends" in launch.err,
                "the end of it",
            )
        if moves and phase == 1:
            ask(processes, launch, "scale", "--servers", 2 if replicas else 3)
        if moves and phase == 2:
            os.kill(processes.pids(r"kvps\.cli\.server.*--rank 0")[-1], signal.SIGTERM)
            launch.expect(r"server ends: |server \d ends: ")
            until(lambda: launch.err.count("has moved from") >= (3 if replicas else 4), "the last move")
        (folder / str(phase)).touch()
    assert launch.wait(60.0) == 0, launch
    assert "EpochChanged" not in launch.err
    return sorted(re.findall(r"(?:shared|own) \d \w+", launch.out))


@pytest.mark.parametrize("replicas", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.spec("R470", "R475")
def test_weights_are_those_of_a_run_without_a_move(processes: Processes, replicas: int) -> None:
    servers = "2" if replicas else "2:3"
    whole = weights_of(processes, "whole", servers, 0, moves=False)
    assert len(whole) == 4
    assert weights_of(processes, "moved", servers, replicas, moves=True) == whole


WAITS = """
import os, time
import kvps, torch
kv = kvps.create("dist_sync", timeout=60)
kv.init("w", torch.zeros(3))
kv.checkpoint()
print("ready", flush=True)
while not os.path.exists("stop"):
    time.sleep(0.01)
"""


def test_a_restarted_process_takes_the_seats_that_it_held(processes: Processes) -> None:
    """One of its two seats has moved: that another process has the seat of its rank is no reason to end."""
    cluster = processes.scheduler(1, 3)
    words = ("--scheduler", cluster.endpoint)

    def server(ranks: str) -> Process:
        return cluster.server("--rank", ranks, "--checkpoint-dir", processes.folder / "checkpoints")

    def holders() -> list[int]:
        asked = processes.start("status", BIN / "kvps", "status", "--json", *words)
        assert asked.wait() == 0, asked
        members = [member for member in json.loads(asked.out)["members"] if member["role"] == "server"]
        return [member["pid"] for member in members if member["state"] == "held"]

    first, second = server("2,0"), server("1")
    worker = cluster.plain(processes.script(WAITS))
    worker.expect("ready")
    third = server("0")
    scale = processes.start("scale", BIN / "kvps", "scale", "--servers", 3, *words)
    assert scale.wait(60.0) == 0, scale
    assert holders() == [first.pid, second.pid, third.pid]
    third.signal(signal.SIGKILL)
    third = server("0")
    until(lambda: holders() == [first.pid, second.pid, third.pid], "another holder of server 2")
    first.signal(signal.SIGKILL)
    first = server("2,0")
    until(lambda: holders() == [first.pid, second.pid, third.pid], "another holder of server 0")
    (processes.folder / "stop").touch()
    ended = [process.wait() for process in (worker, first, second, third, cluster.process)]
    assert ended == [0, 0, 0, 0, 0], first


def test_impossible_orders_are_refused(processes: Processes) -> None:
    for words, why in (
        (("drain", "worker-1"), "'worker-1' is no server: write server-0"),
        (("drain", "server-x"), "the rank of the server"),
        (("scale", "--servers", "x"), "--servers='x'"),
    ):
        asked = processes.start("kvps", BIN / "kvps", *words)
        assert asked.wait() == 78, asked
        assert why in asked.err
