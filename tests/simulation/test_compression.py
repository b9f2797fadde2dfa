"""Whole clusters that compress, on networks that lose, repeat and delay: every bit is as it must be.

The reference is computed in one process, element by element: each rank's rest, the sum of what the
ranks send, the server's rest, and what comes back. 2bit says the same of an element wherever it lies,
so the reference knows nothing of servers, chunks or pieces.
"""

import random
from dataclasses import dataclass

import pytest
import torch

from kvps.compression.policy import CompressionPolicy, rules_of
from kvps.errors import Timeout
from tests.simulation.cluster import Cluster, Script, Store, Values
from tests.simulation.training import SEEDS, Job, check, faults_of, once, patient, replayable

THRESHOLD = 0.5


@dataclass
class Compressed(Job):
    """A job whose larger keys travel by 2bit, and perhaps come back so."""

    is_both_ways: bool = True
    min_bytes: int = 0

    @property
    def rules(self) -> CompressionPolicy:
        params = {"type": "2bit", "threshold": THRESHOLD, "min_bytes": self.min_bytes}
        return rules_of({**params, "pull": self.is_both_ways})

    def gradients(self, rank: int, step: int) -> Values:
        dice = torch.Generator().manual_seed(1000 * self.seed + 10 * step + rank)
        return {
            # Multiples of 1/64: their sums are exact, in whatever order they are taken.
            name: torch.randint(-64, 64, (size,), generator=dice) / 64
            for name, size in self.sizes.items()
        }

    def is_compressed(self, name: str) -> bool:
        return 4 * self.sizes[name] >= self.min_bytes


def two_bits(rest: torch.Tensor) -> torch.Tensor:
    """What 2bit sends of ``rest``, which keeps what it does not."""
    sent = torch.where(rest >= THRESHOLD, THRESHOLD, torch.where(rest <= -THRESHOLD, -THRESHOLD, 0))
    rest -= sent
    return sent


def reference(job: Compressed) -> list[Values]:
    """Return the values before the first step and after each."""
    versions = [job.initial()]
    rests = {
        (name, rank): torch.zeros(size) for name, size in job.sizes.items() for rank in range(job.workers)
    }
    back = {name: torch.zeros(size) for name, size in job.sizes.items()}
    for step in range(job.steps):
        values = {}
        for name, before in versions[-1].items():
            total = torch.zeros_like(before)
            for rank in range(job.workers):
                gradient = job.gradients(rank, step)[name]
                if job.is_compressed(name):
                    rests[name, rank] += gradient
                    gradient = two_bits(rests[name, rank])
                total += gradient
            change = 2 * total if job.has_optimizer else total
            if job.is_compressed(name) and job.is_both_ways:
                back[name] += change
                change = two_bits(back[name])
            values[name] = before + change if job.has_optimizer else change
        versions.append(values)
    return versions


def job_of(seed: int) -> Compressed:
    dice = random.Random(seed)
    job = Compressed(seed, dice.randint(1, 4), dice.choice((1, 2, 3, 5)), dice.randint(2, 8))
    for index in range(dice.randint(1, 5)):
        job.sizes[f"k{index}"] = dice.choice([1, 7, 30, 64, 65, 200, 500])
    job.store = Store(deterministic=dice.random() < 0.3, bigarray_bound=dice.choice([1, 64, 100_000]))
    job.has_optimizer = dice.random() < 0.5
    job.is_both_ways = dice.random() < 0.7
    job.min_bytes = dice.choice([0, 0, 256])
    ways = ["pushpull", "push, pull", "push", "one by one"]
    job.ways = [dice.choice(ways) for _ in range(job.steps)]
    job.machines = [dice.choice([1, 2]) for _ in range(job.workers)]
    job.faults = faults_of(dice)
    return job


def train(job: Compressed, rank: int) -> Script:
    kv, versions = job.store, reference(job)
    yield from patient(kv.open)
    yield from patient(kv.init, job.initial())
    if job.has_optimizer:
        yield from patient(kv.set_optimizer, "test", rescale_grad=2.0)
    yield from kv.compress(job.rules)
    for step in range(job.steps):
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
                for name in gradients:
                    yield from once(kv.push, {name: gradients[name]})
                for name in reversed(list(gradients)):
                    pulled = yield from patient(kv.pull, {name: gradients[name]})
                    check(step, pulled, {name: expected[name]})
            case "push":
                yield from once(kv.push, gradients)
    yield from patient(kv.barrier)
    return (yield from patient(kv.pull, job.initial()))


def is_trained(job: Compressed, values: Values) -> None:
    check(job.steps, values, reference(job)[-1])


def play(job: Compressed) -> None:
    cluster = Cluster(
        job.workers, job.servers, lambda rank: train(job, rank), job.seed, job.faults, job.machines
    )
    cluster.run()
    for client in cluster.ended_well():
        assert all(isinstance(item, Timeout) for item in client.later), client.later
        is_trained(job, client.result)


@pytest.mark.spec("R151", "R156", "R157", "R158")
@pytest.mark.parametrize("seed", SEEDS)
def test_values_are_those_of_one_process(seed: int, request: pytest.FixtureRequest) -> None:
    job = job_of(seed)
    with replayable(request, job):
        play(job)
