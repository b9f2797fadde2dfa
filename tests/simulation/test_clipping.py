"""Whole clusters whose optimizer clips gradients by their norm over all keys of a step.

In the end all weights are those of one process that clips the sum of all ranks, whatever is lost, repeated, late or
killed. Integers would hide an error: clipped weights are fractions, and are compared to a millionth.
"""

import random
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from kvps.errors import EpochChanged, Timeout
from tests.simulation.cluster import Cluster, Script, Store, Values
from tests.simulation.network import Faults
from tests.simulation.test_returns import Loss, Supervisor
from tests.simulation.training import FEWER, Job, Play, faults_of, once, patient, play, replayable

MAX_NORM = 40.0
WAYS = ("pushpull", "push, pull", "push", "some keys")


@dataclass
class Clipped(Job):
    """A job whose steps are clipped by their global norm: most of them act, and some do not."""

    def __post_init__(self) -> None:
        self.has_optimizer = True
        self.hyper = {"rescale_grad": 0.5, "clip_global_norm": MAX_NORM}

    def gradients(self, rank: int, step: int) -> Values:
        found = super().gradients(rank, step)
        if self.ways[step] == "some keys":
            del found[sorted(found)[step % len(found)]]
        return {name: row * (0.05 if step % 3 == 2 else 3.0) for name, row in found.items()}

    @cached_property
    def versions(self) -> list[Values]:
        """The weights before the first step and after each, computed in one process with torch's own clipping."""
        versions = [self.initial()]
        for step in range(self.steps):
            ranks = [self.gradients(rank, step) for rank in range(self.workers)]
            weights = {name: torch.nn.Parameter(item) for name, item in versions[-1].items()}
            for name in ranks[0]:
                weights[name].grad = 0.5 * sum(item[name] for item in ranks)  # type: ignore[assignment]
            torch.nn.utils.clip_grad_norm_(weights.values(), MAX_NORM)
            versions.append(
                {
                    name: param.detach() + (0 if param.grad is None else param.grad)
                    for name, param in weights.items()
                }
            )
        return versions


def check(step: int, values: Values, expected: Values) -> None:
    for name, value in values.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-5, atol=1e-4, msg=f"step {step}, key {name}"
        )


def train(job: Job, rank: int) -> Script:
    """Train as rank ``rank``, from where the servers are, also after they have returned to a cut."""
    kv, versions = job.store, job.versions
    is_begun = False
    while True:
        try:
            if not is_begun:
                yield from patient(kv.open)
                yield from patient(kv.init, job.initial())
                yield from patient(kv.set_optimizer, "test", **job.hyper)
                step = yield from patient(kv.resume, list(job.sizes))
                is_begun = True
            while step < job.steps:
                gradients, expected = job.gradients(rank, step), versions[step + 1]
                if job.ways[step] in ("pushpull", "some keys"):
                    try:
                        check(step, (yield from kv.pushpull(gradients)), expected)
                    except Timeout:
                        check(step, (yield from patient(kv.pull, gradients)), expected)
                else:
                    yield from once(kv.push, gradients)
                    if job.ways[step] == "push, pull":
                        check(step, (yield from patient(kv.pull, gradients)), expected)
                step += 1
            yield from patient(kv.barrier)
            return (yield from patient(kv.pull, job.initial()))
        except EpochChanged as error:
            is_begun = error.has_optimizer and set(error.after) == set(job.sizes)
            if is_begun:
                (step,) = set(error.after.values())


def is_trained(job: Job, weights: Values) -> None:
    """Compare with the reference above, which clips, and not with that of the other jobs."""
    check(job.steps, weights, job.versions[-1])


CLIPPED: Play = (train, is_trained)


def job_of(seed: int) -> Clipped:
    dice = random.Random(seed)
    job = Clipped(seed, dice.randint(1, 4), dice.randint(1, 4), dice.randint(2, 8))
    for index in range(dice.randint(1, 6)):
        job.sizes[f"k{index}"] = dice.choice([1, 2, 30, 64, 65, 200, 500])
    job.store = Store(deterministic=dice.random() < 0.3, bigarray_bound=dice.choice([1, 64, 100_000]))
    job.faults = faults_of(dice)
    is_patient = dice.choice([False, True])
    for _ in range(dice.choice([0, 0, 1, 2])):
        at = dice.choice([dice.random(), dice.random() * 10])
        job.kills.append((at, dice.randrange(job.workers), dice.random() < 0.7))
    if (
        not is_patient
    ):  # while a rank is away for 20 s, each pull that times out leaves a request that is probed on
        job.store.timeout_s = (3.0 if job.kills else 0.1) + 10 * job.faults.jitter_s
    # A replacement cannot know its step from the numbers of keys that some steps leave out.
    may_leave_out = len(job.sizes) > 1 and not job.kills
    job.ways = [dice.choice(WAYS if may_leave_out else WAYS[:3]) for _ in range(job.steps)]
    job.store.bundles = not job.store.deterministic and dice.random() < 0.5
    job.machines = [dice.choice([1, 2, 2]) for _ in range(job.workers)]
    return job


@pytest.mark.spec("R439", "R440", "R441", "R442")
@pytest.mark.parametrize("seed", FEWER)
def test_weights_are_those_of_one_process_that_clips(seed: int, request: pytest.FixtureRequest) -> None:
    job = job_of(seed)
    with replayable(request, job):
        cluster = play(job, train)
        for client in cluster.ended_well():
            is_trained(job, client.result)
        for server in cluster.servers:
            steps = server.core.rules.steps  # type: ignore[attr-defined]
            assert not steps.open


def small_job(workers: int = 2, servers: int = 2) -> Clipped:
    job = Clipped(0, workers, servers, 2, {"a": 90, "b": 1})
    job.store = Store(bigarray_bound=64)
    job.faults = Faults(in_order=True)
    job.ways = ["pushpull", "push, pull"]
    return job


@pytest.mark.parametrize("seed", FEWER[::3])
def test_a_job_ends_as_if_no_server_had_been_lost(seed: int, request: pytest.FixtureRequest) -> None:
    dice = random.Random(seed)
    job = small_job(servers=3)
    job.seed, job.steps, job.faults = seed, 60, Faults(jitter_s=dice.choice([0.002, 0.1]))
    job.ways = [dice.choice(WAYS[:3]) for _ in range(job.steps)]
    with replayable(request, job):
        cluster = Cluster(
            job.workers, job.servers, lambda rank: train(job, rank), seed, job.faults, checkpoint_every_s=0.1
        )
        cluster.shelves.takes_s = 0.01
        supervisor = Supervisor(cluster)
        for _ in range(2):
            loss = Loss(f"server {dice.randrange(3)}", 0.2 + dice.random() * 2, 0.5)
            cluster.network.at(loss.at, lambda loss=loss: supervisor.kill(loss))  # type: ignore[misc]
        cluster.run()
        for client in cluster.ended_well():
            is_trained(job, client.result)
