"""Embedding tables in virtual time: after any survivable faults the rows are those of one process."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from kvps.core.embedding import arena, tiered
from kvps.core.embedding.id_hash import Ids
from kvps.core.embedding.spec import EmbeddingSpec, recipe_of
from kvps.core.embedding.table import EmbeddingRows
from kvps.core.placement import EMBEDDING
from kvps.errors import EpochChanged, Timeout
from tests.simulation.cluster import Cluster, Script, Store
from tests.simulation.network import Faults
from tests.simulation.test_returns import Loss, Supervisor
from tests.simulation.training import FEWER, Job, faults_of, once, patient, play, replayable, seeds
from tests.support.memory_disk import MemoryDisk
from tests.support.table_messages import pull_rows, push_rows

KEY = EMBEDDING + "t"
DIM = 2
ALL = np.arange(-10, 60)
TIERED_LIMIT = 350
"""Bytes of memory that a few rows take."""


@dataclass
class TableJob(Job):
    """A job with one table: rows of whole numbers, so that sums are exact in any order."""

    recipe: EmbeddingSpec = field(default_factory=lambda: recipe())

    def ids(self, rank: int, step: int) -> Ids:
        dice = random.Random(self.seed * 1000 + step * 10 + rank)
        return np.array(sorted(dice.sample(ALL.tolist(), dice.choice([0, 1, 5, 20]))), np.int64)

    def rows(self, rank: int, step: int) -> torch.Tensor:
        ids = torch.from_numpy(self.ids(rank, step)).double()
        return ((ids * 3 + rank + step) % 5 - 2).view(-1, 1).repeat(1, DIM)


def recipe(optimizer: str = "sgd", admit: float = 1, **more: Any) -> EmbeddingSpec:
    evict = {name: more.pop(name) for name in ("age", "rows") if name in more}
    more = more or {"lr": 1.0}
    return recipe_of("t", DIM, ("uniform", 0.5), optimizer, admit, evict or None, "float64", 1, **more)


def push_to(rows: EmbeddingRows, job: TableJob, step: int, version: int, *ranks: int) -> None:
    """Do what the servers do with these pushes."""
    ids = [job.ids(rank, step) for rank in ranks]
    union = np.unique(np.concatenate(ids))
    total = torch.zeros((len(union), DIM), dtype=torch.float64)
    for rank, some in zip(ranks, ids, strict=True):
        total[torch.from_numpy(np.searchsorted(union, some))] += job.rows(rank, step)
    push_rows(rows, union, total, version=version, step=version)


def references(job: TableJob) -> list[torch.Tensor]:
    """All rows before the first round and after each, by one process."""
    rows = EmbeddingRows(job.recipe)
    found = [pull_rows(rows, ALL)]
    for step in range(job.steps):
        push_to(rows, job, step, step + 1, *range(job.workers))
        found.append(pull_rows(rows, ALL))
    return found


def train(job: TableJob, rank: int) -> Script:
    kv, wanted = job.store, references(job)
    yield from patient(kv.open)
    yield from patient(kv.embed, KEY, job.recipe, rank)
    begin = yield from patient(kv.resume, [KEY])
    for step in range(begin, job.steps):
        yield from once(kv.push_ids, KEY, job.ids(rank, step), job.rows(rank, step), job.servers)
        if step % 2:
            yield from look(job, wanted[step + 1])
    yield from patient(kv.barrier)
    yield from look(job, wanted[-1])
    assert (yield from patient(kv.versions, [KEY])) == [job.steps]
    yield from patient(kv.barrier)
    return (yield from export(job))


def look(job: TableJob, wanted: torch.Tensor) -> Script:
    rows = yield from patient(job.store.pull_ids, KEY, job.recipe, ALL, job.servers)
    assert torch.equal(rows, wanted), (rows - wanted).abs().sum(1).nonzero()


def export(job: TableJob) -> Script:
    """Return all rows, by id."""
    found: dict[int, list[float]] = {}
    for server in range(job.servers):
        start = 0
        while True:
            block = yield from patient(job.store.block, KEY, job.recipe.dim, server, start)
            rows = block.columns["weight"].tolist()
            assert not found.keys() & set(block.ids.tolist())
            found |= dict(zip(block.ids.tolist(), rows, strict=True))
            start = block.next
            if not start:
                break
    return found


def is_whole(job: TableJob, exported: dict[int, list[float]]) -> None:
    """What was exported is what was pushed to, as it is."""
    rows = EmbeddingRows(job.recipe)
    for step in range(job.steps):
        push_to(rows, job, step, step + 1, *range(job.workers))
    block = rows.block(0, 1000)
    ids = block.ids.tolist()
    assert exported == dict(zip(ids, block.columns["weight"].tolist(), strict=True))


def job_of(seed: int) -> TableJob:
    dice = random.Random(seed)
    job = TableJob(seed, dice.randint(1, 4), dice.choice((1, 2, 3, 5)), dice.randint(1, 8))
    job.recipe = dice.choice(
        [recipe(), recipe(momentum=0.5, lr=1.0), recipe("adagrad", lr=0.5), recipe(admit=3), recipe(age=2)]
    )
    job.store = Store()
    job.faults = faults_of(dice)
    patience = [3 + 10 * job.faults.jitter_s, 10_000.0, 10_000.0]
    job.store.timeout_s = dice.choice(patience)
    for _ in range(dice.choice([0, 0, 1, 2])):
        at = dice.choice([dice.random(), dice.random() * 10])
        job.kills.append((at, dice.randrange(job.workers), dice.random() < 0.7))
    return job


@pytest.mark.spec("R188", "R190", "R191", "R192", "R193", "R194")
@pytest.mark.parametrize("seed", seeds(40))
def test_all_rows_are_those_of_one_process(seed: int, request: pytest.FixtureRequest) -> None:
    job = job_of(seed)
    with replayable(request, job):
        cluster = play(job, train)
        for client in cluster.ended_well():
            assert all(isinstance(item, Timeout) for item in client.later), client.later
            is_whole(job, client.result)


@pytest.mark.spec("R579")
@pytest.mark.parametrize("seed", range(6))
def test_rows_that_come_by_chance_are_those_of_one_process(seed: int, request: pytest.FixtureRequest) -> None:
    job = job_of(seed)
    job.recipe = recipe(admit=0.5)
    with replayable(request, job):
        for client in play(job, train).ended_well():
            is_whole(job, client.result)


def small_job() -> TableJob:
    job = TableJob(3, 2, 2, 2, recipe=recipe(momentum=0.5, lr=1.0))
    job.faults = Faults(in_order=True)
    return job


# --- cuts ------------------------------------------------------------------------------------------


def train_through(job: TableJob, rank: int) -> Script:
    """Train from where the servers are, whenever they say that they have returned to a cut."""
    kv, wanted = job.store, references(job)
    is_begun = False
    while True:
        try:
            if not is_begun:
                yield from patient(kv.open)
                yield from patient(kv.embed, KEY, job.recipe, rank)
                step = yield from patient(kv.resume, [KEY])
                is_begun = True
            while step < job.steps:
                yield from kv.push_ids(KEY, job.ids(rank, step), job.rows(rank, step), job.servers)
                yield from look(job, wanted[step + 1])
                step += 1
            yield from kv.barrier()
            yield from look(job, wanted[-1])
            return (yield from export(job))
        except EpochChanged as error:
            is_begun = KEY in error.after
            step = error.after.get(KEY, 0)


@pytest.mark.spec("R195")
@pytest.mark.parametrize("is_tiered", [False, True])
@pytest.mark.parametrize("seed", seeds(24))
def test_servers_return_to_the_rows_of_a_cut(
    seed: int, is_tiered: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "ARENA_BYTES_MIN", 64 if is_tiered else 256)  # so that there are several
    monkeypatch.setattr(arena, "ARENA_BYTES_MAX", 512)
    monkeypatch.setattr(tiered, "ROW_BYTES", 0)
    dice = random.Random(seed)
    job = job_of(seed)
    job.steps, job.kills = 30, []
    job.store = Store()
    job.faults = replace(job.faults, jitter_s=min(job.faults.jitter_s, 0.1))
    disk = MemoryDisk()
    with replayable(request, job):
        cluster = Cluster(
            job.workers,
            job.servers,
            lambda rank: train_through(job, rank),
            job.seed,
            job.faults,
            checkpoint_every_s=dice.choice([0.05, 0.3]),
            memory_limit=TIERED_LIMIT if is_tiered else None,
            tier=disk.tier if is_tiered else None,
        )
        cluster.shelves.takes_s = dice.choice([0.01, 0.1])
        supervisor = Supervisor(cluster)
        for _ in range(dice.randint(1, 2)):
            name = f"server {dice.randrange(job.servers)}"
            loss = Loss(name, dice.random() * 4, dice.choice([0.1, 1.0]))
            cluster.network.at(loss.at, lambda loss=loss: supervisor.kill(loss))  # type: ignore[misc]
        cluster.run(2_000)
        for client in cluster.ended_well():
            is_whole(job, client.result)
    assert not is_tiered or disk.written


# --- several tables in one message ----------------------------------------------------------------

TABLES = [EMBEDDING + name for name in "tuv"]


def parts_of(job: TableJob, rank: int, step: int) -> dict[str, tuple[Ids, torch.Tensor]]:
    """What a step pushes to each table; no two have the same."""
    moved = [(rank + at, step + 10 * at) for at in range(len(TABLES))]
    return {
        key: (job.ids(number, turn), job.rows(number, turn))
        for key, (number, turn) in zip(TABLES, moved, strict=True)
    }


def push_all_to(rows: list[EmbeddingRows], job: TableJob, step: int, version: int, *ranks: int) -> None:
    """Do what the servers do with these pushes."""
    pushes = [parts_of(job, rank, step) for rank in ranks]
    for key, table in zip(TABLES, rows, strict=True):
        union = np.unique(np.concatenate([push[key][0] for push in pushes]))
        total = torch.zeros((len(union), DIM), dtype=torch.float64)
        for ids, gradients in (push[key] for push in pushes):
            total[torch.from_numpy(np.searchsorted(union, ids))] += gradients
        push_rows(table, union, total, version=version, step=version)


def push_step(job: TableJob, rank: int, step: int) -> Script:
    """Push to all tables by one call; in every third step to one after the other."""
    kv, parts = job.store, parts_of(job, rank, step)
    if step % 3 < 2:
        yield from once(kv.push_tables, parts, job.servers)
    for key, (ids, gradients) in parts.items() if step % 3 == 2 else ():
        yield from once(kv.push_ids, key, ids, gradients, job.servers)


def look_at_all(job: TableJob, rows: list[EmbeddingRows]) -> Script:
    wanted = dict.fromkeys(TABLES, ALL)
    found = yield from patient(job.store.pull_tables, wanted, job.recipe, job.servers)
    for some, table in zip(found, rows, strict=True):
        assert torch.equal(some, pull_rows(table, ALL))


def train_all(job: TableJob, rank: int) -> Script:
    kv, rows = job.store, [EmbeddingRows(job.recipe) for _ in TABLES]
    yield from patient(kv.open)
    for key in TABLES:
        yield from patient(kv.embed, key, job.recipe, rank)
    begin = yield from patient(kv.resume, TABLES)
    for step in range(job.steps):
        push_all_to(rows, job, step, step + 1, *range(job.workers))
        if step >= begin:
            yield from push_step(job, rank, step)
            if step % 2:
                yield from look_at_all(job, rows)
    yield from patient(kv.barrier)
    yield from look_at_all(job, rows)
    return (yield from patient(kv.versions, TABLES))


def is_trained(job: TableJob, versions: list[int]) -> None:
    """All tables are as far as their pushes; what their rows are was compared on the way."""
    assert versions == [job.steps] * len(TABLES)


def small_job_of_several() -> TableJob:
    return replace(small_job(), steps=3, recipe=recipe())


@pytest.mark.spec("R188", "R193", "R466", "R468")
@pytest.mark.parametrize("seed", seeds(40))
def test_all_rows_of_several_tables_are_those_of_one_process(
    seed: int, request: pytest.FixtureRequest
) -> None:
    job = job_of(seed)
    with replayable(request, job):
        cluster = play(job, train_all)
        for client in cluster.ended_well():
            assert all(isinstance(item, Timeout) for item in client.later), client.later
            is_trained(job, client.result)


def train_all_alone(job: TableJob, rank: int) -> Script:
    """Push to several tables, whatever the others do: what comes of it is the sum of all."""
    kv = job.store
    yield from kv.open()
    for key in TABLES:
        yield from kv.embed(key, job.recipe, rank)
    begin = yield from kv.resume(TABLES)
    for step in range(begin, job.steps):
        yield from push_step(job, rank, step)
        if step % 3 == 0:
            yield from kv.pull_tables(dict.fromkeys(TABLES, ALL), job.recipe, job.servers)
    while (yield from kv.versions(TABLES)) != [job.workers * job.steps] * len(TABLES):
        yield from kv.flush()
    return (yield from kv.pull_tables(dict.fromkeys(TABLES, ALL), job.recipe, job.servers))


def is_sum(job: TableJob, result: list[torch.Tensor]) -> None:
    """All rows are the sum of all pushes."""
    rows = [EmbeddingRows(job.recipe) for _ in TABLES]
    for step in range(job.steps):
        push_all_to(rows, job, step, step + 1, *range(job.workers))
    for found, table in zip(result, rows, strict=True):
        assert torch.allclose(found, pull_rows(table, ALL), atol=1e-9)


@pytest.mark.spec("R188", "R466")
@pytest.mark.parametrize("mode", ["async", "ssp"])
@pytest.mark.parametrize("seed", FEWER)
def test_each_push_of_several_tables_counts_once(
    seed: int, mode: str, request: pytest.FixtureRequest
) -> None:
    job = job_of(seed)
    job.recipe = recipe()
    job.store = Store(mode=mode, staleness=2)
    with replayable(request, job):
        cluster = play(job, train_all_alone)
        for client in cluster.ended_well():
            is_sum(job, client.result)
