"""Checkpoints in real clusters: taken, restored onto other servers, and returned to when one is lost."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.processes import Processes, has_checkpoint, until

SAVE = """
import torch, kvps

kv = kvps.create("dist_sync", name="model", bigarray_bound=1000)
values = {"a": torch.arange(10.0), "wide": torch.arange(5000.0)}
names = list(values)
kv.init(names, list(values.values()))
kv.set_optimizer("sgd", lr=1.0, momentum=0.5)
for step in range(3):
    out = kv.pushpull(names, [torch.ones_like(one) for one in values.values()])
print("cut", kv.checkpoint("best"), flush=True)
kv.pushpull(names, [torch.ones_like(one) for one in values.values()])
kv.barrier()
"""
RESTORE = """
import sys, torch, kvps

kv = kvps.create("dist_sync", name="model", bigarray_bound=1000)
names = ["a", "wide"]
if sys.argv[1] == "init first":
    kv.init(names, [torch.zeros(10), torch.zeros(5000)])
    kv.set_optimizer("sgd", lr=1.0, momentum=0.5)
cut = kv.restore("best")
if sys.argv[1] == "restore first":
    kv.set_optimizer("sgd", lr=1.0, momentum=0.5)
print("cut", cut, kv.version(names), flush=True)
# Momentum came back, too: v = 0.5 v + g, w -= v. After three steps of two workers v = 3.5.
before = kv.pull(names)
after = kv.pushpull(names, [torch.ones(10), torch.ones(5000)])
for old, new, offset in zip(before, after, (10, 5000)):
    expected = torch.arange(float(offset)) - (2 + 3 + 3.5)
    assert torch.equal(old, expected), (old, expected)
    assert torch.equal(new, old - (0.5 * 3.5 + kv.num_workers)), (new, old)
assert kv.version("a") == 4
kv.set_learning_rate(0.5)
kv.barrier()
"""


def cluster(
    processes: Processes, script: Path, workers: int, servers: int, folder: Path, *more: object
) -> list[str]:
    """Run a script in a cluster whose servers keep checkpoints; return what its workers printed."""
    item = processes.scheduler(workers, servers)
    running = [item.process]
    running += [item.server("--checkpoint-dir", folder) for _ in range(servers)]
    command = (sys.executable, script, *more)
    started = [item.worker(*command) for _ in range(workers)]
    for process in [*started, *running]:
        assert process.wait(60.0) == 0, process
    return [process.out for process in started]


@pytest.mark.parametrize(("workers", "servers", "how"), [(2, 2, "restore first"), (1, 3, "init first")])
def test_a_checkpoint_is_restored_onto_any_number_of_servers(
    processes: Processes, tmp_path: Path, workers: int, servers: int, how: str
) -> None:
    folder = tmp_path / "checkpoints"
    said = cluster(processes, processes.script(SAVE, "save.py"), 2, 2, folder)
    assert said == ["cut 1\n"] * 2
    said = cluster(processes, processes.script(RESTORE, "restore.py"), workers, servers, folder, how)
    assert said == ["cut 1 [3, 3]\n"] * workers
    exported = tmp_path / "model.safetensors"
    command = ("checkpoint", "export", folder, exported, "--tag", "best")
    assert processes.python("-m", "kvps.cli.main", *command).wait() == 0
    assert torch.equal(load_file(exported)["a"], torch.arange(10.0) - 8.5)


SHRINK = """
import torch, kvps

kv = kvps.create("dist_sync", name="model", bigarray_bound=1000)
for names in (["a", "b", "c"], ["c"]):
    kv.broadcast(names, [torch.ones(20_000)] * len(names), out=[torch.empty(20_000)] * len(names))
small = [torch.arange(5.0) for _ in range(2)]
kv.broadcast(["a", "b"], small, out=small)
print("cut", kv.checkpoint("small"), kv.pushpull("a", small[0])[4].item(), flush=True)
"""


def test_a_key_that_was_replaced_by_a_smaller_one_is_in_a_checkpoint_once(
    processes: Processes, tmp_path: Path
) -> None:
    """Its old part on the other server is not."""
    folder, exported = tmp_path / "checkpoints", tmp_path / "model.safetensors"
    said = cluster(processes, processes.script(SHRINK, "shrink.py"), 2, 2, folder)
    assert said == ["cut 1 8.0\n"] * 2
    command = ("checkpoint", "export", folder, exported, "--tag", "small")
    assert processes.python("-m", "kvps.cli.main", *command).wait() == 0
    found = load_file(exported)
    assert {name: len(value) for name, value in found.items()} == {"a": 5, "b": 5, "c": 20_000}


BEGUN_LATE = """
import pathlib, sys, time, torch, kvps

folder, resumed = pathlib.Path(sys.argv[1]), sys.argv[2] == "resumed"
kv = kvps.create("dist_sync", name="model")
kv.init("w", torch.zeros(4))
kv.set_optimizer("sgd", lr=1.0)
if resumed:  # its data take long, and another store is pushed to meanwhile
    other = kvps.create("dist_sync", name="other")
    other.init("x", torch.zeros(1))
    before = set(folder.glob("cut-*/manifest.json"))
    deadline = time.monotonic() + 30
    while len(set(folder.glob("cut-*/manifest.json")) - before) < 2:
        assert time.monotonic() < deadline
        other.pushpull("x", torch.ones(1))
    assert before <= set(folder.glob("cut-*/manifest.json")), "they are gone"
    kv.restore()
for _ in range(10):
    out = kv.pushpull("w", torch.ones(4))
