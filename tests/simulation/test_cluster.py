"""Whole clusters in virtual time: after any survivable faults all weights are the reference's.

A test draws a job and its faults from a seed. A failure names the seed and the command that plays
the same run again; ``KVPS_SEEDS=5000`` plays more of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvps.core import conversations, link, rounds, slab
from kvps.errors import (
    KvpsError,
    SchedulerLost,
    ServerLost,
    Timeout,
    WorkerLost,
)
from kvps.messages import Barrier, Packet, Push, Role
from tests.simulation.cluster import Cluster, Script, Store, Values
from tests.simulation.network import Faults, Process

SEEDS = range(int(os.environ.get("KVPS_SEEDS", "120")))
FEWER = SEEDS[: max(1, len(SEEDS) // 4)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks and windows, so that small tensors meet every limit."""
    monkeypatch.setattr(slab, "CHUNK_BYTES", 512)
    monkeypatch.setattr(link, "WINDOW_BYTES", 1_000)
    for module in (rounds, conversations):
        monkeypatch.setattr(module, "WINDOW", 4)


@contextmanager
def replayable(request: pytest.FixtureRequest, job: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        again = f"python -m pytest '{request.node.nodeid}'"
        raise AssertionError(f"{error}\n{job}\nplay it again: {again}") from error


# --- synchronous: the weights are those of one process --------------------------------------------


@dataclass
class Job:
    """What is drawn from a seed."""

    seed: int
    workers: int = 1
    servers: int = 1
    steps: int = 6
    sizes: dict[str, int] = field(default_factory=dict)
    store: Store = field(default_factory=Store)
    has_optimizer: bool = False
    faults: Faults = field(default_factory=Faults)
    kills: list[tuple[float, int, bool]] = field(default_factory=list)
    """When, which rank, and whether the scheduler notices its connections break."""
    ways: list[str] = field(default_factory=list)
    """How each step pushes and pulls; the same on every rank, as in a real script."""

    def initial(self) -> Values:
        return {name: torch.arange(float(size)) % 5 for name, size in self.sizes.items()}

    def gradients(self, rank: int, step: int) -> Values:
        return {
            name: (torch.arange(float(size)) * (rank + 2) + 3 * step) % 7
            for name, size in self.sizes.items()
        }


def reference(job: Job) -> list[Values]:
    """Return the weights before the first step and after each, computed in one process."""
    versions = [job.initial()]
    for step in range(job.steps):
        weights = {}
        for name, weight in versions[-1].items():
            total = torch.zeros_like(weight)
            for rank in range(job.workers):
                total += job.gradients(rank, step)[name]
            weights[name] = weight + 2 * total if job.has_optimizer else total
        versions.append(weights)
    return versions


def train(job: Job, rank: int) -> Script:
    """Train as rank ``rank``, from where this rank is; return the weights."""
    kv, versions = job.store, reference(job)
    yield from patient(kv.open)
    yield from patient(kv.init, job.initial())
    if job.has_optimizer:
        yield from patient(kv.set_optimizer, "test", rescale_grad=2.0)
    begin = yield from patient(kv.resume, list(job.sizes))
    for step in range(begin, job.steps):
        gradients, expected = job.gradients(rank, step), versions[step + 1]
        match job.ways[step]:
            case "pushpull":
                try:
                    pulled = yield from kv.pushpull(gradients)
                except Timeout:
                    pulled = yield from patient(kv.pull, gradients)
                check(step, pulled, expected)
            case "push, pull":
                yield from once(kv.push, gradients)
                check(step, (yield from patient(kv.pull, gradients)), expected)
            case "one by one":
                for priority, name in enumerate(gradients):
                    yield from once(kv.push, {name: gradients[name]}, priority % 3)
                for name in reversed(list(gradients)):
                    pulled = yield from patient(kv.pull, {name: gradients[name]})
                    check(step, pulled, {name: expected[name]})
            case "push":
                yield from once(kv.push, gradients)
            case "push and wait":
                yield from once(kv.push, gradients, 0, True)
    yield from patient(kv.barrier)
    weights = yield from patient(kv.pull, job.initial())
    versions_now = yield from patient(kv.versions, list(job.sizes))
    assert versions_now == [job.steps] * len(job.sizes)
    return weights


def patient(call: Callable[..., Script], *args: Any, **options: Any) -> Script:
    """Make a call again until it does not time out."""
    while True:
        try:
            return (yield from call(*args, **options))
        except Timeout:
            pass


def once(call: Callable[..., Script], *args: Any) -> Script:
    """Push. A Timeout cancels nothing, so that it must not be pushed again."""
    with suppress(Timeout):
        yield from call(*args)


WAYS = ("pushpull", "push, pull", "one by one", "push", "push and wait")


def check(step: int, values: Values, expected: Values) -> None:
    for name, value in values.items():
        assert torch.equal(value, expected[name]), f"step {step}, key {name}: {value} is wrong"


def faults_of(dice: random.Random) -> Faults:
    return Faults(
        lose=dice.choice([0, 0, 0.02, 0.1]),
        double=dice.choice([0, 0, 0.1, 0.5]),
        jitter_s=dice.choice([0, 0.002, 0.1, 3.0]),
        in_order=dice.random() < 0.3,
    )


def job_of(seed: int) -> Job:
    dice = random.Random(seed)
    job = Job(seed, dice.randint(1, 4), dice.randint(1, 3), dice.randint(1, 8))
    for index in range(dice.randint(1, 6)):
        job.sizes[f"k{index}"] = dice.choice([1, 2, 30, 64, 65, 200, 500])
    job.store = Store(
        deterministic=dice.random() < 0.3,
        bigarray_bound=dice.choice([1, 64, 100_000]),
        timeout_s=dice.choice([0.01, 0.3, 3.0, 10_000.0, 10_000.0]),
    )
    job.has_optimizer = dice.random() < 0.5
    job.faults = faults_of(dice)
    job.ways = [dice.choice(WAYS) for _ in range(job.steps)]
    for _ in range(dice.choice([0, 0, 1, 2])):
        at = dice.choice([dice.random(), dice.random() * 10])
        job.kills.append((at, dice.randrange(job.workers), dice.random() < 0.7))
    return job


def play(job: Job) -> Cluster:
    cluster = Cluster(
        job.workers, job.servers, lambda rank: train(job, rank), job.seed, job.faults
    )
    for at, rank, is_noticed in job.kills:
        cluster.network.at(at, lambda one=rank, how=is_noticed: cluster.kill(one, how))  # type: ignore[misc]
        cluster.network.at(at + 20, lambda one=rank: cluster.replace(one))  # type: ignore[misc]
    cluster.run()
    return cluster


@pytest.mark.parametrize("seed", SEEDS)
def test_all_weights_are_those_of_one_process(seed: int, request: pytest.FixtureRequest) -> None:
    job = job_of(seed)
    with replayable(request, job):
        cluster = play(job)
        for client in cluster.clients.values():
            assert client.error is None, client.error
            assert all(isinstance(one, Timeout) for one in client.later), client.later
            check(job.steps, client.result, reference(job)[-1])
