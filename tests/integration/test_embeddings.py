"""Embedding tables over real servers: through all stores, onto other servers, past lost workers."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kvps
import kvps.torch
from kvps.core.worker.calls import embeddings
from kvps.errors import ConfigError, Mismatch
from tests.integration.processes import Processes

DIST = ["dist_sync", "dist_async", "dist_ssp"]


def run(work: Any, workers: int = 2, servers: int = 2) -> list[Any]:
    """Call ``work(rank)`` as each worker of a cluster; return the results."""
    with kvps.LocalCluster(workers, servers) as cluster:
        found: list[Any] = cluster.run(work)
        return found


@pytest.mark.parametrize("kind", DIST)
def test_rows_are_spread_over_servers_and_come_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "PULL_BYTES", 400)  # several answers from each server
    ids = torch.arange(-50, 250) * 2**40

    def work(rank: int) -> object:
        kv = kvps.create(kind, timeout=60)
        table = kv.embedding("t", 4, init=("normal", 0.5), optimizer="sgd", lr=1.0)
        first = table.pull(ids.view(3, 100))
        kv.barrier()  # nobody has pushed yet
        mine = ids[rank::2]
        for _ in range(5):
            table.push(mine, torch.ones(len(mine), 4))
        kv.barrier()
        assert torch.allclose(table.pull(ids), first.view(300, 4) - 5)
        assert (len(table), table.resume()) == (300, 5)
        assert table.version() == (5 if kind == "dist_sync" else 10)
        assert torch.equal(table.pull(2**50 + 7), table.pull([2**50 + 7])[0])
        exported = torch.cat([item for item, _ in table.export()])  # type: ignore[union-attr]
        assert torch.equal(exported.sort().values, ids.sort().values)
        kv.barrier()
        if rank == 0:
            table.push([7], torch.ones(1, 4), async_op=True).wait()
        elif kind == "dist_sync":
            table.push([], [])
        kv.barrier()
        version = 5 if kind == "dist_sync" else 10
        changed = [item.tolist() for item, _ in table.changed_since(version)]  # type: ignore[union-attr]
        kv.barrier()
        return first, changed

    (item, changed), (other, same) = run(work)
    assert torch.equal(item, other)
    assert len(torch.unique(item)) > 1000
    # Of several servers each has counted its own pushes.
    assert changed == same
    assert [7] in changed
    local = kvps.create("local").embedding("t", 4, init=("normal", 0.5), optimizer="sgd", lr=1.0)
    assert torch.equal(local.pull(ids.view(3, 100)), item)


@pytest.mark.parametrize("kind", [*DIST, *[f"{kind}_device" for kind in DIST]])
def test_several_tables_are_pulled_and_pushed_together(kind: str) -> None:
    """Two workers push to three tables in one call each; all pushes are in the rows."""
    ids = torch.arange(-40, 60) * 2**40

    def work(rank: int) -> None:
        kv = kvps.create(kind, timeout=60)
        tables = {
            name: kv.embedding(name, dim, init=("normal", 0.5), optimizer="sgd", lr=1.0, dtype=dtype)
            for name, dim, dtype in (("a", 4, "float32"), ("b", 6, "float64"), ("c", 4, "float32"))
        }
        first = kv.pull_tables(dict.fromkeys(tables, ids))
        kv.barrier()  # nobody has pushed yet
        for step in range(4):
            some = {name: ids[(at + step + rank) % 2 :: 2] for at, name in enumerate(tables)}
            kv.push_tables(
                {name: (own, torch.ones(len(own), tables[name].dim)) for name, own in some.items()},
                async_op=True,
            ).wait()
        kv.barrier()
        for name, rows in kv.pull_tables(dict.fromkeys(tables, ids.view(4, 25))).items():
            assert torch.allclose(rows.view(100, -1), first[name] - 4)
            assert tables[name].version() == (4 if kind.startswith("dist_sync") else 8)

    run(work)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_collection_of_several_workers_trains_as_one_process(kind: str) -> None:
    """The workers push other rows: their gradients are those of one process with all rows."""
    dims = {"user": 4, "item": 4, "word": 3}

    def work(rank: int) -> None:
        kv = kvps.create(kind, timeout=60)
        tables = {name: kv.embedding(name, dim, optimizer="sgd", lr=1.0) for name, dim in dims.items()}
        module = kvps.torch.EmbeddingCollection(tables, op="sum")
        span = torch.arange(100)
        weights = {name: table.pull(span) for name, table in tables.items()}
        kv.barrier()
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for other in range(2):
                ids = {name: torch.randint(50, (8, 3), generator=generator) * 2 + other for name in dims}
                if other == rank:
                    sum(out.square().sum() for out in module(ids).values()).backward()  # type: ignore[union-attr]
                for name, rows in weights.items():
                    rows.requires_grad_()
                    out = torch.nn.functional.embedding_bag(ids[name], rows, mode="sum")
                    (gradient,) = torch.autograd.grad(out.square().sum(), rows)
                    weights[name] = (rows - gradient).detach()
        kv.barrier()
        for name, table in tables.items():
            assert torch.allclose(table.pull(span), weights[name], atol=1e-6)

    run(work)


@pytest.mark.parametrize("kind", DIST)
def test_rows_asked_for_ahead_are_those_that_a_worker_alone_trains(kind: str) -> None:
    """Each worker has ids of its own, in hundreds of which some come again: prefetching changes nothing."""

    def work(rank: int) -> None:
        kv = kvps.create(kind, timeout=60)
        tables = {name: kv.embedding(name, 4, optimizer="adagrad", lr=0.3) for name in ("user", "item")}
        module = kvps.torch.EmbeddingCollection(tables, op="sum")
        local = kvps.create("local", name=f"alone {rank}")
        alone = kvps.torch.EmbeddingCollection(
            {name: local.embedding(name, 4, optimizer="adagrad", lr=0.3) for name in tables}
        )
        generator = torch.Generator().manual_seed(rank)
        batches = [
            {name: torch.randint(50, (16, 3), generator=generator) * 2 + rank for name in tables}
            for _ in range(12)
        ]
        for batch in module.prefetching(batches):
            found, expected = module(batch), alone(batch)
            for outputs in (found, expected):
                sum(out.square().sum() for out in outputs.values()).backward()  # type: ignore[union-attr]
            assert all(torch.equal(found[name], out) for name, out in expected.items())

    run(work)


def test_table_refuses_unsupported_options_and_oversized_pushes_at_once() -> None:
    def work(rank: int) -> None:
        with pytest.raises(ConfigError, match="on_nonfinite='apply'"):
            kvps.create("dist_sync", on_nonfinite="skip").embedding("t", 1)
        kv = kvps.create("dist_sync")
        table = kv.embedding("t", 1024)
        many = 20_000  # of 4 KiB each
        with pytest.raises(Mismatch, match="push half as many rows at once"):
            table.push(torch.arange(many), torch.zeros(1, 1024).expand(many, 1024))

    run(work, workers=1, servers=1)


def test_optimizer_states_of_keys_are_saved_beside_a_table(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        kv = kvps.create("dist_sync")
        kv.init("w", torch.zeros(3))
        kv.set_optimizer("sgd", lr=1.0, momentum=0.5)
        table = kv.embedding("t", 2, optimizer="adam")
        kv.push("w", torch.ones(3))
        table.push([1], torch.ones(1, 2))
        kv.save_optimizer_states(str(tmp_path / "s"))
        kv.load_optimizer_states(str(tmp_path / "s"))
        assert set(kv.optimizer_states()) == {"w"}
        assert kv.keys() == ["w"]
        assert kv.staleness()["w"] == 0

    run(work, workers=1)


def test_a_model_with_a_table_and_a_trainer_learns() -> None:
    """Which of 200 ids are odd ones; their bits are scattered, so each row has to be learned."""
    labels = (torch.arange(200) % 2).float()

    def work(rank: int) -> float:
        torch.manual_seed(0)
        kv = kvps.create("dist_sync", name="rows", timeout=60)
        table = kv.embedding("ids", 8, init=("normal", 0.1), optimizer="adagrad", lr=0.3)
        model = torch.nn.Sequential(kvps.torch.Embedding(table), torch.nn.Linear(8, 1))
        optimizer = kvps.torch.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02), model)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(80):
            some = torch.randint(200, (64,), generator=generator)
            optimizer.zero_grad()
            scores = model(some * 2**33)[:, 0]
            torch.nn.functional.binary_cross_entropy_with_logits(scores, labels[some]).backward()
            optimizer.step()
        optimizer.close()
        model.eval()
        right = (model(torch.arange(200) * 2**33)[:, 0] > 0) == (labels > 0)
        kv.barrier()
        return right.float().mean().item()

    assert min(run(work)) > 0.95


# --- processes -----------------------------------------------------------------------------------

SAVE = """
import torch, kvps