if not resumed:
    kv.checkpoint()
print("at", kv.version("w"), out.tolist(), flush=True)
"""


def test_the_checkpoint_that_a_job_came_to_resume_from_is_there_when_it_does(
    processes: Processes, tmp_path: Path
) -> None:
    script, folder = processes.script(BEGUN_LATE), tmp_path / "cuts"
    flags = ("-n", 1, "-s", 2, "--checkpoint-dir", folder, "--checkpoint-every")
    run = (sys.executable, script, folder)
    first = processes.kvps("launch", *flags, 0, "--", *run, "new")
    assert first.wait(60.0) == 0, first
    again = processes.kvps("launch", *flags, 0.2, "--", *run, "resumed")
    assert again.wait(60.0) == 0, again
    assert "at 20 [-20.0, -20.0, -20.0, -20.0]" in again.out
    assert "first of this job, which has not called restore(), beside checkpoint 1" in again.err
    told = "continues from checkpoint 1, at version 10; passed over checkpoints ["
    assert again.err.count(told) == 1, again


def test_a_store_without_a_place_says_so(processes: Processes) -> None:
    script = processes.script(
        "import kvps\nkv = kvps.create('dist_sync')\n"
        "for call in (kv.checkpoint, kv.restore):\n"
        "    try:\n        call()\n    except kvps.ConfigError as error:\n        print(error)\n"
    )
    cluster = processes.scheduler(1, 1)
    server, worker = cluster.server(), cluster.plain(script)
    assert worker.wait() == 0, worker
    assert worker.out.count("start every kvps-server with --checkpoint-dir") == 2
    assert server.wait() == 0


BEGIN = """
import sys, time, pathlib, torch, kvps

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
options = {"lr": 0.05, "momentum": 0.5}
"""
TRAINER = """
kv = kvps.create("dist_sync")
trainer = kvps.Trainer(model, "sgd", options, kvstore=kv, **OPTIONS)

REDUCTION = "sum"

def step(rate):
    trainer.step(64 * 2)
    if steps != 299:  # who is a step behind makes the last step when the other one has joined
        trainer.set_learning_rate(rate)

join = trainer.join
"""
OPTIMIZER = """
import kvps.torch
kv = kvps.create("dist_sync", average=True)
sgd = torch.optim.SGD(model.parameters(), **options)
optimizer = kvps.torch.DistributedOptimizer(sgd, model, kv, **OPTIONS)

REDUCTION = "mean"

def step(rate):
    optimizer.step()
    optimizer.param_groups[0]["lr"] = rate

join = optimizer.join
"""
TRAIN = """
generator = torch.Generator().manual_seed(kv.rank)  # what one rank alone would do differs
inputs = torch.randn(64, 4, generator=generator)
labels = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]) + 0.25
labels += 0.1 * torch.randn(64, 1, generator=generator)  # so that no rank's own gradient vanishes
steps, enough = 0, pathlib.Path(sys.argv[1])
while not enough.exists() or steps < 300:
    model.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), labels, reduction=REDUCTION)
    loss.backward()
    step(0.05 if steps % 2 else 0.04)
    steps += 1
    time.sleep(0.01)
    if steps % 20 == 0:
        print("steps", steps, flush=True)
print("loss", round(float(loss) / (64 if REDUCTION == "sum" else 1), 4), flush=True)
join()  # one rank may have given up a later step than the other, and so have made one less
print("weights", [one.tolist() for one in model.state_dict().values()], flush=True)
"""
INT8 = {"type": "int8", "min_bytes": 0, "pull": True}


@pytest.mark.parametrize(
    ("front_end", "options"),
    [
        (TRAINER, {"update_on_kvstore": True}),
        pytest.param(TRAINER, {"update_on_kvstore": False}, marks=pytest.mark.in_turn),
        pytest.param(OPTIMIZER, {"update_on_kvstore": True}, marks=pytest.mark.in_turn),
        pytest.param(OPTIMIZER, {"overlap_forward": True}, marks=pytest.mark.in_turn),
        pytest.param(TRAINER, {"compression_params": INT8}, marks=pytest.mark.in_turn),
    ],
)
def test_a_front_end_goes_on_when_a_server_was_lost(
    processes: Processes, tmp_path: Path, front_end: str, options: dict[str, Any]
) -> None:
    text = f"{BEGIN}\nOPTIONS = {options}\n{front_end}\n{TRAIN}"
    script, enough = processes.script(text), tmp_path / "enough"
    flags = (
        *("-n", 2, "-s", 2, "--max-restarts", 3),
        *("--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", 0.3),
    )
    launch = processes.kvps("launch", *flags, "--", sys.executable, script, enough)
    launch.expect("steps 60")
    until(lambda: has_checkpoint(tmp_path / "checkpoints"), "checkpoint")
    os.kill(processes.pids(r"kvps\.cli\.server.*--rank 1")[0], signal.SIGKILL)
    launch.expect("all servers rolled back to the last checkpoint")
    enough.touch()
    assert launch.wait(60.0) == 0, launch
    assert launch.out.count("loss 0.0") == 2, launch
    ends = [line.partition("weights")[2] for line in launch.out.splitlines() if "weights" in line]
    assert len(ends) == 2, launch
    assert ends[0] == ends[1], "the workers have drifted apart"
    told = launch.err.count("all servers rolled back to the last checkpoint")
    assert told == 2, "each worker says it once"
    assert "server 1 ended with exit code 137; starting it again (1 of 3)" in launch.err
