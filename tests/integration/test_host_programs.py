"""Stores in programs that fork, spawn, copy, pickle, run an event loop, or set defaults of torch, while a store is open."""

import asyncio
import copy
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import kvps
from kvps.runtime.local_cluster import LocalCluster
from tests.integration.processes import ROOT, Processes

WORKER = ROOT / "tests" / "integration" / "loader_worker.py"
KINDS = ("local", "dist_sync")
LIMIT_S = 120.0


@contextmanager
def store(kind: str) -> Iterator[kvps.KVStore]:
    with LocalCluster(workers=1, servers=1), kvps.create(kind) as kv:
        kv.init("w", torch.zeros(3))
        yield kv


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_says_that_it_cannot_be_copied_or_pickled(kind: str) -> None:
    with store(kind) as kv:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(kvps.ConfigError, match=r"cannot be pickled or copied.*kvps\.create"):
                attempt(kv)
        assert kv.pushpull("w", torch.ones(3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_calls_in_an_event_loop(kind: str) -> None:
    """A notebook calls from a running loop."""

    async def train(kv: kvps.KVStore) -> list[float]:
        here = kv.pushpull("w", torch.ones(3))
        await asyncio.sleep(0)
        beside = await asyncio.to_thread(kv.pushpull, "w", torch.ones(3))
        return [float(here.sum()), float(beside.sum())]

    with store(kind) as kv:
        # Without an optimizer, a push replaces the value by the sum of the round.
        assert asyncio.run(train(kv)) == [3, 3]


@contextmanager
def defaults() -> Iterator[None]:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compression", [None, "2bit", "int8"])
def test_a_default_device_and_type_of_the_script(kind: str, compression: str | None) -> None:
    """The values are those without the defaults."""

    def train() -> torch.Tensor:
        with kvps.create(kind) as kv:
            kv.set_optimizer("adam", lr=0.1)
            if compression is not None:
                kv.set_gradient_compression({"type": compression})
            start = torch.linspace(-1, 1, 600, dtype=torch.float32, device="cpu")
            kv.init("w", start)
            kv.init("rows", start.view(200, 3))
            for _ in range(3):
                kv.pushpull("w", start.sin(), out=start)
            kv.push("rows", start.view(200, 3))
            rows = kv.row_sparse_pull("rows", row_ids=[3, 7])
            return torch.cat([start, kv.pull("w"), rows.flatten()])

    with LocalCluster(workers=1, servers=1):
        wanted = train()
        with defaults():
            found = train()
    assert torch.equal(found, wanted)


@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_interpreters")
def test_the_workers_of_a_data_loader(processes: Processes) -> None:
    launched = processes.kvps("launch", "-n", 1, "-s", 1, "--", sys.executable, WORKER)
    assert launched.wait(LIMIT_S) == 0, launched
    assert launched.out.count("passed") == 5, launched
