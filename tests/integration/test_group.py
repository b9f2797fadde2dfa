"""The backend "kvps" of torch.distributed, with real processes: each operation, DDP, and what goes wrong."""

import re
import signal
import sys
from collections.abc import Iterator

import pytest

import kvps
from kvps.torch.distributed import rendezvous
from tests.integration import group_worker
from tests.integration.processes import ROOT, Process, Processes, made

WORKER = ROOT / "tests" / "integration" / "group_worker.py"
DIGITS = ROOT / "examples" / "ddp_digits.py"
LIMIT_S = 90.0


@pytest.fixture(autouse=True)
def inductor(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """DistributedDataParallel makes a folder for compiled kernels, which is none of ours."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))


def launch(processes: Processes, ranks: int, servers: int, *command: object) -> Process:
    flags = ("-n", ranks, "-s", servers)
    return processes.kvps("launch", *flags, "--", sys.executable, *command)


# --- each operation -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Three ranks that have run all cases of group_worker.py over two servers."""
    for processes in made(tmp_path_factory.mktemp("group")):
        processes.env["TORCHINDUCTOR_CACHE_DIR"] = str(processes.folder / "inductor")
        launched = launch(processes, 3, 2, WORKER)
        launched.wait(LIMIT_S)
        yield launched


@pytest.mark.parametrize("name", [item.__name__ for item in group_worker.CASES])
def test_three_ranks(ran: Process, name: str) -> None:
    assert len(re.findall(rf"^\[worker \d\] {name} passed", ran.out, re.MULTILINE)) == 3, ran


def test_destroying_the_group_and_leaving_ends_all_of_it(ran: Process) -> None:
    assert ran.out.count("all is over") == 3, ran
    assert ran.popen.returncode == 0, ran


# --- a stock script -----------------------------------------------------------------------------


@pytest.mark.thorough
def test_good_runs_print_no_warning(processes: Processes) -> None:
    """Rank 0 tests alone, so either rank may be the last to end."""
    for _ in range(8):
        launched = launch(processes, 2, 2, DIGITS, "--epochs", 1, "--min-accuracy", 0)
        assert launched.wait(LIMIT_S) == 0, launched
        assert launched.err == "", launched
        assert "[worker 1]" not in launched.out, launched


# --- where ranks come from ----------------------------------------------------------------------

ALONE = """
import threading
import torch, torch.distributed as dist
import kvps.torch
for again in range(2):
    dist.init_process_group("kvps")
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    one = torch.ones(3)
    dist.all_reduce(one)
    dist.all_reduce(one, dist.ReduceOp.MAX)
    dist.broadcast(one, 0)
    dist.barrier()
    found = [None]
    dist.all_gather_object(found, "me")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()
    assert not [one for one in threading.enumerate() if one.name.startswith("kvps")]
    print(one.tolist(), found, flush=True)
"""


def test_a_process_without_a_cluster_is_a_world_of_one(processes: Processes) -> None:
    process = processes.python(processes.script(ALONE))
    assert process.wait(LIMIT_S) == 0, process
    assert process.out.splitlines() == ["[1.0, 1.0, 1.0] ['me']"] * 2


NAME_ALONE = """
{imports}
dist.init_process_group("kvps")
one = torch.ones(3)
dist.all_reduce(one)
assert one.tolist() == [1.0] * 3
dist.destroy_process_group()
print("done")
"""


@pytest.mark.usefixtures("fresh_interpreters")
@pytest.mark.parametrize(
    "imports",
    [
        "import kvps\nimport torch\nimport torch.distributed as dist",
        "import torch\nimport torch.distributed as dist\nimport kvps",
    ],
    ids=["kvps first", "torch first"],
)
def test_import_kvps_makes_the_backend_known(processes: Processes, imports: str) -> None:
    process = processes.python(processes.script(NAME_ALONE.format(imports=imports)))
    assert process.wait(LIMIT_S) == 0, process
    assert process.out == "done\n", process


OTHERS = """
import os
import torch, torch.distributed as dist
import kvps, kvps.torch
for again in range(2):
    dist.init_process_group("kvps")
    rank = dist.get_rank()
    assert os.environ.get("RANK", str(rank)) == str(rank)
    assert kvps.create("dist_sync").rank == rank
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    aside = dist.new_group(backend="gloo")  # torch's own store is there for others
    dist.all_reduce(total, group=aside)
    print("rank", rank, "sum", total.item(), flush=True)
    dist.destroy_process_group()
"""


def test_ranks_are_those_of_the_cluster(processes: Processes) -> None:
    """Of a plain process, which says nothing, and of one to which another launcher gave a rank."""
    cluster = processes.scheduler(2, 1)
    cluster.server()
    script = processes.script(OTHERS)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    told = cluster.plain(script, RANK="1", **place)
    cluster.process.expect("worker 1")  # it does not get the first seat that is free
    plain = cluster.plain(script)
    for rank, worker in enumerate((plain, told)):
        assert worker.wait(LIMIT_S) == 0, worker
        assert worker.out.splitlines() == [f"rank {rank} sum 6.0"] * 2
    assert cluster.process.wait() == 0


LATE = """
import atexit, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import kvps.torch
from kvps.torch.distributed import call_checker
call_checker.EVERY_S = 60.0  # the only look at the calls of others is that at the end
dist.init_process_group("kvps")
dist.all_reduce(torch.ones(3))
ends = Path("rank 0 ends")
if dist.get_rank() == 0:
    atexit.register(ends.touch)
else:
    until = time.monotonic() + 30
    while not ends.exists() and time.monotonic() < until:
        time.sleep(0.001)
    assert ends.exists()
if sys.argv[1:] == ["destroy"]:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", ["destroy", "nothing"])
def test_no_rank_asks_a_store_whose_rank_0_has_gone(processes: Processes, end: str) -> None:
    launched = launch(processes, 2, 1, processes.script(LATE), end)
    assert launched.wait(LIMIT_S) == 0, launched
    assert (launched.out, launched.err) == ("", ""), launched


def test_ranks_that_do_not_agree_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPS_SCHEDULER", raising=False)
    with pytest.raises(kvps.ConfigError, match=r"WORLD_SIZE is 4, and no cluster is configured"):
        rendezvous._join(0, 4, 5.0)
    with kvps.LocalCluster():
        with pytest.raises(kvps.ConfigError, match=r"has 4 ranks .* the cluster has 1 workers"):
            rendezvous._join(0, 4, 5.0)
        with pytest.raises(kvps.ConfigError, match=r"is rank 3 for torch .* and worker 0 of the"):
            rendezvous._join(3, 1, 5.0)


# --- what goes wrong ----------------------------------------------------------------------------

LOST = """
import os, pathlib, time
import torch, torch.distributed as dist
import kvps, kvps.torch
dist.init_process_group("kvps")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
if rank == 2:
    for other in (0, 1):
        dist.recv(torch.zeros(1), other)
    os._exit(9)
works = [
    dist.all_reduce(torch.ones(2), async_op=True),
    dist.all_reduce(torch.ones(2), async_op=True),  # it waits for the one before
    dist.all_gather([torch.zeros(3)] * 3, torch.ones(3), async_op=True),
    dist.broadcast(torch.ones(4), 2, async_op=True),
    dist.irecv(torch.ones(5), 2),
    dist.barrier(async_op=True),
]
dist.send(torch.zeros(1), 2)
said = 0
for work in works:
    try:
        work.wait()
    except kvps.WorkerLost as error:
        assert "worker 2" in str(error), error
        assert not work.is_success()
        said += 1
try:
    model(torch.ones(1, 2)).sum().backward()
except RuntimeError as error:
    assert "worker 2" in str(error), error
    said += 1
# One that has ended is lost, too, and would be named to the other.
pathlib.Path(f"told-{rank}").touch()
deadline = time.monotonic() + 30
while len(list(pathlib.Path().glob("told-*"))) < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
dist.destroy_process_group()
print("lost", said, "times", flush=True)
"""


def test_a_lost_worker_ends_every_collective_of_the_others(processes: Processes) -> None:
    cluster = processes.scheduler(3, 1)
    cluster.server()
    script = processes.script(LOST)
    workers = [cluster.plain(script) for _ in range(3)]
    codes = [worker.wait(LIMIT_S) for worker in workers]
    told = sorted(worker.out for worker in workers)
    assert told == ["", "lost 7 times\n", "lost 7 times\n"], workers
    assert 9 in codes, workers
    cluster.process.signal(signal.SIGTERM)  # it would wait for a replacement
    cluster.process.wait()
