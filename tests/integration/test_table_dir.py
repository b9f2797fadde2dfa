"""A table larger than the memory of its server's control group: trained, saved, and restored by another server."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Process, Processes
from tests.support.cgroup import limited

GROUP_MIB, LIMIT_MIB = 500, 128
SCRIPT = """
import sys
import numpy as np, torch, kvps

ROWS, DIM, EACH = 512 << 10, 128, 8 << 10  # with Adagrad's state 512 MiB
what = sys.argv[1]
kv = kvps.create("dist_async")
recipe = dict(dim=DIM, optimizer="adagrad", init="zeros", lr=0.1)
table = kv.embedding("t", **recipe)
alike = kvps.create("local").embedding("t", **recipe)  # of a few rows, which it updates alike
some = np.arange(0, ROWS, 999)
random = np.random.default_rng(1)

def push(ids, to_table=True):
    gradients = torch.from_numpy(ids % 7 - 3.0).float().view(-1, 1).expand(-1, DIM).contiguous()
    if to_table:
        table.push(ids, gradients)
        table.version()  # no more than one is under way
    mine = np.isin(ids, some)
    alike.push(ids[mine], gradients[mine])

def train(to_table=True):
    for begin in range(0, ROWS, EACH):
        push(np.arange(begin, begin + EACH), to_table)
    for _ in range(20):
        push(np.unique((ROWS ** random.random(EACH)).astype(np.int64) * 3_037 % ROWS), to_table)

if what == "train":
    train()
    print("cut", kv.checkpoint("big"), flush=True)
else:
    kv.restore("big")
    train(to_table=False)
    train()
assert len(table) == ROWS
for begin in range(0, len(some), 100):
    ids = some[begin : begin + 100]
    assert torch.equal(table.pull(ids), alike.pull(ids))
print("equal", flush=True)
"""


@pytest.mark.thorough
def test_a_table_larger_than_memory_is_trained_saved_and_restored(
    processes: Processes, tmp_path: Path
) -> None:
    processes.may_fork = False  # the group would be charged for pages of the parent
    with limited(GROUP_MIB) as group:
        for what in ("train", "restore"):
            cluster = processes.scheduler(1, 1)
            places = "--table-dir", tmp_path, "--checkpoint-dir", tmp_path / "checkpoints"
            server = cluster.server("--memory-limit", f"{LIMIT_MIB}M", "--threads", 1, *places)
            (group / "cgroup.procs").write_text(str(server.pid))
            script = processes.script(SCRIPT)
            worker = processes.python(script, what, KVPS_SCHEDULER=cluster.endpoint)
            worker.expect("equal", 240.0)
            assert [each.wait() for each in (worker, server, cluster.process)] == [0, 0, 0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a disk of 8 MiB of its own; skip where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "kvps-test", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here (needs root)")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_refuses_a_push_and_the_server_lives(processes: Processes, small_disk: Path) -> None:
    cluster = processes.scheduler(1, 1)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2 << 20))
    server = cluster.server("--memory-limit", "8M", "--table-dir", small_disk)
    script = processes.script(
        "import kvps, pathlib, torch\n"
        "kv = kvps.create('dist_async')\n"
        "table = kv.embedding('t', 256, optimizer='sgd', lr=1.0, init='zeros')\n"
        "ids, ones = torch.arange(1024), torch.ones(1024, 256)\n"
        "try:\n"
        "    for at in range(100):\n"
        "        table.push(ids + at * 1024, -ones)\n"
        "        kv.barrier()\n"  # the push has been applied or refused: one is under way at most
        "except kvps.StorageError as error: print('refused', at, error, flush=True)\n"
        "applied = len(table) // 1024\n"
        "assert 8 < applied and applied in (at - 1, at), (applied, at)\n"  # the barrier raises, or the next push
        "for before in range(applied):\n"
        "    rows = table.pull(ids + before * 1024)\n"
        "    assert torch.equal(rows, ones), (before, at, len(table), rows.unique().tolist(), (rows != 1).sum())\n"
        "assert len(table) == applied * 1024\n"
        "print('whole', flush=True)\n"
        f"pathlib.Path({str(ballast)!r}).unlink()\n"
        "table.push(ids + applied * 1024, -ones)\n"
        "assert torch.equal(table.pull(ids + applied * 1024), ones), (applied, at)\n"
        "print('goes on', flush=True)\n"
    )
    worker = cluster.worker(sys.executable, script)
    refusal(worker, small_disk)
    worker.expect("goes on", 60.0)
    assert [each.wait() for each in (worker, server, cluster.process)] == [0, 0, 0]


def refusal(worker: Process, disk: Path) -> None:
    found = worker.expect(r"refused \d+ .*", 60.0).group()
    assert re.search(rf"between memory and {disk}: No space left on device \(need .*iB, free .*\)", found)
    worker.expect("whole", 60.0)
