"""Whole clusters that compress, on networks that lose, repeat and delay: every bit is as it must be.

The reference is computed in one process, element by element: each rank's rest, the sum of what the
ranks send, the server's rest, and what comes back. 2bit says the same of an element wherever it lies,
so the reference knows nothing of servers, chunks or pieces.
"""

import random
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from kvps.compression.policy import CompressionPolicy, rules_of
from kvps.errors import Timeout
from tests.simulation.cluster import Store, Values
from tests.simulation.training import SEEDS, Job, check, faults_of, play, replayable

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

    @cached_property
    def versions(self) -> list[Values]:
        """The values before the first step and after each, computed in one process."""
        versions = [self.initial()]
        rests = {
            (name, rank): torch.zeros(size)
            for name, size in self.sizes.items()
            for rank in range(self.workers)
        }
        back = {name: torch.zeros(size) for name, size in self.sizes.items()}
        for step in range(self.steps):
            values = {}
            for name, before in versions[-1].items():
                total = torch.zeros_like(before)
                for rank in range(self.workers):
                    gradient = self.gradients(rank, step)[name]
                    if self.is_compressed(name):
                        rests[name, rank] += gradient
                        gradient = two_bits(rests[name, rank])
                    total += gradient
                change = 2 * total if self.has_optimizer else total
                if self.is_compressed(name) and self.is_both_ways:
                    back[name] += change
                    change = two_bits(back[name])
                values[name] = before + change if self.has_optimizer else change
            versions.append(values)
        return versions


def two_bits(rest: torch.Tensor) -> torch.Tensor:
    """What 2bit sends of ``rest``, which keeps what it does not."""
    sent = torch.where(rest >= THRESHOLD, THRESHOLD, torch.where(rest <= -THRESHOLD, -THRESHOLD, 0))
    rest -= sent
    return sent


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


@pytest.mark.spec("R151", "R156", "R157", "R158")
@pytest.mark.parametrize("seed", SEEDS)
def test_values_are_those_of_one_process(seed: int, request: pytest.FixtureRequest) -> None:
    job = job_of(seed)
    with replayable(request, job):
        for client in play(job).ended_well():
            assert all(isinstance(item, Timeout) for item in client.later), client.later
            check(job.steps, client.result, job.versions[-1])