kv = kvps.create("dist_sync", name="model")
table = kv.embedding("t", 2, init=("normal", 0.5), optimizer="sgd", lr=1.0, momentum=0.5)
for step in range(3):
    table.push(range(-20, 20), torch.ones(40, 2))
print("cut", kv.checkpoint("best"), flush=True)
table.push(range(100), torch.ones(100, 2))
kv.barrier()
"""
RESTORE = """
import sys, torch, kvps

kv = kvps.create("dist_sync", name="model")
options = {"init": ("normal", 0.5), "optimizer": "sgd", "lr": 1.0, "momentum": 0.5}
if sys.argv[1] == "make first":
    table = kv.embedding("t", 2, **options)
cut = kv.restore("best")
if sys.argv[1] == "restore first":
    table = kv.embedding("t", 2, **options)
print("cut", cut, table.version(), len(table), flush=True)
first = kvps.create("local").embedding("t", 2, **options).pull(range(-30, 30))
before = table.pull(range(-30, 30))
# Three steps of two workers: v = 2, 3, 3.5.
assert torch.allclose(before[10:50], first[10:50] - 8.5), before
assert torch.equal(before[:10], first[:10])
table.push([0], torch.ones(1, 2))
after = table.pull([0])
assert torch.allclose(after, before[30:31] - (0.5 * 3.5 + kv.num_workers)), after
assert table.version() == 4
kv.barrier()
"""


@pytest.mark.parametrize(("workers", "servers", "how"), [(2, 3, "restore first"), (1, 1, "make first")])
@pytest.mark.spec("R195")
def test_a_table_is_restored_onto_any_number_of_servers(
    processes: Processes, tmp_path: Path, workers: int, servers: int, how: str
) -> None:
    folder = tmp_path / "checkpoints"

    def launch(n: int, s: int, script: str, name: str, *more: str) -> str:
        flags = ("-n", n, "-s", s, "--checkpoint-dir", folder, "--")
        process = processes.kvps("launch", *flags, sys.executable, processes.script(script, name), *more)
        assert process.wait(90.0) == 0, process
        return process.out

    assert launch(2, 2, SAVE, "save.py").count("cut 1") == 2
    assert launch(workers, servers, RESTORE, "restore.py", how).count("cut 1 3 40") == workers


LOSE = """
import os, pathlib, sys, torch, kvps

