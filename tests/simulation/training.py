"""What is trained in the simulation: jobs, what every rank does in one, and what must come of it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
import torch

from kvps.compression.policy import CompressionPolicy
from kvps.errors import Timeout
from kvps.protocol.envelope import Packet
from tests.simulation.cluster import Cluster, Script, Store, Values
from tests.simulation.network import Faults, Process
from tests.support import tiers


def seeds(count: int) -> range:
    """Return the seeds to play: as many as KVPS_SEEDS says, or an eighth of ``count``, another each day.

    With ``--all`` it is all of them.
    """
    if as_many := os.environ.get("KVPS_SEEDS"):
        return range(int(as_many))
    if tiers.plays_all():
        return range(count)
    part = count // tiers.DAYS
    first = tiers.part_of_today() * part
    return range(first, first + part)


def of_today(count: int) -> range:
    """Return which of the packets 1 to ``count`` something befalls: every eighth, others each day.

    With ``--all``, and with KVPS_SEEDS, it is all of them.
    """
    if tiers.plays_all() or os.environ.get("KVPS_SEEDS"):
        return range(1, count + 1)
    return range(1 + tiers.part_of_today(), count + 1, tiers.DAYS)


SEEDS = seeds(80)
FEWER = SEEDS[: max(2, len(SEEDS) // 6)]


@contextmanager
def replayable(request: pytest.FixtureRequest, job: object) -> Iterator[None]:
    """Say of an error how to see it again."""
    try:
        yield
    except Exception as error:
        as_many = os.environ.get("KVPS_SEEDS")
        setting = f"KVPS_SEEDS={as_many}" if as_many else f"KVPS_DAY={tiers.day()}"
        again = f"{setting} .venv/bin/python -m pytest '{request.node.nodeid}'"
        raise AssertionError(f"{error}\n{job}\nplay it again: {again}") from error


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
    machines: list[int] = field(default_factory=list)
    """On which machine each worker is."""
    is_hurt: bool = False
    """A worker may be lost in the midst of a push, and replaced; also if ``kills`` names none."""
    replicas: int = 0
    hyper: dict[str, float] = field(default_factory=lambda: {"rescale_grad": 2.0})
    """The hyper-parameters of the optimizer "test"."""

    def initial(self) -> Values:
        return {name: torch.arange(float(size)) % 5 for name, size in self.sizes.items()}

    def gradients(self, rank: int, step: int) -> Values:
        return {
            name: (torch.arange(float(size)) * (rank + 2) + 3 * step) % 7 for name, size in self.sizes.items()
        }

    @property
    def rules(self) -> CompressionPolicy | None:
        """How gradients are compressed."""
        return None

    @cached_property
    def versions(self) -> list[Values]:
        """The weights before the first step and after each, computed in one process.

        A job is played many times, by several ranks, and does not change once it is.
        """
        versions = [self.initial()]
        for step in range(self.steps):
            weights = {}
            for name, weight in versions[-1].items():
                total = torch.zeros_like(weight)
                for rank in range(self.workers):
                    total += self.gradients(rank, step)[name]
                weights[name] = weight + 2 * total if self.has_optimizer else total
            versions.append(weights)
        return versions


def train(job: Job, rank: int) -> Script:
    """Train as rank ``rank``, from where this rank is; return the weights."""
    kv, versions = job.store, job.versions
    yield from patient(kv.open)
    yield from patient(kv.init, job.initial())
    if job.has_optimizer:
        yield from patient(kv.set_optimizer, "test", **job.hyper)
    if job.rules is not None:
        yield from patient(kv.compress, job.rules)
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


def one_hot(job: Job, rank: int) -> Script:
    """Push to each element once, over all ranks; and to ``even`` everywhere at once."""
    kv, size = job.store, job.workers * job.steps * 3
    zeros = {"hot": torch.zeros(size), "even": torch.zeros(140)}
    yield from kv.open()
    yield from kv.init(zeros)
    yield from kv.set_optimizer("sgd", lr=1.0)
    begin = yield from kv.resume(["hot", "even"])
    for step in range(begin, job.steps):
        hot = torch.zeros(size)
        hot[rank * job.steps + step :: job.workers * job.steps] = -1
        gradients = {"hot": hot, "even": -torch.ones(140)}
        if job.ways[step] == "pushpull":
            pulled = yield from kv.pushpull(gradients)
        else:
            yield from kv.push(gradients)
        if job.ways[step] == "pull":
            pulled = yield from kv.pull(zeros)
        if job.ways[step] != "push":
            # Nobody waits for the rest of a push whose worker is lost.
            assert job.kills or job.is_hurt or len(pulled["even"].unique()) == 1, f"torn: {pulled['even']}"
            assert pulled["hot"].max() <= 1, "an element was pushed to twice"
    # Barriers do not wait for the replacement of a lost worker here; this pull does.
    return (yield from kv.pull(zeros, min_version=job.workers * job.steps))


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
        lent=dice.random() < 0.5,
    )


LOST: Sequence[float] = ()
ON_TIME: Sequence[float] = (0.0,)
"""What becomes of a packet: how late each of its copies is."""
each_fate = pytest.mark.parametrize(
    "fate",
    [LOST, (0.0, 0.0), (0.0, 0.01), (0.0, 3.0), (3.0,)],
    ids=["lost", "twice", "twice, once late", "twice, once stale", "stale"],
)
"""Late is behind all that is under way, and stale is behind what was sent again in its place."""
Fault = Callable[[Cluster, int, Process, Process], Sequence[float]]
"""Says that of the n-th packet of a job, from one process to another."""
Play = tuple[Callable[[Job, int], Script], Callable[[Job, Any], None]]
"""What each rank of a job does, and what must be true of that which it returns."""


def play(job: Job, script: Callable[[Any, int], Script] = train, has_keys: bool = False) -> Cluster:
    """Play a job and the losses of workers that were drawn for it, until all scripts have ended."""
    cluster = Cluster(
        job.workers,
        job.servers,
        lambda rank: script(job, rank),
        job.seed,
        job.faults,
        job.machines,
        has_keys=has_keys,
    )
    for at, rank, is_noticed in job.kills:
        cluster.lose(rank, at, is_noticed=is_noticed)
    cluster.run()
    return cluster


def is_trained(job: Job, weights: Values) -> None:
    check(job.steps, weights, job.versions[-1])


TRAINING: Play = (train, is_trained)


def play_with(
    job: Job, fault: Fault, play: Play = TRAINING, prepare: Callable[[Cluster], None] = lambda cluster: None
) -> int:
    """Play a job and see it end well; return its number of packets."""
    script, judge = play
    count = 0

    def delays(source: Process, target: Process, packet: Packet) -> Sequence[float]:
        nonlocal count
        count += 1
        return fault(cluster, count, source, target)

    cluster = Cluster(
        job.workers,
        job.servers,
        lambda rank: script(job, rank),
        0,
        job.faults,
        job.machines,
        replicas=job.replicas,
    )
    cluster.network.delays = delays
    prepare(cluster)
    cluster.run(400)
    for client in cluster.ended_well():
        judge(job, client.result)
    packets = count
    cluster.part(400)
    return packets


def all_of(count: int) -> range:
    """Return the packets 1 to ``count``."""
    return range(1, count + 1)


Packets = Callable[[int], range]
"""Which packets of a job something befalls, by their number."""


def befall_each_packet(
    job: Job,
    fate: Sequence[float],
    play: Play = TRAINING,
    packets: Packets = of_today,
    prepare: Callable[[Cluster], None] = lambda cluster: None,
) -> None:
    """Play a job as often as it has packets of today; each time, that is what becomes of another one."""

    def play_so(fault: Fault) -> int:
        return play_with(job, fault, play, prepare)

    for fatal in packets(play_so(lambda *_: ON_TIME)):
        with named(f"packet {fatal} has the copies {fate}"):
            play_so(lambda _, count, *ends, fatal=fatal: fate if count == fatal else ON_TIME)  # type: ignore[misc]


def end_at_each_packet(
    job: Job, name: str, end: Callable[[Cluster], None], play: Play = TRAINING, packets: Packets = of_today
) -> None:
    """Play a job as often as it has packets of today; ``end`` process ``name`` at another of its own."""
    for fatal in packets(play_with(job, lambda *_: ON_TIME, play)):

        def die(
            cluster: Cluster, count: int, source: Process, target: Process, fatal: int = fatal
        ) -> Sequence[float]:
            if count != fatal or name not in (source.name, target.name):
                return ON_TIME
            end(cluster)
            return LOST

        with named(f"{name} ends at packet {fatal}"):
            play_with(job, die, play)


def end_at_each_packet_from(
    since_s: float,
    end: Callable[[Cluster], None],
    play: Callable[[Fault], object],
    is_enough: Callable[[Cluster], bool] = lambda cluster: False,
) -> None:
    """Play a job as often as it has packets of today behind ``since_s``; ``end`` something at another.

    The last is the tenth packet after ``is_enough``. ``play`` plays the job with a fault.
    """
    first, last = 0, 0

    def look(cluster: Cluster, number: int, *_: Process) -> Sequence[float]:
        nonlocal first, last
        if not first and cluster.network.now >= since_s:
            first = number
        if not is_enough(cluster):
            last = number
        return ON_TIME

    play(look)
    assert 0 < first < last
    for fatal in of_today(last + 10):
        if fatal < first:
            continue

        def die(
            cluster: Cluster, number: int, source: Process, target: Process, fatal: int = fatal
        ) -> Sequence[float]:
            ended = [client for client in cluster.clients.values() if client.done_at is not None]
            if number != fatal or ended:
                return ON_TIME
            end(cluster)
            return ON_TIME if source.alive and target.alive else LOST

        with named(f"it ends at packet {fatal}"):
            play(die)


def kill_at_each_packet(job: Job, rank: int, play: Play = TRAINING, packets: Packets = of_today) -> None:
    """Play a job as often as it has packets of today, and kill ``rank`` at another one that concerns it."""

    def kill(cluster: Cluster) -> None:
        cluster.kill(rank)
        cluster.network.at(cluster.network.now + 3, lambda: cluster.replace(rank))

    end_at_each_packet(job, f"worker {rank}", kill, play, packets)


@contextmanager
def named(what: str) -> Iterator[None]:
    """Say of an error what had happened."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {error}") from error


def outlive(job: Job, script: Callable[[int], Script]) -> None:
    """Kill worker 2 when it has begun; workers 0 and 1 must end well without it."""
    cluster = Cluster(3, job.servers, script, job.seed, job.faults, job.machines)

    def lose() -> None:
        if cluster.clients[2].core.stores:
            cluster.kill(2)
        else:
            cluster.network.at(cluster.network.now + 0.05, lose)

    def is_over() -> bool:
        ranks = cluster.clients
        return all(rank in ranks and ranks[rank].done_at is not None for rank in (0, 1))

    cluster.network.at(0.2 + random.Random(job.seed).random() / 2, lose)
    cluster.network.run(is_over, 1_000)
    for rank in (0, 1):
        error = cluster.clients[rank].error
        assert error is None, error
