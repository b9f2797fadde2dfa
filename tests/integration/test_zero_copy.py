"""Pushes and pulls of memory where it lies: equal to copies, never torn, never kept too long."""

import gc
import os
import re
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import kvps
from kvps.core.server.ingest import Ingest
from tests.integration.processes import Cluster, Process, Processes

CUT = 300_000
"""Elements of a key that is cut over all servers."""
SHAPES = {
    "w": (300, 1000),
    "pages": (300, 1024),
    "bias": (100,),
    "v": (64, 32),
    "page": (2, 1024),
    "one": (),
    "no": (0, 3),
}
"""``w`` and ``pages`` are cut over all servers; of ``pages`` every part is whole pages."""
NAMES = list(SHAPES)


def run(work, workers=1, servers=1):
    """Call ``work(rank)`` as each worker of a cluster; return the results."""
    with kvps.LocalCluster(workers, servers) as cluster:
        return cluster.run(work)


def values(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Whole numbers, whose sums have one result in any order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-50, 50, shape, generator=generator).to(dtype) for shape in SHAPES.values()]


def lies_in(tensor: torch.Tensor, how: str) -> bool:
    """Whether a tensor lies in a segment that is mapped ``how`` (``rw-s``, ``r--s``)."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, mode = line.split()[:2]
        first, last = (int(item, 16) for item in place.split("-"))
        if "/memfd:kvps" in line and mode == how and first <= tensor.data_ptr() < last:
            return True
    return False


# --- equal to copies ----------------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_copying_or_not_gives_the_same(kind, dtype, servers, transport, monkeypatch):
    monkeypatch.setenv("KVPS_TRANSPORT", transport)

    def stores():
        for name in ("copies", "lends"):
            kv = kvps.create(kind, name=name, timeout=30)
            if kind == "dist_async":
                kv.set_optimizer("test")
            kv.init(NAMES, values(0, dtype))
            yield kv

    def work(rank):
        copies, lends = stores()
        mine = lends.empty_like(NAMES)
        assert [(array.dtype, array.shape) for array in mine] == [
            (array.dtype, array.shape) for array in values(0, dtype)
        ]
        assert lies_in(mine[0], "rw-s") is (transport == "auto")
        for turn in range(3):
            given = values(10 * turn + rank, dtype)
            for item, value in zip(mine, given, strict=True):
                item.copy_(value)
            if turn == 1:
                copies.push(NAMES, given)
                lends.push(NAMES, mine)
                pulled, views = copies.pull(NAMES), lends.pull(NAMES, copy=False)
            else:
                pulled = copies.pushpull(NAMES, given)
                views = lends.pushpull(NAMES, mine, copy=False)
            if kind == "dist_async":  # the others' pushes of this turn may come later
                copies.barrier()
                lends.barrier()
                pulled, views = copies.pull(NAMES), lends.pull(NAMES, copy=False)
            for value, view in zip(pulled, views, strict=True):
                assert (view.dtype, view.shape) == (value.dtype, value.shape)
                assert torch.equal(view, value)
            assert all(torch.equal(item, value) for item, value in zip(mine, given, strict=True))
            copies.barrier()
        return [view.clone() for view in views]

    first, second = run(work, workers=2, servers=servers)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_memory_that_is_pushed_may_take_the_result():
    def work(rank):
        kv = kvps.create("dist_sync")
        kv.init(NAMES, values(0, torch.float32))
        mine = kv.empty_like(NAMES)
        for turn in range(5):
            for item in mine:
                item.fill_(turn + rank)
            out = kv.pushpull(NAMES, mine, out=mine)
            assert out is mine
            assert all(item.eq(2 * turn + 1).all() for item in mine)

    run(work, workers=2, servers=2)


@pytest.mark.parametrize("name", ["local", "dist_sync"])
def test_parameters_are_pushed_and_written_where_they_are(name):
    def work(rank):
        kv = kvps.create(name)
        kv.init(["a", "b"], [torch.zeros(CUT), torch.zeros(2, 3)])
        own = [torch.nn.Parameter(torch.ones(CUT)), torch.nn.Parameter(torch.ones(2, 3))]
        lent = [torch.nn.Parameter(item.fill_(2)) for item in kv.empty_like(["a", "b"])]
        kv.pushpull(["a", "b"], own, out=own)
        kv.push(["a", "b"], lent)
        kv.pull(["a", "b"], out=own)
        for item in own:
            assert item.requires_grad
            assert item.is_leaf
            assert item._version >= 1, "autograd knows that it was written to"
            assert item.eq(2).all()
        a, b = kv.pull(["a", "b"], copy=False)
        assert not a.requires_grad
        assert not b.requires_grad

    run(work, servers=2)


def test_tensors_that_were_changed_into_others_are_looked_at_anew():
    def work(rank):
        kv = kvps.create("dist_sync")
        kv.init(["a", "b"], [torch.zeros(2000), torch.zeros(3000)])
        a, b = kv.empty_like(["a", "b"])
        a.data = torch.full((2000,), 4.0)  # an ordinary tensor from here on
        kv.push(["a", "b"], [a, b.fill_(5)])
        a.fill_(9)
        assert [item.unique().tolist() for item in kv.pull(["a", "b"])] == [[4], [5]]
        b.resize_(10)
        with pytest.raises(kvps.Mismatch, match=r"'b' is float32\[3000\]; cannot push float32\[10\]"):
            kv.push(["a", "b"], [a, b])

    run(work)


def test_a_tensor_of_one_store_is_lent_in_another():
    def work(rank):
        first, second = kvps.create("dist_sync"), kvps.create("dist_sync", name="other")
        for kv in (first, second):
            kv.init("w", torch.zeros(CUT))
        mine = first.empty_like("w").fill_(3)
        assert second.pushpull("w", mine, copy=False).eq(3).all()
        view = first.pushpull("w", mine, copy=False)
        assert second.pushpull("w", view, copy=False).eq(3).all(), "a view is copied"

    run(work, servers=2)


@pytest.mark.parametrize("name", ["local", "dist_sync"])
def test_without_a_copy_there_is_nothing_to_write_to(name):
    def work(rank):
        kv = kvps.create(name)
        kv.init("w", torch.zeros(3))
        with pytest.raises(kvps.ConfigError, match="copy=False returns read-only views"):
            kv.pull("w", out=torch.zeros(3), copy=False)
        with pytest.raises(kvps.ConfigError, match="remove out="):
            kv.pushpull("w", torch.ones(3), out=torch.zeros(3), copy=False)
        assert kv.version("w") == 0, "nothing was pushed"
        with pytest.raises(kvps.KeyNotFound, match="'x' was never initialised"):
            kv.empty_like("x")
        with pytest.raises(kvps.KeyNotFound, match="'x'"):
            kv.pull("x", copy=False)

    run(work)


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_nothing_is_copied_on_the_way(servers, monkeypatch):
    """The server reads the worker's memory, and the worker the servers', side by side."""
    lent = []
    judge = Ingest.judge

    def note(self, rule, message, gradient):
        lent.append((gradient.is_lent, len(gradient.edges)))
        return judge(self, rule, message, gradient)

    def work(rank):
        kv = kvps.create("dist_sync")
        names = ["a", "b", "c"]
        kv.init(names, [torch.zeros(300, 1024), torch.zeros(30, 100), torch.zeros(5000)])
        mine = kv.empty_like(names)
        monkeypatch.setattr(Ingest, "judge", note)
        for turn in range(3):
            views = kv.pushpull(names, [item.fill_(turn) for item in mine], copy=False)
            assert all(view.eq(turn).all() for view in views)
            assert all(lies_in(view, "r--s") for view in views)
        assert set(lent) == {(True, 1)}, "and its tensors lie as the server's chunks do"

    run(work, servers=servers)


# --- views ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dist_async", "dist_ssp"])
def test_a_view_never_changes_while_others_push(kind):
    def work(rank):
        kv = kvps.create(kind, timeout=60)
        kv.set_optimizer("test")
        kv.init(["w", "b"], [torch.zeros(CUT), torch.zeros(100)])
        kv.barrier()
        if rank:
            mine = kv.empty_like(["w", "b"])
            for _ in range(60):
                kv.pushpull(["w", "b"], [item.fill_(1) for item in mine], copy=False)
            kv.barrier()
            return
        held = []
        for _ in range(20):
            views = kv.pull(["w", "b"], copy=False)
            held.append((views, [view.clone() for view in views]))
            assert [len(view.unique()) for view in views] == [1, 1], "of one version"
            for then, copies in held:
                assert all(torch.equal(*item) for item in zip(then, copies, strict=True))
            del held[:-3]
        kv.barrier()
        assert kv.pull("b", copy=False).unique().tolist() == [120]
        for then, copies in held:
            assert all(torch.equal(*item) for item in zip(then, copies, strict=True))

    run(work, workers=3, servers=2)


def test_a_view_outlives_its_store_and_its_cluster():
    def work(rank):
        kv = kvps.create("dist_sync")
        kv.init(["w", "b"], [torch.full((CUT,), 3.0), torch.full((100,), 4.0)])
        views = kv.pull(["w", "b"], copy=False)
        kv.close()
        assert [view.unique().tolist() for view in views] == [[3], [4]]
        return views

    (views,) = run(work, servers=2)
    gc.collect()
    assert [view.unique().tolist() for view in views] == [[3], [4]]


SCRIPT = """
import os, sys, time
import numpy, torch, kvps

