"""Servers that are killed in a job with copies: no call fails, nothing is repeated, and the bits are those of a run
without a loss."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kvps
from kvps import protocol as p
from kvps.core.effects import Hold, Route
from kvps.net.zeromq import ZmqTransport
from kvps.protocol.envelope import Packet
from kvps.subscriber import digest_of
from tests.integration.processes import Processes, until

SCRIPT = """
import hashlib, os, sys, time
import torch
import kvps
kv = kvps.create("dist_sync", timeout=60, bigarray_bound=1000)
rank, folder = kv.rank, sys.argv[1]
names, sizes = [f"w{at}" for at in range(6)], [10, 1000, 33333, 200000, 7, 4096]
generator = torch.Generator().manual_seed(7 + rank)
weights = [torch.zeros(size) for size in sizes]

def moment(name, late):
    # One rank is late, so that the other stands in the middle of the call that follows.
    print("moment", name, flush=True)
    while rank == late and not os.path.exists(f"{folder}/{name}"):
        time.sleep(0.01)

def train(steps):
    for _ in range(steps):
        gradients = [torch.randn(size, generator=generator) for size in sizes]
        kv.pushpull(names, gradients, out=weights)

moment("init", 0)
kv.init(names, [torch.arange(size, dtype=torch.float32) / size for size in sizes])
train(1)
moment("optimizer", 0)
kv.set_optimizer("adam", learning_rate=0.1)
train(5)
moment("round", 1)
train(5)
moment("barrier", 1)
kv.barrier()
train(5)
moment("last", 0)
train(5)
print("weights", hashlib.sha256(b"".join(each.numpy().tobytes() for each in weights)).hexdigest(), flush=True)
"""
TABLES = """
import hashlib, os, sys, time
import torch
import kvps, kvps.torch
kv = kvps.create("dist_sync", timeout=60)
free = kvps.create("dist_async", timeout=60, name="free")
rank, folder = kv.rank, sys.argv[1]
generator = torch.Generator().manual_seed(7 + rank)
digest = hashlib.sha256()

def moment(name, late):
    print("moment", name, flush=True)
    while rank == late and not os.path.exists(f"{folder}/{name}"):
        time.sleep(0.01)

def ids_of(count):
    return torch.randint(300, (count,), generator=generator) * 2**40

def train(steps):
    for _ in range(steps):
        pooled = features({"user": ids_of(40).view(8, 5), "item": ids_of(24).view(8, 3)})
        torch.cat([pooled["user"], pooled["item"]], 1).square().mean().backward()
        rows(ids_of(30)).square().mean().backward()
        some = {table: ids_of(20).unique() for table in (counted, recent)}
        pushed = {table: (ids, torch.randn(len(ids), 4, generator=generator)) for table, ids in some.items()}
        kv.push_tables(pushed)
        own = ids_of(20).unique() + rank  # rows of this rank alone: their bits are the same in each run
        alone.push(own, torch.randn(len(own), 4, generator=generator))
        for found in (alone.pull(own), *kv.pull_tables(some).values()):
            digest.update(found.numpy().tobytes())

moment("init", 0)
ada = dict(init=("normal", 0.1), optimizer="adagrad", lr=0.1)
users = kv.embedding("users", 8, **ada)
items = kv.embedding("items", 4, init=("uniform", 0.5), optimizer="adam", lr=0.01)
features = kvps.torch.EmbeddingCollection({"user": users, "item": kvps.torch.EmbeddingBag(items, mode="mean")})
rows = kvps.torch.Embedding(kv.embedding("rows", 4, **ada))
counted = kv.embedding("counted", 4, admit=2, **ada)
recent = kv.embedding("recent", 4, evict={"rows": 60, "age": 9}, **ada)
alone = free.embedding("alone", 4, optimizer="sgd", lr=0.5)
train(1)
moment("optimizer", 0)
train(5)
moment("round", 1)
train(5)
moment("barrier", 1)
kv.barrier()
train(5)
moment("last", 0)
train(5)
kv.barrier()
for table in (users, items, rows.table, counted, recent, alone):
    table.export(f"{folder}/{table.name}-{rank}.safetensors", with_state=True)