kv = kvps.create("dist_sync")
table = kv.embedding("t", 2, init="zeros", optimizer="sgd", lr=1.0)
begin = table.resume()
for step in range(begin, 60):
    table.push([step, 1000 + kv.rank, 5000], torch.ones(3, 2))
    if step % 3 == 0:
        assert table.pull([5000])[0, 0] == -2 * (step + 1)
    if kv.rank == 1 and step == 25 and begin == 0:
        os.kill(os.getpid(), 9)
if begin:
    print("replaced at", begin, flush=True)
kv.barrier("end")
rows = table.pull([*range(60), 1000, 1001, 5000])[:, 0]
assert rows.tolist() == [-2.0] * 60 + [-60.0, -60.0, -120.0], rows
table.export(f"{sys.argv[1]}-{kv.rank}")
kv.barrier("over")
"""


@pytest.mark.spec("R188")
def test_each_push_counts_once_though_a_worker_is_killed(processes: Processes, tmp_path: Path) -> None:
    script = processes.script(LOSE, "lose.py")
    flags = ("-n", 2, "-s", 2, "--max-restarts", 1, "--")
    process = processes.kvps("launch", *flags, sys.executable, script, tmp_path / "rows")
    assert process.wait(120.0) == 0, process
    assert "replaced at" in process.out
    found = load_file(tmp_path / "rows-0")
    assert sorted(found["ids"].tolist()) == [*range(60), 1000, 1001, 5000]


LOSE_AHEAD = """
import os, sys, torch, kvps, kvps.torch