def until(name):
    print(name, flush=True)
    while not os.path.exists(name):
        time.sleep(0.01)

def names(count):
    return [f"k{index}" for index in range(count)]

"""


def let(processes: Processes, name: str) -> None:
    """Let scripts go on that stand at ``name``."""
    (processes.folder / name).touch()


def test_a_view_outlives_the_process_of_its_server(processes: Processes) -> None:
    cluster = processes.scheduler(1, 2)
    servers = [cluster.server(), cluster.server()]
    script = processes.script(
        SCRIPT + "kv = kvps.create('dist_sync')\n"
        f"kv.init(['w', 'b'], [torch.full(({CUT},), 3.0), torch.full((2000,), 4.0)])\n"
        "views = kv.pull(['w', 'b'], copy=False)\n"
        "until('viewed')\n"
        "print('still', [view.unique().tolist() for view in views], flush=True)\n"
        "os._exit(0)\n"
    )
    worker = cluster.plain(script)
    worker.expect("viewed")
    for item in (*servers, cluster.process):
        item.signal(signal.SIGKILL)
        item.wait()
    let(processes, "viewed")
    worker.expect(re.escape("still [[3.0], [4.0]]"))
    assert worker.wait() == 0


@pytest.mark.parametrize("write", ["view.add_(1)", "view.numpy()[0] = 1"])
def test_writing_to_a_view_ends_the_process_as_the_documentation_says(
    processes: Processes, write: str
) -> None:
    cluster = processes.scheduler(1, 1)
    server = cluster.server()
    script = processes.script(
        SCRIPT + "kv = kvps.create('dist_sync')\n"
        f"kv.init('w', torch.zeros({CUT}))\n"
        "view = kv.pull('w', copy=False)\n"
        f"{write}\n"
        "print('written', flush=True)\n"
    )
    worker = cluster.plain(script)
    assert worker.wait() == -signal.SIGSEGV
    assert "written" not in worker.out
    for item in (server, cluster.process):
        item.signal(signal.SIGKILL)
        item.wait()


# --- memory of a server ---------------------------------------------------------------------------------


def memory_of(pid: int) -> tuple[int, int]:
    """The bytes of a process's private memory, and of its own segment."""
    private, is_segment = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        word, *rest = line.split()
        if not word.endswith(":"):
            is_segment = "/memfd:kvps" in line
        elif word.startswith("Private_") and not is_segment:
            private += int(rest[0]) * 1024
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(fd).startswith("/memfd:kvps "):
            return private, fd.stat().st_blocks * 512
    return private, 0


