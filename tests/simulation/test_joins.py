"""Workers with different numbers of batches: every round sums what the ranks with batches pushed.

Each rank has so many batches of each epoch, and joins when it has none left. Round for round the
weights must be the reference's: a round that closed without a rank that still had a batch, or with
one of another epoch, would show.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch

from kvps.errors import ConfigError, Timeout
from kvps.messages import Join, Joined, Packet, Return
from tests.simulation.cluster import Cluster, Script, Store, Values
from tests.simulation.network import Process
from tests.simulation.training import FEWER, SEEDS, Job, check, faults_of, patient, replayable


@dataclass
class Uneven(Job):
    """A job of epochs, in which each rank has batches of its own number."""

    batches: list[list[int]] = field(default_factory=list)
    """By epoch and rank."""

    def rounds(self) -> list[int]:
        """The number of the first round of each epoch, and of the one behind the last."""
        return [0, *itertools.accumulate(max(one) for one in self.batches)]


def drawn(seed: int) -> Uneven:
    dice = random.Random(seed)
    job = Uneven(seed, dice.randint(1, 4), dice.randint(1, 3))
    job.batches = [[dice.randint(0, 5) for _ in range(job.workers)] for _ in range(3)]
    for index in range(dice.randint(1, 4)):
        job.sizes[f"k{index}"] = dice.choice([1, 30, 64, 200])
    job.store = Store(
        deterministic=dice.random() < 0.3,
        bigarray_bound=dice.choice([1, 64, 100_000]),
    )
    job.has_optimizer = dice.random() < 0.5
    job.faults = faults_of(dice)
    job.store.timeout_s = dice.choice([0.1 + 10 * job.faults.jitter_s, 10_000.0, 10_000.0])
    job.store.bundles = not job.store.deterministic and dice.random() < 0.7
    job.machines = [dice.choice([1, 2, 2, 3]) for _ in range(job.workers)]
    job.ways = [dice.choice(["pushpull", "push, pull", "push"]) for _ in range(16)]
    return job


def expected(job: Uneven) -> list[Values]:
    """Return the weights before the first round and after each."""
    versions = [job.initial()]
    for epoch, first in zip(job.batches, job.rounds(), strict=False):
        for index in range(max(epoch)):
            weights = {}
            for name, weight in versions[-1].items():
                total = torch.zeros_like(weight)
                for rank in range(job.workers):
                    if index < epoch[rank]:
                        total += job.gradients(rank, first + index)[name]
                weights[name] = weight + 2 * total if job.has_optimizer else total
            versions.append(weights)
    return versions


def run_out(job: Uneven, rank: int) -> Script:
    """Push all batches of each epoch and join; return who was last each time."""
    kv, versions = job.store, expected(job)
    yield from patient(kv.open)
    yield from patient(kv.init, job.initial())
    if job.has_optimizer:
        yield from patient(kv.set_optimizer, "test", rescale_grad=2.0)
    last = []
    for epoch, first in zip(job.batches, job.rounds(), strict=False):
        for number in range(first, first + epoch[rank]):
            yield from one_batch(job, rank, number, versions)
        last.append((yield from patient(kv.join)))
        now = first + max(epoch)
        check(now, (yield from patient(kv.pull, job.initial())), versions[now])
    return last


def one_batch(job: Uneven, rank: int, number: int, versions: list[Values]) -> Script:
    kv, gradients = job.store, job.gradients(rank, number)
    match job.ways[number]:
        case "pushpull":
            try:
                pulled = yield from kv.pushpull(gradients)
            except Timeout:
                pulled = yield from patient(kv.pull, gradients)
            check(number, pulled, versions[number + 1])
        case "push, pull":
            yield from once(kv.push(gradients))
            check(number, (yield from patient(kv.pull, gradients)), versions[number + 1])
        case _:
            yield from once(kv.push(gradients))


def once(push: Script) -> Script:
    """Push. A Timeout cancels nothing."""
    try:
        yield from push
    except Timeout:
        pass


@pytest.mark.spec("R120", "R121", "R122")
@pytest.mark.parametrize("seed", SEEDS)
def test_each_round_sums_those_who_have_batches(seed: int, request: pytest.FixtureRequest) -> None:
    job = drawn(seed)
    with replayable(request, job):
        cluster = Cluster(
            job.workers,
            job.servers,
            lambda rank: run_out(job, rank),
            seed,
            job.faults,
            job.machines,
        )
        cluster.run()
        for client in cluster.clients.values():
            assert client.error is None, client.error
            assert all(isinstance(one, Timeout) for one in client.later), client.later
            assert client.result == cluster.clients[0].result  # all are told the same
