"""How much memory a worker of a sharded model takes: that of a few blocks, however many there are."""

import re
import signal
import sys

import pytest

from tests.integration.processes import Processes

SCRIPT = """
import resource, sys
import torch
import kvps.torch

torch.set_num_threads(1)
MIB = 1 << 20
how, (depth, limit_mib, WIDTH) = sys.argv[1], map(int, sys.argv[2:])

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.narrow(self.wide(x).relu())

def kib(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key))

def train(model, step):
    model(torch.ones(2, WIDTH)).square().mean().backward()
    step()

# What torch loads when it is first used counts for nobody.
small = torch.nn.Linear(2, WIDTH)
sgd = torch.optim.SGD(small.parameters(), lr=0.1)
small(torch.ones(1, 2)).sum().backward()
sgd.step()
kv = kvps.create("dist_sync")

if limit_mib:
    resource.setrlimit(resource.RLIMIT_DATA, (kib("VmData:") * 1024 + limit_mib * MIB,) * 2)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM begins anew
begun = kib("VmRSS:")
with torch.device("meta" if how == "sharded" else "cpu"):
    model = torch.nn.Sequential(*(Block() for _ in range(depth)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
if how == "sharded":
    kvps.torch.shard(model, optimizer=optimizer)
for step in range(3):
    optimizer.zero_grad()
    train(model, optimizer.step)
print(f"trained {depth} blocks, grew by {(kib('VmHWM:') - begun) // 1024} MiB")
"""
WIDTH, BLOCK_MIB = 1536, 18


def train(
    processes: Processes, how: str, depth: int, limit_mib: int = 0, width: int = WIDTH
) -> tuple[int, str]:
    """Return the exit code and what was printed."""
    script = processes.script(SCRIPT, f"{how}{depth}.py")
    cluster = processes.scheduler(1, 1)
    cluster.server(KVPS_TRANSPORT="tcp")
    words = [script, how, depth, limit_mib, width]
    worker = cluster.worker(sys.executable, *words, KVPS_TRANSPORT="tcp")
    code = worker.wait(100.0)
    if code:
        cluster.process.signal(signal.SIGTERM)  # it would wait for a replacement
    cluster.process.wait()
    return code, worker.out + worker.err


def growth_mib(printed: str) -> int:
    found = re.search(r"grew by (\d+) MiB", printed)
    assert found, printed
    return int(found[1])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_memory_is_that_of_some_blocks(processes: Processes) -> None:
    """Twice the blocks take no more; weights and gradients of the model alone would be 864 MiB."""
    grown = [growth_mib(train(processes, "sharded", depth)[1]) for depth in (12, 24)]
    assert grown[1] < 24 * BLOCK_MIB, "less than the weights"
    assert grown[1] - grown[0] < 6 * BLOCK_MIB, "of twelve more blocks; the heap keeps some memory"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_many_small_blocks_leave_no_gaps_in_the_heap(processes: Processes) -> None:
    """Weights of 0.6 MiB are cut from the heap, which grew to several times of the model's 216 MiB."""
    code, printed = train(processes, "sharded", 192, width=384)
    assert code == 0, printed
    assert growth_mib(printed) < 192 * BLOCK_MIB / 16, "less than the weights"


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_model_that_is_larger_than_the_limit(processes: Processes) -> None:
    """Weights, gradients and momenta are 1,300 MiB."""
    code, printed = train(processes, "sharded", 24, limit_mib=600)
    assert code == 0, printed
    assert "trained 24 blocks" in printed
    code, printed = train(processes, "plain", 24, limit_mib=600)
    assert code != 0
    assert "alloc" in printed or "Memory" in printed, printed
