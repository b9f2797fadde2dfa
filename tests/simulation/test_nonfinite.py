"""Whole clusters in which some gradients hold a NaN: all servers drop such an update, or none does.

In some steps a rank pushes a NaN in one element, which lies on one server, of a key that may be spread
over all. In the end all weights are those of one process that leaves these updates out.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest

from kvps.errors import NonFinite, Timeout
from tests.simulation.cluster import Cluster, Script, Store, Values
from tests.simulation.network import Faults
from tests.simulation.training import (
    FEWER,
    SEEDS,
    Job,
    Play,
    check,
    faults_of,
    once,
    patient,
    play,
    replayable,
)

NAN, INF = float("nan"), float("inf")
WAYS = ("pushpull", "push, pull", "push", "one by one")


@dataclass
class Flawed(Job):
    """A job some of whose gradients are not finite."""

    flaws: dict[tuple[int, int, str], tuple[int, float]] = field(default_factory=dict)
    """By rank, step and key: which element of the gradient is what."""

    def gradients(self, rank: int, step: int) -> Values:
        found = super().gradients(rank, step)
        for (whose, when, name), (at, value) in self.flaws.items():
            if (whose, when) == (rank, step):
                found[name][at] = value
        return found

    def dropped(self, step: int) -> set[str]:
        return {name for _, when, name in self.flaws if when == step}

    @cached_property
    def versions(self) -> list[Values]:
        """The weights before the first step and after each, computed in one process."""
        versions = [self.initial()]
        for step in range(self.steps):
            weights = {}
            for name, weight in versions[-1].items():
                total = sum(self.gradients(rank, step)[name] for rank in range(self.workers))
                if name in self.dropped(step):
                    assert not total.isfinite().all()  # type: ignore[union-attr]
                    weights[name] = weight
                else:
                    weights[name] = weight + 2 * total if self.has_optimizer else total
            versions.append(weights)
        return versions


def job_of(seed: int, mode: str = "sync") -> Flawed:
    dice = random.Random(seed)
    job = Flawed(seed, dice.randint(1, 4), dice.choice((1, 2, 3, 5)), dice.randint(2, 8))
    for index in range(dice.randint(1, 6)):
        job.sizes[f"k{index}"] = dice.choice([1, 2, 30, 64, 65, 200, 500])
    job.store = Store(
        mode=mode,
        deterministic=dice.random() < 0.3,
        bigarray_bound=dice.choice([1, 64, 64, 100_000]),
        on_nonfinite=dice.choice(["skip", "error"]),
    )
    for _ in range(dice.randint(0, 6)):
        name = dice.choice(list(job.sizes))
        where = (dice.randrange(job.workers), dice.randrange(job.steps), name)
        job.flaws[where] = dice.randrange(job.sizes[name]), dice.choice([NAN, INF, -INF])
    job.has_optimizer = mode != "sync" or dice.random() < 0.7
    job.faults = faults_of(dice)
    patience = [0.1 + 10 * job.faults.jitter_s, 3 + 10 * job.faults.jitter_s, 10_000.0, 10_000.0]
    job.store.timeout_s = dice.choice(patience) if mode == "sync" else 10_000.0
    job.ways = [dice.choice(WAYS) for _ in range(job.steps)]
    for _ in range(dice.choice([0, 0, 1, 2])):
        at = dice.choice([dice.random(), dice.random() * 10])
        job.kills.append((at, dice.randrange(job.workers), dice.random() < 0.7))
    job.store.bundles = mode == "sync" and not job.store.deterministic and dice.random() < 0.5
    job.machines = [dice.choice([1, 2, 2, 2, 3]) for _ in range(job.workers)]
    return job


class Hearing:
    """What one worker must be told, and is."""

    def __init__(self, job: Flawed) -> None:
        self._is_error = job.store.on_nonfinite == "error"
        self._due: set[str] = set()
        """Keys of which it was not told yet."""

    def pushed(self, keys: set[str]) -> None:
        self._due |= keys if self._is_error else set()

    def pull(self, kv: Store, like: Values) -> Script:
        """Pull; there must be an error if one is due, and none if not."""
        try:
            found = yield from patient(kv.pull, like)
        except NonFinite:
            self._heard(like)
            return (yield from patient(kv.pull, like))
        assert not self._due & like.keys(), f"{self._due} were kept quiet about"
        return found

    def _heard(self, keys: Values) -> None:
        assert self._due & keys.keys(), "nothing was due"
        self._due -= keys.keys()

    def pushpull(self, kv: Store, gradients: Values) -> Script:
        """As pull; the values are pulled again after an error."""
        try:
            found = yield from kv.pushpull(gradients)
        except Timeout:
            return (yield from self.pull(kv, gradients))
        except NonFinite:
            self._heard(gradients)
            return (yield from self.pull(kv, gradients))
        assert not self._due & gradients.keys(), f"{self._due} were kept quiet about"
        return found


def train(job: Flawed, rank: int) -> Script:
    """Train as rank ``rank``, from where this rank is; return the weights."""
    kv, versions, hearing = job.store, job.versions, Hearing(job)
    yield from patient(kv.open)
    yield from patient(kv.init, job.initial())
    if job.has_optimizer:
        yield from patient(kv.set_optimizer, "test", rescale_grad=2.0)
    begin = yield from patient(kv.resume, list(job.sizes))
    for step in range(begin, job.steps):
        gradients, expected = job.gradients(rank, step), versions[step + 1]
        hearing.pushed(job.dropped(step))
        match job.ways[step]:
            case "pushpull":
                check(step, (yield from hearing.pushpull(kv, gradients)), expected)
            case "push, pull":
                yield from once(kv.push, gradients)
                check(step, (yield from hearing.pull(kv, gradients)), expected)
            case "push":
                yield from once(kv.push, gradients)
            case "one by one":
                for name in gradients:
                    yield from once(kv.push, {name: gradients[name]})
                for name in gradients:
                    pulled = yield from hearing.pull(kv, {name: gradients[name]})
                    check(step, pulled, {name: expected[name]})
    yield from patient(kv.barrier)
    weights = yield from hearing.pull(kv, job.initial())
    versions_now = yield from patient(kv.versions, list(job.sizes))
    assert versions_now == [job.steps] * len(job.sizes)
    return weights


def play_through(job: Flawed, script: Callable[[Any, int], Script]) -> Cluster:
    cluster = play(job, script)
    for client in cluster.ended_well():
        # Of a pushpull that timed out, the pull after it was told.
        assert all(isinstance(item, Timeout) for item in client.later), client.later
    return cluster


@pytest.mark.spec("R102", "R103", "R104", "R106", "R107")
@pytest.mark.parametrize("seed", SEEDS)
def test_all_servers_drop_a_round_or_none_does(seed: int, request: pytest.FixtureRequest) -> None:
    job = job_of(seed)
    with replayable(request, job):
        for client in play_through(job, train).clients.values():
            check(job.steps, client.result, job.versions[-1])


def train_async(job: Flawed, rank: int) -> Script:
    """Push; each push by itself is applied or dropped, and only its own rank hears of it."""
    kv, hearing = job.store, Hearing(job)
    yield from kv.open()
    yield from kv.init(job.initial())
    yield from kv.set_optimizer("test", rescale_grad=2.0)
    begin = yield from kv.resume(list(job.sizes))
    for step in range(begin, job.steps):
        gradients = job.gradients(rank, step)
        hearing.pushed({name for whose, when, name in job.flaws if (whose, when) == (rank, step)})
        yield from kv.push(gradients)
        if job.ways[step] == "push, pull":
            yield from hearing.pull(kv, gradients)
    # Barriers do not wait for the replacement of a lost worker here; these pulls do.
    weights: Values = {}
    for name, value in job.initial().items():
        dropped = sum(item == name for _, _, item in job.flaws)
        yield from hearing.pull(kv, {name: value})
        least = job.workers * job.steps - dropped
        weights |= yield from kv.pull({name: value}, min_version=least)
    return weights


@pytest.mark.spec("R102", "R103", "R104", "R106", "R107")
@pytest.mark.parametrize("mode", ["async", "ssp"])
@pytest.mark.parametrize("seed", FEWER)
def test_all_servers_drop_a_push_or_none_does(seed: int, mode: str, request: pytest.FixtureRequest) -> None:
    job = job_of(seed, mode)
    job.store.staleness = 3
    expected = job.initial()
    for step in range(job.steps):
        for rank in range(job.workers):
            for name, gradient in job.gradients(rank, step).items():
                if (rank, step, name) not in job.flaws:
                    expected[name] += 2 * gradient
    with replayable(request, job):
        for client in play_through(job, train_async).clients.values():
            check(job.steps, client.result, expected)


# --- every single fault of a small job ------------------------------------------------------------


def is_trained(job: Job, weights: Values) -> None:
    assert isinstance(job, Flawed)
    check(job.steps, weights, job.versions[-1])


def train_flawed(job: Job, rank: int) -> Script:
    assert isinstance(job, Flawed)
    return train(job, rank)


FLAWED: Play = (train_flawed, is_trained)


def small_job() -> Flawed:
    job = Flawed(0, 2, 2, 3, {"w": 200, "b": 1}, has_optimizer=True)
    job.store = Store(bigarray_bound=64, on_nonfinite="error")
    job.faults = Faults(in_order=True)
    job.ways = ["pushpull", "push, pull", "pushpull"]
    job.flaws = {(1, 0, "w"): (199, NAN), (0, 1, "w"): (0, INF), (0, 2, "b"): (0, NAN)}
    return job


def test_the_log_names_a_round_the_rank_and_the_key_once() -> None:
    cluster = play_through(small_job(), train)
    notes = [note for server in cluster.servers for note in server.notes if note.startswith("warning")]
    begin = "warning: store 'kv': round 0 dropped: 1 value of key 'w' is not finite (from rank 1)"
    assert begin in notes
    assert len(notes) <= 2 * len(cluster.servers)
