"""Rows of tables under a swarm of faults: each push counts once, and only what it names moves."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from kvps.core.placement import parts
from kvps.core.worker.plan import CopyVersion
from tests.simulation.cluster import Script, Store, Tables, Values
from tests.simulation.faults import drawn
from tests.simulation.test_swarm import judge, patience, play
from tests.simulation.training import Job, check, once, patient, replayable, seeds

SEEDS = seeds(500)[::8]
WAYS = (
    *("push, pull", "push, pull rows", "push", "push and wait", "one by one"),
    *("push, refresh", "push, refresh"),
)


@dataclass
class TableJob(Job):
    """A job whose keys are tables; in each step each rank pushes some rows, or all."""

    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    dense: float = 0.2
    """How often all rows are pushed."""

    def initial(self) -> Values:
        return {
            name: (torch.arange(float(rows * width)) % 5).view(rows, width)
            for name, (rows, width) in self.shapes.items()
        }

    def lies_by_rows(self, name: str) -> bool:
        """Whether the servers have whole rows of a table; else every push of it is one of all."""
        rows, width = self.shapes[name]
        count, bound = rows * width, self.store.bigarray_bound
        cut = parts(name, count, self.servers, bound, width)
        return all(item.start % width == 0 for item in cut)

    def pushed(self, rank: int, step: int) -> tuple[Tables, Values]:
        """What a rank pushes in a step, the same whenever it is asked: rows, and whole tables."""
        some: Tables = {}
        whole: Values = {}
        for name, (count, width) in self.shapes.items():
            dice = random.Random(f"{self.seed} {rank} {step} {name}")
            if dice.random() < self.dense:
                whole[name] = torch.full((count, width), float(rank + step % 3 + 1))
                continue
            ids = torch.tensor(sorted(dice.sample(range(count), dice.randint(0, count // 2))))
            rows = (ids.float()[:, None] + torch.arange(width) + rank + step) % 7
            some[name] = (ids.long(), rows.view(len(ids), width))
        return some, whole


def reference(job: TableJob) -> list[Values]:
    """Return the tables before the first step and after each, computed in one process.

    The optimizer is ``w -= g + w``: what it touches becomes ``-g``, and what it does not, stays.
    """
    versions = [job.initial()]
    for step in range(job.steps):
        tables = {}
        for name, before in versions[-1].items():
            total, touched = torch.zeros_like(before), torch.zeros(len(before), dtype=torch.bool)
            for rank in range(job.workers):
                some, whole = job.pushed(rank, step)
                if name in whole:
                    total += whole[name]
                    touched[:] = True
                else:
                    ids, rows = some[name]
                    total[ids] += rows
                    touched[ids if job.lies_by_rows(name) else slice(None)] = True
            tables[name] = total
            if job.has_optimizer:
                tables[name] = torch.where(touched[:, None], -total, before)
        versions.append(tables)
    return versions


def train(job: TableJob, rank: int) -> Script:
    """Push rows and whole tables, and pull either, from where this rank is."""
    kv, versions = job.store, reference(job)
    yield from patient(kv.open)
    yield from patient(kv.init, job.initial())
    if job.has_optimizer:
        yield from patient(kv.set_optimizer, "sgd", lr=1.0, weight_decay=1.0)
    begin = yield from patient(kv.resume, list(job.shapes))
    copies, marks = job.initial(), dict[str, CopyVersion | None]()
    for step in range(begin, job.steps):
        some, whole = job.pushed(rank, step)
        expected, way = versions[step + 1], job.ways[step]
        waits = way == "push and wait"
        if way == "one by one":
            for priority, name in enumerate(job.shapes):
                if name in whole:
                    yield from once(kv.push, {name: whole[name]}, priority % 3)
                else:
                    yield from once(kv.push_rows, {name: some[name]}, priority % 2)
        else:
            if whole:
                yield from once(kv.push, whole, 0, waits)
            if some:
                yield from once(kv.push_rows, some, 0, waits)
        if way == "push, pull":
            check(step, (yield from patient(kv.pull, job.initial())), expected)
        elif way == "push, refresh":
            yield from patient(kv.refresh, copies, marks)
            check(step, copies, expected)
        elif way in ("push, pull rows", "one by one"):
            dice = random.Random(f"{job.seed} {rank} {step}")
            wanted = {}
            for name, (count, _) in job.shapes.items():
                ids = sorted(dice.sample(range(count), dice.randint(0, count)))
                wanted[name] = torch.tensor(ids, dtype=torch.int64)
            pulled = yield from patient(kv.pull_rows, wanted)
            check(step, pulled, {name: expected[name][ids] for name, ids in wanted.items()})
    yield from patient(kv.barrier)
    tables = yield from patient(kv.pull, job.initial())
    versions_now = yield from patient(kv.versions, list(job.shapes))
    assert versions_now == [job.steps] * len(job.shapes)
    return tables


def is_trained(job: TableJob, tables: Values) -> None:
    check(job.steps, tables, reference(job)[-1])


def count(job: TableJob, rank: int) -> Script:
    """Without rounds: each push takes 1 from rows of its own, and from one that all share."""
    kv, rows = job.store, job.workers * job.steps + 1
    yield from patient(kv.open)
    yield from patient(kv.init, {"t": torch.zeros(rows, 3)})
    yield from patient(kv.set_optimizer, "sgd", lr=1.0)
    begin = yield from patient(kv.resume, ["t"])
    copies, marks = {"t": torch.zeros(rows, 3)}, dict[str, CopyVersion | None]()
    for step in range(begin, job.steps):
        own = rank * job.steps + step
        ids = torch.tensor([own, rows - 1])
        yield from once(kv.push_rows, {"t": (ids, torch.full((2, 3), -1.0))})
        if job.ways[step] == "push, pull rows":
            pulled = yield from patient(kv.pull_rows, {"t": ids})
            assert pulled["t"][0].tolist() == [1.0] * 3, "its own push is in, once"
        elif job.ways[step] == "push, refresh":
            yield from patient(kv.refresh, copies, marks)
            mine = copies["t"][rank * job.steps : own + 1]
            assert mine.eq(1).all(), "its own pushes are in, once"
    total = job.workers * job.steps
    tables = yield from patient(kv.pull, {"t": torch.zeros(rows, 3)}, 0, total)
    yield from patient(kv.refresh, copies, marks)
    check(total, copies, tables)
    return tables


def is_counted(job: TableJob, tables: Values) -> None:
    rows = job.workers * job.steps
    assert tables["t"][:rows].eq(1).all()
    assert tables["t"][rows].eq(rows).all()


def job_of(seed: int) -> TableJob:
    dice = random.Random(seed)
    job = TableJob(seed, dice.randint(1, 4), dice.choice((1, 2, 3, 5)), dice.randint(2, 8))
    for index in range(dice.randint(1, 3)):
        job.shapes[f"t{index}"] = dice.choice([(4, 1), (30, 2), (9, 7), (200, 3), (2, 40)])
    job.has_optimizer = dice.random() < 0.5
    job.store = Store(deterministic=dice.random() < 0.3, bigarray_bound=dice.choice([1, 64, 100_000]))
    job.store.bundles = not job.store.deterministic and dice.random() < 0.3
    job.machines = [dice.choice([1, 2, 2]) for _ in range(job.workers)]
    job.ways = [dice.choice(WAYS) for _ in range(job.steps)]
    job.dense = dice.choice([0.0, 0.0, 0.3])
    return job


@pytest.mark.spec("R172", "R173", "R174", "R175")
@pytest.mark.parametrize("seed", SEEDS)
def test_training_by_rows_under_any_trouble(seed: int, request: pytest.FixtureRequest) -> None:
    job = job_of(seed)
    trouble = drawn(random.Random(seed), job.workers, job.servers)
    job.store.timeout_s = random.Random(seed).choice([patience(trouble), 10_000.0])
    with replayable(request, (job, trouble)):
        cluster, usurped = play(job, trouble, lambda rank: train(job, rank))
        judge(cluster, usurped, trouble)
        for client in cluster.clients.values():
            is_trained(job, client.result)


@pytest.mark.spec("R172", "R176")
@pytest.mark.parametrize("seed", SEEDS[::2])
@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_each_push_of_rows_is_applied_once(seed: int, mode: str, request: pytest.FixtureRequest) -> None:
    job = job_of(seed)
    job.store.mode, job.store.staleness = mode, 2
    job.store.bundles = False
    trouble = drawn(random.Random(seed), job.workers, job.servers)
    with replayable(request, (job, trouble)):
        cluster, usurped = play(job, trouble, lambda rank: count(job, rank))
        judge(cluster, usurped, trouble)
        for client in cluster.clients.values():
            is_counted(job, client.result)


def small() -> TableJob:
    job = TableJob(3, 2, 2, 3, shapes={"t": (30, 3)}, has_optimizer=True)
    job.store = Store(bigarray_bound=1)
    job.ways = ["push, refresh", "push, refresh", "push, pull rows"]
    job.dense = 0.0
    return job
