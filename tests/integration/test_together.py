"""Calls that all ranks make: where one of them cannot be done, every rank is told, and at once."""

import json
import logging
import sys
from pathlib import Path

import pytest

from tests.integration.processes import Processes

TIMEOUT_S = 80.0
"""How long a rank would wait that nobody tells."""
TOLD_S = TIMEOUT_S / 4
"""In how much all must know, on a machine however busy; it takes milliseconds."""
SCRIPT = """
import json, os, sys, time
import torch, kvps

folder, timeout = sys.argv[1], float(sys.argv[2])
kv = kvps.create("dist_sync", name="model", timeout=timeout)
rank, last = kv.rank, kv.num_workers - 1

def until_told(case):
    '''Wait until rank 0 has failed.'''
    deadline = time.monotonic() + timeout / 2
    while not os.path.exists(f"{folder}/{case}-0"):
        assert time.monotonic() < deadline, case
        time.sleep(0.01)


def tell(case, call, late=False):
    '''Make a call that fails; print with what and how soon. The last rank may come when rank 0 knows.'''
    kv.barrier()
    if late and rank == last:
        until_told(case)
    began = time.monotonic()
    try:
        call()
        error = "nothing"
    except kvps.KvpsError as raised:
        error = f"{type(raised).__name__}: {raised}"
    with open(f"{folder}/{case}-{rank}", "w") as file:
        file.write(error)
    print(json.dumps([case, error, time.monotonic() - began]), flush=True)


def on(who, mine, theirs):
    return mine if rank == who else theirs


kv.init("w", torch.zeros(3))
large = torch.zeros(2_000_000)
out = torch.zeros(3)
for late in (False, True):
    tell("init-late" if late else "init-now", lambda: kv.init(["x", "large"], [out, large]), late)
for turn in range(2):
    tell(f"restore-{turn}", lambda: kv.restore("nowhere"))
    tell(f"broadcast-large-{turn}", lambda: kv.broadcast("b", large, out=large))
    for who in (0, last):
        name = f"{turn}-by-{who}"
        value = on(who, torch.zeros(2), torch.zeros(3))
        tell(f"broadcast-shape-{name}", lambda: kv.broadcast("b", value, out=value))
        double = value = on(who, torch.zeros(3, dtype=torch.float64), torch.zeros(3))
        tell(f"broadcast-type-{name}", lambda: kv.broadcast("b", double, out=double))
        tell(f"restore-tag-{name}", lambda: kv.restore(on(who, "a", "b")))
        tell(f"checkpoint-tag-{name}", lambda: kv.checkpoint(on(who, "a", "b")))
# It goes on as if nothing had been.
kv.broadcast("b", torch.full((3,), rank + 1.0), out=out)
assert out.tolist() == [1, 1, 1]
other = kvps.create("dist_sync", name="other", timeout=timeout)
other.init("v", torch.zeros(3))
other.set_optimizer("sgd", lr=1.0, momentum=0.5)
other.pushpull("v", torch.ones(3))
kv, model = other, kv
states = f"{folder}/states-{rank}"
kv.save_optimizer_states(states)
for turn in range(2):
    for who in (0, last):
        path = on(who, f"{folder}/nowhere", states)
        tell(f"load-{turn}-by-{who}", lambda: kv.load_optimizer_states(path))
kv.load_optimizer_states(states)
kv = model
cut = kv.checkpoint("good")
kv.pushpull("w", torch.ones(3))
assert kv.restore("good") == cut
assert kv.pull("w").tolist() == [0, 0, 0]
kv.init("x", out)
kv.barrier("end")
"""
WANTED = {
    "init": "Overload: no room for key",
    "restore": "StorageError: no checkpoint with tag 'nowhere'",
    "restore-tag": "Mismatch: store 'model': worker",
    "checkpoint-tag": "Mismatch: store 'model': worker",
    "broadcast-large": "Overload: no room for key",
    "broadcast-shape": "Mismatch: store 'model': worker",
    "broadcast-type": "Mismatch: store 'model': worker",
    "load": "StorageError: cannot read optimizer states",
}


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_every_rank_is_told(processes: Processes, tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "checkpoints"
    script = processes.script(SCRIPT)
    cluster = processes.scheduler(workers, 2)
    flags = ("--checkpoint-dir", folder, "--memory-limit", 3_000_000)
    running = [cluster.process, *(cluster.server(*flags) for _ in range(2))]
    started = [cluster.worker(sys.executable, script, tmp_path, TIMEOUT_S) for _ in range(workers)]
    for process in [*started, *running]:
        assert process.wait(120.0) == 0, process
    slowest: dict[str, float] = {}
    for process in started:
        told = [json.loads(line) for line in process.out.splitlines()]
        assert len(told) == 2 + 2 * (2 + 2 * 4) + 4
        for case, error, took in told:
            (kind,) = [item for item in sorted(WANTED, key=len) if case.startswith(item)][-1:]
            assert error.startswith(WANTED[kind]), (case, error)
            assert took < TOLD_S, (case, took)
            slowest[kind] = max(slowest.get(kind, 0.0), took)
    logging.getLogger("kvps").info("told within %s", slowest)
