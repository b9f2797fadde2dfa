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


ABORTED = """
import torch, torch.distributed as dist
import kvps, kvps.torch
dist.init_process_group("kvps")
rank = dist.get_rank()
kv = kvps.create("dist_sync")
kv.init("w", torch.zeros(3))
works = []
if rank == 0:  # the others make none of these calls
    works = [
        dist.all_reduce(torch.ones(4), async_op=True),
        dist.all_gather([torch.zeros(2)] * 2, torch.ones(2), async_op=True),
        dist.broadcast(torch.ones(3), 1, async_op=True),
    ]
dist.group.WORLD.abort()
said = 0
for call in (*[work.wait for work in works], lambda: dist.all_reduce(torch.ones(4))):
    try:
        call()
    except kvps.ConfigError as error:
        said += "was destroyed" in str(error)
assert kv.pushpull("w", torch.ones(3)).tolist() == [2.0] * 3
dist.destroy_process_group()
dist.init_process_group("kvps")
total = torch.ones(4)
dist.all_reduce(total)
print("rank", rank, "ended", said, "and sums", total.sum().item(), flush=True)
"""


def test_an_aborted_group_ends_its_calls_and_leaves_the_stores(processes: Processes) -> None:
    launched = launch(processes, 2, 1, processes.script(ABORTED))
    assert launched.wait(LIMIT_S) == 0, launched
    for rank, ended in ((0, 4), (1, 1)):
        assert f"[worker {rank}] rank {rank} ended {ended} and sums 8.0" in launched.out, launched


CHANGED = """
import os
from types import SimpleNamespace
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
import kvps, kvps.torch
options = {}
if hasattr(dist, "_reconfigure"):  # torch 2.14
    options["enable_reconfigure"] = True
else:
    c10d._DistributedBackendOptions.enable_reconfigure = True
dist.init_process_group("kvps", **options)
rank, group, store = dist.get_rank(), dist.group.WORLD, c10d._get_default_store()
assert group.supports_reconfigure

def refused(error, text, call, *given):
    try:
        call(*given)
    except error as found:
        assert text in str(found), found
    else:
        raise AssertionError(text)

def change(uuid, handles, hints=()):
    group.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=None, hints=dict(hints))).wait()

def total(number):
    row = torch.full((4,), float(number))
    dist.all_reduce(row)
    return row.tolist()

refused(kvps.ConfigError, "has no members", dist.barrier)
refused(kvps.ConfigError, "new_group() beside a group that can", dist.new_group, [0, 1, 2])
store.set(f"handle{rank}", group.get_reconfigure_handle())
handles = [store.get(f"handle{other}").decode() for other in range(3)]
refused(kvps.ConfigError, "and no hints", change, 1, handles, {"a": "b"})
refused(kvps.ConfigError, "with that of this process", change, 1, handles[:rank] + handles[rank + 1 :])
change(1, set(handles))
assert total(rank) == [3.0] * 4
refused(RuntimeError, "uuid 1 was already used", change, 1, handles)
if rank:
    change(2, handles[:0:-1])  # without worker 0, and in another order
    assert (dist.get_rank(), dist.get_world_size()) == (2 - rank, 2)
    assert total(rank) == [3.0] * 4
    row = torch.full((2,), float(rank))
    dist.broadcast(row, 0)
    assert row.tolist() == [2.0] * 2
change(3, handles)
if rank == 2:
    os._exit(9)
works = [dist.all_reduce(torch.ones(4), async_op=True), dist.broadcast(torch.ones(3), 2, async_op=True)]
for work in works:
    refused(kvps.WorkerLost, "worker 2", work.wait)
change(4, handles[:2])
assert total(rank + 1) == [3.0] * 4
if rank == 0:
    waiting = dist.all_reduce(torch.ones(9), async_op=True)
group.abort()
if rank == 0:
    refused(kvps.ConfigError, "was destroyed", waiting.wait)
refused(kvps.ConfigError, "was aborted", dist.barrier)
change(5, handles[:2])
assert (dist.get_rank(), total(rank + 1)) == (rank, [3.0] * 4)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.full((1, 2), float(rank))).sum().backward()  # its mean is over those that are left
assert model.module.weight.grad.tolist() == [[0.5, 0.5]]
dist.destroy_process_group()
print("rank", rank, "went on", flush=True)
"""


def test_a_group_goes_on_with_other_members(processes: Processes) -> None:
    """Where one is lost, and after an abort; as torch's reconfigure, which 2.14 has, prescribes."""
    cluster = processes.scheduler(3, 1)
    cluster.server()
    script = processes.script(CHANGED)
    workers = [cluster.plain(script) for _ in range(3)]
    codes = [worker.wait(LIMIT_S) for worker in workers]
    assert sorted(worker.out for worker in workers) == ["", "rank 0 went on\n", "rank 1 went on\n"], workers
    assert sorted(codes) == [0, 0, 9], workers
    cluster.process.signal(signal.SIGTERM)  # it would wait for a replacement
    cluster.process.wait()