print("weights", digest.hexdigest(), flush=True)
"""
FRONT_ENDS = """
import hashlib, os, sys, time
import torch
sys.path.insert(0, os.getcwd())
from tests.integration.front_ends import FRONT_ENDS
from tests.integration.training_loops import draw
rank, folder, digest = int(os.environ["RANK"]), sys.argv[1], hashlib.sha256()

def loss(model, seed):
    return model(torch.randn(6, 40, generator=torch.Generator().manual_seed(seed))).square().mean()

for moment, front_end in {
    "init": "optimizer", "optimizer": "optimizer-on-servers", "round": "trainer-on-servers",
    "barrier": "shard", "last": "diloco",
}.items():
    model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 20))
    draw(model, 1, 0.3)
    training = FRONT_ENDS[front_end](model, lambda params: torch.optim.SGD(params, 0.1), rank, 2)
    for step in range(6):
        if step == 3:
            print("moment", moment, flush=True)
            while rank == 1 and not os.path.exists(f"{folder}/{moment}"):
                time.sleep(0.01)
        training.zero_grad()
        training.backward(lambda model, rank: loss(model, 10 * step + rank))
        training.step()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    training.close()
print("weights", digest.hexdigest(), flush=True)
"""
FLAGS = ("-n", 2, "-s", 2, "--replicas", 1, "--log-level", "info")
MOMENTS = ("init", "optimizer", "round", "barrier", "last")


def weights_of(processes: Processes, kills: tuple[str, ...], name: str, text: str = SCRIPT) -> list[str]:
    """Run the script, kill a server's process at each of these moments, and return both ranks' weights."""
    folder: Path = processes.folder / name
    folder.mkdir()
    script = processes.script(text)
    launch = processes.kvps("launch", *FLAGS, "--max-restarts", 9, "--", sys.executable, script, folder)
    killed = 0
    for moment in MOMENTS:
        until(lambda moment=moment: launch.out.count(f"moment {moment}") == 2, f"moment {moment}", 60.0)
        if moment in kills:
            due = 2 + 2 * killed
            until(
                lambda due=due: launch.err.count("is level: 2 of 2 copies") >= due, "two level copies", 60.0
            )
            os.kill(processes.pids(rf"kvps\.cli\.server.*--rank {killed % 2}")[-1], signal.SIGKILL)
            killed += 1
            launch.expect(rf"(?s)(goes on in its place.*){{{killed}}}")
        (folder / moment).touch()
    assert launch.wait(60.0) == 0, launch
    assert launch.err.count("starting it again") == killed, launch
    return re.findall(r"weights (\w+)", launch.out)


@pytest.mark.spec("R524", "R526")
@pytest.mark.parametrize(
    "kills",
    [
        ("round",),
        pytest.param(("init", "optimizer", "round", "barrier", "last"), marks=pytest.mark.thorough),
    ],
    ids=["in the middle of a round", "one after another at each moment"],
)
def test_weights_are_those_of_a_run_without_a_loss(processes: Processes, kills: tuple[str, ...]) -> None:
    ends = [*weights_of(processes, (), "whole"), *weights_of(processes, kills, "killed")]
    assert len(ends) == 4, ends
    assert len(set(ends)) == 1, "the loss has changed the weights"


@pytest.mark.thorough
def test_each_front_end_goes_on_to_the_bit_when_a_server_is_killed(processes: Processes) -> None:
    ends = [
        *weights_of(processes, (), "whole", FRONT_ENDS),
        *weights_of(processes, MOMENTS, "killed", FRONT_ENDS),
    ]
    assert len(ends) == 4, ends
    assert len(set(ends)) == 1, "a loss has changed the weights"


@pytest.mark.spec("R445", "R446")
@pytest.mark.parametrize(
    "kills",
    [("round",), pytest.param(("optimizer", "round", "barrier", "last"), marks=pytest.mark.thorough)],
    ids=["in the middle of a round", "one after another"],
)
def test_rows_of_tables_are_those_of_a_run_without_a_loss(
    processes: Processes, kills: tuple[str, ...]
) -> None:
    seen = [
        sorted(weights_of(processes, (), "whole", TABLES)),
        sorted(weights_of(processes, kills, "killed", TABLES)),
    ]
    assert len(set(seen[0])) == 2
    assert seen[0] == seen[1], "the loss has changed rows"
    files = sorted((processes.folder / "whole").glob("*.safetensors"))
    assert len(files) == 12
    for file in files:
        whole, killed = (by_id(load_file(where)) for where in (file, processes.folder / "killed" / file.name))
        assert whole.keys() == killed.keys()
        assert len(whole["ids"])
        for (
            name,
            column,
        ) in whole.items():  # without rounds, versions count the pushes of all ranks as they come
            is_any = name == "versions" and file.name.startswith("alone")
            assert is_any or torch.equal(column, killed[name]), (file, name)


def by_id(table: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    order = table["ids"].argsort()
    return {name: column[order] for name, column in table.items()}


PUBLISHER = """
import os, sys, time
import torch
import kvps
from kvps import protocol as p
from kvps.core.effects import Hold, Route
from kvps.net.zeromq import ZmqTransport
from kvps.protocol.envelope import Packet
from kvps.subscriber import digest_of
kv = kvps.create("dist_sync", timeout=60, bigarray_bound=1000)
rank, folder = kv.rank, sys.argv[1]
generator = torch.Generator().manual_seed(7 + rank)
print("scheduler", os.environ["KVPS_SCHEDULER"], "keys", os.environ.get("KVPS_KEYS", ""), flush=True)
kv.init(["w", "v"], [torch.zeros(20000), torch.zeros(7)])
uploaded, at, last = torch.zeros(5000), 0, 0
while not last or at < last:
    if rank == 0 and not last and at >= 40 and os.path.exists(f"{folder}/enough"):
        open(f"{folder}/last.new", "w").write(str(at + 1))  # it lies there before anybody has ended this step
        os.rename(f"{folder}/last.new", f"{folder}/last")
    values = kv.pushpull(["w", "v"], [torch.randn(20000, generator=generator), torch.ones(7)])
    number = kv.publish("keys", ["w", "v"])
    if rank == 0:
        print(f"published keys {number} {digest_of(values[0])}", flush=True)
        uploaded += 1
        print(f"published given {kv.publish('given', {'u': uploaded})} {digest_of(uploaded)}", flush=True)
    at += 1
    print("step", at, flush=True)
    time.sleep(0.02)
    if os.path.exists(f"{folder}/last"):
        last = int(open(f"{folder}/last").read())
