"""Tables of rows that are published, and looked up by processes that are no members."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kvps
from kvps.core.embedding.published import ServedTable
from tests.integration.processes import Processes

LIMIT_S = 30
WANTED = torch.arange(10_500)


def test_rows_are_those_of_one_version_whatever_is_pushed(tmp_path: Path) -> None:
    """Each version has the bits of all workers' pushes before it, as pulls and exports have them."""

    def train(rank: int) -> list[dict[str, torch.Tensor]]:
        seen = []
        torch.manual_seed(rank)
        with kvps.create("dist_sync") as kv:
            kv.init("bias", torch.arange(5.0))
            users = kv.embedding("users", 8, init=("normal", 0.1), optimizer="adagrad", lr=0.1)
            items = kv.embedding("items", 3, init="zeros", optimizer="sgd", lr=1.0, dtype=torch.bfloat16)
            for version in (1, 2, 3):
                users.push(torch.randint(10_000, (500,)), torch.randn(500, 8))
                items.push(torch.randint(50, (9,)), torch.randn(9, 3))
                assert kv.publish("ctr", ["bias"], tables=[users, "items"], keep=5) == version
                seen.append({"users": users.pull(WANTED), "items": items.pull(WANTED[:60])})
            users.push([1, 20_000], torch.randn(2, 8))
            if rank == 0:
                kv.publish("half", None, "bfloat16", tables=users)
                kv.publish("small", {"w": torch.ones(2)})
                users.export(tmp_path / "users.safetensors")
                found = load_file(tmp_path / "users.safetensors")
                read(seen, found["ids"], found["rows"])
            kv.barrier()
        return seen

    def read(seen: list[dict[str, torch.Tensor]], ids: torch.Tensor, rows: torch.Tensor) -> None:
        place = (cluster.scheduler, cluster.keys)
        for version in (1, 2, 3):
            with kvps.subscribe("ctr", *place) as ctr:
                ctr.wait(version=version, timeout=LIMIT_S)
                assert torch.equal(ctr.lookup("users", WANTED), seen[version - 1]["users"])
                assert torch.equal(ctr.lookup("items", WANTED[:60]), seen[version - 1]["items"])
                assert torch.equal(dict(ctr.tensors())["bias"], torch.arange(5.0))
                assert ctr.lookup("users", WANTED[:6].view(2, 3)).shape == (2, 3, 8)
                assert ctr.lookup("users", []).shape == (0, 8)
        with kvps.subscribe("half", *place) as half, kvps.subscribe("small", *place) as small:
            assert torch.equal(half.lookup("users", ids), rows.bfloat16())
            for wrong in ([1.5], "a", None):
                with pytest.raises(kvps.Mismatch, match="ids are whole numbers"):
                    half.lookup("users", wrong)
            high = [1, 2**63, 2**64 - 1]  # hashes without a sign
            assert torch.equal(half.lookup("users", high), half.lookup("users", [1, -(2**63), -1]))
            with pytest.raises(
                kvps.KeyNotFound, match="version 1 of 'small' has no table 'users'; it has: none"
            ):
                small.lookup("users", [1])
        part = kvps.subscribe("half", *place, shard=(0, 2))
        with part, pytest.raises(kvps.ConfigError, match="reads a shard"):
            part.lookup("users", [1])

    with kvps.LocalCluster(workers=2, servers=2) as cluster:
        first, second = cluster.run(train)
    for item, other in zip(first, second, strict=True):
        assert all(torch.equal(item[name], other[name]) for name in item)


CHECKPOINT = """
import sys, safetensors.torch, torch, kvps

kv = kvps.create("dist_sync", name="model")
table = kv.embedding("users", 4, init=("uniform", 0.5), optimizer="adagrad", lr=0.1, evict={"rows": 900})
torch.manual_seed(kv.rank)
for step in range(3):
    table.push(torch.randint(2_000, (400,)), torch.randn(400, 4))
    kv.publish("ctr", tables="users")
kv.checkpoint()
if kv.rank == 0:
    with kvps.subscribe("ctr") as ctr:
        safetensors.torch.save_file(dict(ctr.tensors()), sys.argv[1])
kv.barrier()
"""


def test_exported_checkpoint_has_the_bits_that_readers_look_up(processes: Processes, tmp_path: Path) -> None:
    job = processes.scheduler(2, 2)
    running = [job.process, *[job.server("--checkpoint-dir", tmp_path / "cuts") for _ in range(2)]]
    script = processes.script(CHECKPOINT, "serve.py")
    running += [job.worker(sys.executable, script, tmp_path / "read.safetensors") for _ in range(2)]
    for process in running:
        assert process.wait(60.0) == 0, process
    exported = tmp_path / "model.safetensors"
    assert (
        processes.python("-m", "kvps.cli.main", "checkpoint", "export", tmp_path / "cuts", exported).wait()
        == 0
    )
    saved, read = load_file(exported), load_file(tmp_path / "read.safetensors")
    assert saved.keys() == read.keys() == {"users/ids", "users/rows", "users/recipe"}
    assert sorted(saved["users/ids"].tolist()) == sorted(read["users/ids"].tolist())
    wanted = torch.arange(2_500).numpy()
    from_file, from_reader = (ServedTable("users", tensors).lookup(wanted) for tensors in (saved, read))
    assert torch.equal(from_file, from_reader)


def test_table_that_cannot_be_published_is_named() -> None:
    with kvps.create("dist_sync") as kv, kvps.create("dist_sync", name="other") as other:
        table = kv.embedding("t", 2, optimizer="sgd", lr=1.0)
        with pytest.raises(kvps.KeyNotFound, match="has no table 'u'"):
            kv.publish("ctr", tables=["u"])
        with pytest.raises(kvps.ConfigError, match="is not a table of store 'other'"):
            other.publish("ctr", tables=[table])
        with pytest.raises(kvps.Mismatch, match="'t/ids' is a part of table 't', and a tensor"):
            kv.publish("ctr", {"t/ids": torch.ones(1)}, tables=[table])
        with pytest.raises(kvps.ConfigError, match="the source has no tensors"):
            kv.publish("ctr")