KEYS = 12
TRAINING = (
    SCRIPT
    + f"""
kv = kvps.create("dist_sync")
kv.set_optimizer("sgd", lr=0.1, momentum=0.9)
keys, count, lends = names({KEYS}), int(sys.argv[1]), sys.argv[2] == "lends"
kv.init(keys, [torch.zeros(count + index) for index in range({KEYS})])
mine = kv.empty_like(keys) if lends else [torch.zeros(count + index) for index in range({KEYS})]
outs = [torch.empty_like(one) for one in mine]
for turn in range(int(sys.argv[3])):
    if turn in (10, 60, 160, 260):
        kv.barrier()
        until(f"turn-{{turn}}")
    if lends:
        views = kv.pushpull(keys, mine, copy=False)
    else:
        kv.pushpull(keys, mine, out=outs)
kv.barrier()
until("turn-last")
"""
)


def at(processes: Processes, workers: list[Process], server: Process, name: str) -> tuple[int, int]:
    """The memory of the server when all workers stand at ``name``; then they go on."""
    for worker in workers:
        worker.expect(name)
    found = memory_of(server.pid)
    let(processes, name)
    return found


def training(processes: Processes, count: int, how: str, turns: int, workers: int, **env: str):
    cluster = processes.scheduler(workers, 1)
    server = cluster.server("--threads", "1", **env)
    script = processes.script(TRAINING)
    started = [
        processes.python(script, count, how, turns, KVPS_SCHEDULER=cluster.endpoint, **env)
        for _ in range(workers)
    ]
    return cluster, server, started