kind, count = sys.argv[1], 60
kv = kvps.create(kind)
tables = {name: kv.embedding(name, 2, init="zeros", optimizer="sgd", lr=1.0) for name in ("user", "item")}
rows = kvps.torch.EmbeddingCollection(tables, op="sum")
(begin,) = {table.resume() for table in tables.values()}
ids = [torch.tensor([[step], [1000 + kv.rank], [5000]]) for step in range(count)]
batches = [dict.fromkeys(tables, some) for some in ids[begin:]]
for step, batch in enumerate(rows.prefetching(batches), begin):
    found = rows(batch)
    for out in found.values():
        assert out[1, 0] == -step, (step, out)
        assert out[2, 0] == -2 * step if kind == "dist_sync" else out[2, 0] <= -step, (step, out)
    sum(out.sum() for out in found.values()).backward()
    if kv.rank == 1 and step == 25 and begin == 0:
        os.kill(os.getpid(), 9)
if begin:
    print("replaced at", begin, flush=True)
kv.barrier("end")
for table in tables.values():
    found = table.pull([*range(count), 1000, 1001, 5000])[:, 0]
    assert found.tolist() == [-2.0] * count + [-60.0, -60.0, -120.0], found
kv.barrier("over")
"""


@pytest.mark.spec("R188", "R466")
@pytest.mark.parametrize("kind", ["dist_sync", pytest.param("dist_async", marks=pytest.mark.thorough)])
def test_pushes_of_tables_count_once_and_rows_ahead_are_exact_though_a_worker_is_killed(
    kind: str, processes: Processes
) -> None:
    script = processes.script(LOSE_AHEAD, "lose_ahead.py")
    flags = ("-n", 2, "-s", 2, "--max-restarts", 1, "--")
    process = processes.kvps("launch", *flags, sys.executable, script, kind)
    assert process.wait(120.0) == 0, process
    assert "replaced at" in process.out


LOSE_SERVER = """
import os, pathlib, signal, sys, time, torch, kvps, kvps.torch

kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
kv = kvps.create(kind)
tables = {name: kv.embedding(name, 2, init="zeros", optimizer="sgd", lr=1.0) for name in ("user", "item")}
rows = kvps.torch.EmbeddingCollection(tables, op="sum")
own, both = 1000 + kv.rank, 5000

def again(call, *given):
    while True:
        try:
            return call(*given)
        except kvps.EpochChanged as error:
            print("rolled back", error.after, flush=True)

def value(number):
    return float(again(tables["user"].pull, [number])[0, 0])

def batch(step):
    return dict.fromkeys(tables, torch.tensor([[step], [own], [both]]))

for step in range(90):
    while True:
        before, found = value(own), rows(batch(step))
        if before == value(own):  # no return to a checkpoint in between
            break
    for out in found.values():
        assert out[1, 0] == before, (step, out, before)
    server = 0
    if step == 40 and kv.rank == 0:
        while not (folder / "server").exists():
            time.sleep(0.01)
        server = int((folder / "server").read_text())
        os.kill(server, signal.SIGSTOP)
    rows.prefetch(batch(step + 1))  # in flight when the server is lost, as the push is
    if server:
        os.kill(server, signal.SIGKILL)
    sum(out.sum() for out in found.values()).backward()
    if step == 10:
        print("saved", kv.checkpoint("best"), flush=True)
again(kv.join)  # one rank may have given up a later step than the other, and so have made one less
again(kv.barrier, "end")
for table in tables.values():
    version, found = table.version(), table.pull([1000, 1001, both])[:, 0].tolist()
    assert found[2] == found[0] + found[1], found
    assert kind == "dist_sync" or found[2] == -version, (version, found)
    assert -180 < found[2] < 0, found  # what was pushed since the checkpoint is lost
again(kv.barrier, "over")
print("whole", flush=True)
"""


@pytest.mark.spec("R188")
@pytest.mark.parametrize("kind", ["dist_async", pytest.param("dist_sync", marks=pytest.mark.thorough)])
def test_rows_ahead_and_pushes_are_exact_though_a_server_is_killed(
    kind: str, processes: Processes, tmp_path: Path
) -> None:
    script = processes.script(LOSE_SERVER, "lose_server.py")
    flags = ("-n", 2, "-s", 2, "--max-restarts", 1, "--checkpoint-dir", tmp_path / "checkpoints", "--")
    process = processes.kvps("launch", *flags, sys.executable, script, kind, tmp_path)
    process.expect("saved 1", 90.0)
    pid = processes.pids(r"kvps\.cli\.server.*--rank 1")[0]
    (tmp_path / "new").write_text(str(pid))
    (tmp_path / "new").rename(tmp_path / "server")
    assert process.wait(120.0) == 0, process
    assert process.out.count("whole") == 2
    assert "ended with exit code 137; starting it again (1 of 1)" in process.err