"""


@pytest.mark.spec("R552", "R554", "R556")
@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_readers_go_on_with_the_next_server(processes: Processes, kills: int) -> None:
    folder = processes.folder
    script = processes.script(PUBLISHER)
    launch = processes.kvps("launch", *FLAGS, "--max-restarts", 9, "--", sys.executable, script, folder)
    scheduler, keys = launch.expect(r"scheduler (tcp://\S+) keys (\S*)", 60.0).groups()
    seen: dict[str, dict[int, str]] = {"keys": {}, "given": {}}
    stops, late_s, failures = threading.Event(), [0.0], list[BaseException]()

    def read(name: str) -> None:
        try:
            with kvps.subscribe(name, scheduler, keys or None) as policy:
                while not stops.is_set():
                    before = max(seen[name], default=0)
                    began = time.monotonic()
                    assert policy.wait(newer_than=before, timeout=30) > before
                    late_s.append(time.monotonic() - began)
                    ((_, first), *_) = policy.tensors()
                    seen[name][policy.version] = digest_of(first)
        except BaseException as error:
            failures.append(error)

    def have_read(more: int) -> None:
        counts = {name: len(found) + more for name, found in seen.items()}
        until(lambda: failures or all(len(seen[name]) >= counts[name] for name in seen), "versions read")
        assert not failures, failures

    readers = [threading.Thread(target=read, args=(name,)) for name in seen]
    for reader in readers:
        reader.start()
    for killed in range(kills):
        due = 2 + 2 * killed
        until(lambda due=due: launch.err.count("is level: 2 of 2 copies") >= due, "two level copies", 60.0)
        have_read(1)
        os.kill(processes.pids(rf"kvps\.cli\.server.*--rank {killed % 2}")[-1], signal.SIGKILL)
        launch.expect(rf"(?s)(goes on in its place.*){{{killed + 1}}}")
        have_read(3)
    stops.set()
    for reader in readers:
        reader.join(30)
    (folder / "enough").touch()
    assert launch.wait(60.0) == 0, launch
    for name, found in seen.items():
        said = re.findall(rf"published {name} (\d+) (\w+)", launch.out)
        published = {int(number): digest for number, digest in said}
        assert len(published) == len(said), "a number of two versions"
        assert list(found) == sorted(found)
        assert {number: published[number] for number in found} == found
    assert max(late_s) < 5, "a reader waited"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_goes_on_without_a_server_that_is_not_started_again(processes: Processes, number: int) -> None:
    folder = processes.folder
    launch = processes.kvps("launch", *FLAGS, "--", sys.executable, processes.script(SCRIPT), folder)
    until(lambda: launch.err.count("is level: 2 of 2 copies") >= 2, "two level copies", 60.0)
    os.kill(processes.pids(r"kvps\.cli\.server.*--rank 0")[-1], number)
    launch.expect("server 0 .*(goes on in its place|has moved from)")
    for moment in MOMENTS:
        (folder / moment).touch()
    assert launch.wait(60.0) == 0, launch
    said = "server 0 ended with exit code 137 and is not started again" in launch.err
    assert said == (number == signal.SIGKILL)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            ("-s", 1, "--replicas", 1),
            "--replicas 1 with 1 servers: a copy has to lie in another server's process",
        ),
        (("-s", 2, "--replicas", 2), "--replicas=2: a server has 0 or 1 copies"),
        (("-s", 2, "--replicas", -1), "a server has 0 or 1 copies"),
    ],
)
def test_impossible_copies_are_refused(processes: Processes, flags: tuple[object, ...], why: str) -> None:
    launch = processes.kvps("launch", "-n", 1, *flags, "--", "true")
    assert launch.wait() == 78
    assert why in launch.err
    scheduler = processes.kvps("scheduler", "--workers", 1, "--servers", *flags[1:])
    assert scheduler.wait() == 78
    assert "a server has 0 or 1 copies" in scheduler.err or "a copy has to lie in another" in scheduler.err


def test_a_cluster_in_one_process_has_copies() -> None:
    with pytest.raises(kvps.ConfigError, match="--replicas 1 with --servers 1"):
        kvps.LocalCluster(workers=1, servers=1, replicas=1)

    with kvps.LocalCluster(workers=2, servers=2, replicas=1) as cluster:

        def work(rank: int) -> float:
            store = kvps.create("dist_sync")
            store.init("w", torch.zeros(5))
            return float(store.pushpull("w", torch.full((5,), rank + 1.0))[0])

        assert cluster.run(work) == [3.0, 3.0]


@pytest.mark.parametrize("optimizer", ["", "adam"])
def test_a_standby_on_the_same_host_reads_values_where_they_lie(
    monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    frames: list[int] = []
    send = ZmqTransport.send

    def seen(self: ZmqTransport, route: Route, packet: Packet, hold: Hold | None) -> None:
        if isinstance(packet.message, p.CopyValues):
            frames.append(sum([frame.nbytes for frame in packet.payload]))
        send(self, route, packet, hold)

    monkeypatch.setattr(ZmqTransport, "send", seen)
    with kvps.LocalCluster(workers=2, servers=2, replicas=1) as cluster:

        def work(rank: int) -> None:
            store = kvps.create("dist_sync")
            store.init("w", torch.zeros(100_000))
            if optimizer:
                store.set_optimizer(optimizer)
            for _ in range(8):
                store.pushpull("w", torch.ones(100_000))

        cluster.run(work)
    assert len(frames) > 8
    assert not any(frames[-4:]), "the bytes of values went through a socket"


def test_a_manifest_is_written_without_copies(processes: Processes) -> None:
    launch = processes.kvps("launch", *FLAGS, "--dry-run=k8s", "--image", "x", "--", "true")
    assert launch.wait() == 78
    assert "--replicas has no meaning with --dry-run: add it to the kvps-scheduler" in launch.err


def test_a_cluster_in_one_process_does_not_wait_for_a_spare_that_reached_nobody() -> None:
    with kvps.LocalCluster(workers=1, servers=2, replicas=1) as cluster:
        store = kvps.create("dist_sync")
        store.init("w", torch.rand(5))
        cluster.scheduler = "tcp://127.0.0.1:1"  # nobody listens there
        cluster._start_server(0, standby=True)