def finish(cluster: Cluster, server: Process, workers: list[Process]) -> None:
    assert [worker.wait() for worker in workers] == [0] * len(workers), workers
    assert server.wait() == 0
    assert cluster.process.wait() == 0


@pytest.mark.in_turn
@pytest.mark.parametrize(("how", "transport"), [("lends", "auto"), ("copies", "auto"), ("copies", "tcp")])
def test_the_memory_of_a_server_does_not_grow(processes: Processes, how: str, transport: str) -> None:
    """Of 300 rounds with 4 MB of weights, the quietest 100: what leaks does so in all of them."""
    env = {"KVPS_TRANSPORT": transport, "KVPS_RECORD": "off"}
    parts = training(processes, 85_000, how, 360, 2, **env)
    _, server, workers = parts
    at(processes, workers, server, "turn-10")
    stops = ("turn-60", "turn-160", "turn-260", "turn-last")
    sizes = [sum(at(processes, workers, server, stop)) for stop in stops]
    assert min(after / before for before, after in pairwise(sizes)) <= 1.01, sizes
    finish(*parts)


@pytest.mark.in_turn
@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["copies", "lends"])
def test_the_memory_of_a_server_is_little_more_than_weights_and_their_momentum(
    processes: Processes, how: str
) -> None:
    """Two places for the weights that take turns, the momentum, and what is on its way."""
    count = 2_050_000
    parts = training(processes, count, how, 15, 4)
    _, server, workers = parts
    empty = cluster_of_nothing(processes)
    at(processes, workers, server, "turn-10")
    found = at(processes, workers, server, "turn-last")
    weights = 4 * sum(count + index for index in range(KEYS))
    assert sum(found) - empty <= 3.5 * weights
    finish(*parts)


def cluster_of_nothing(processes: Processes) -> int:
    """The memory of a server without keys."""
    cluster = processes.scheduler(1, 1)
    server = cluster.server("--threads", "1")
    script = processes.script(
        SCRIPT + "kv = kvps.create('dist_sync')\nkv.barrier()\nuntil('empty')\n", "empty.py"
    )
    worker = cluster.plain(script)
    found = at(processes, [worker], server, "empty")
    finish(cluster, server, [worker])
    return sum(found)
