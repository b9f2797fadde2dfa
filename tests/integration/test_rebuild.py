"""A server that is killed under stores that rebuild: no checkpoint, no error, and the bits of a run without the loss."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest

from tests.integration.processes import Processes

COMMON = """
import hashlib, sys, time
import torch
import kvps
torch.manual_seed(0)
OPTIONS = {"on_server_lost": "rebuild", "timeout": 60}
model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.ReLU(), torch.nn.Linear(500, 1))
"""
OPTIMIZER = """
from kvps.torch import DistributedOptimizer
inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = DistributedOptimizer(inner, model.named_parameters(), kvstore_options=OPTIONS)
rank, step, zero = optimizer.kvstore.rank, optimizer.step, optimizer.zero_grad
"""
TRAINER = """
trainer = kvps.Trainer(model, "sgd", {"learning_rate": 0.05}, kvstore="dist_sync", update_on_kvstore=False,
                       kvstore_options=OPTIONS)
import os
rank, zero = int(os.environ["KVPS_RANK"]), model.zero_grad
step = lambda: trainer.step(16)
"""
PLAIN = """
kv = kvps.create("dist_sync", on_server_lost="rebuild", average=True, timeout=60, bigarray_bound=1000)
rank, zero = kv.rank, model.zero_grad
named = dict(model.named_parameters())
kv.init(list(named), [value.detach() for value in named.values()])
def step():
    gradients = [value.grad for value in named.values()]
    kv.pushpull(list(named), gradients, out=gradients)
    with torch.no_grad():
        for value in named.values():
            value -= 0.05 * value.grad
"""
TRAIN = """
generator = torch.Generator().manual_seed(7 + rank)
for number in range(200):
    inputs = torch.randn(16, 300, generator=generator)
    zero()
    torch.nn.functional.mse_loss(model(inputs), inputs[:, :1]).backward()
    step()
    time.sleep(0.015)
    if number % 20 == 0:
        print("steps", number, flush=True)
print("weights", hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest())
"""


@pytest.mark.spec("R488", "R490")
@pytest.mark.parametrize(
    ("front_end", "transport"),
    [
        (OPTIMIZER, "auto"),
        pytest.param(PLAIN, "tcp", marks=pytest.mark.in_turn),
        pytest.param(TRAINER, "auto", marks=pytest.mark.in_turn),
        pytest.param(OPTIMIZER, "tcp", marks=pytest.mark.in_turn),
    ],
    ids=["optimizer", "plain, without shared memory", "trainer", "optimizer, without shared memory"],
)
def test_weights_are_those_of_a_run_without_a_loss(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, front_end: str, transport: str
) -> None:
    monkeypatch.setenv("KVPS_TRANSPORT", transport)
    script = processes.script(COMMON + front_end + TRAIN)
    ends = []
    for is_killed in (False, True):
        launch = processes.kvps("launch", "-n", 2, "-s", 2, "--max-restarts", 3, "--", sys.executable, script)
        for rank in (0, 1) if is_killed else ():
            launch.expect(f"steps {100 + 40 * rank}")  # the launcher has heard that the stores rebuild
            os.kill(processes.pids(rf"kvps\.cli\.server.*--rank {rank}")[0], signal.SIGKILL)
        assert launch.wait(60.0) == 0, launch
        ends += re.findall(r"weights (\w+)", launch.out)
        assert launch.err.count("starting it again") == 2 * is_killed, launch
    assert len(ends) == 4, ends
    assert len(set(ends)) == 1, "the loss has changed the weights"
