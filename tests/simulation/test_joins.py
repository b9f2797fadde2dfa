"""Workers with different numbers of batches: every round sums what the ranks with batches pushed.

Each rank has so many batches of each epoch, and joins when it has none left. Round for round the
weights must be the reference's: a round that closed without a rank that still had a batch, or with
one of another epoch, would show.
"""

import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch

from kvps.errors import ConfigError, Timeout
from kvps.protocol.envelope import Packet
from kvps.protocol.membership import Return
from tests.simulation.cluster import Cluster, Script, Store, Values
from tests.simulation.network import Process
from tests.simulation.training import FEWER, SEEDS, Job, check, faults_of, once, patient, play, replayable


@dataclass
class Uneven(Job):
    """A job of epochs, in which each rank has batches of its own number."""

    batches: list[list[int]] = field(default_factory=list)
    """By epoch and rank."""
    sets_rate: bool = False
    """Each batch sets the learning rate, which the optimizer of these tests does not have."""

    def rounds(self) -> list[int]:
        """The number of the first round of each epoch, and of the one behind the last."""
        return [0, *itertools.accumulate(max(batch) for batch in self.batches)]


def drawn(seed: int) -> Uneven:
    dice = random.Random(seed)
    job = Uneven(seed, dice.randint(1, 4), dice.randint(1, 3))
    job.batches = [[dice.randint(0, 5) for _ in range(job.workers)] for _ in range(3)]
    for index in range(dice.randint(1, 4)):
        job.sizes[f"k{index}"] = dice.choice([1, 30, 64, 200])
    job.store = Store(deterministic=dice.random() < 0.3, bigarray_bound=dice.choice([1, 64, 100_000]))
    job.has_optimizer = dice.random() < 0.5
    job.faults = faults_of(dice)
    job.store.timeout_s = dice.choice([0.1 + 10 * job.faults.jitter_s, 10_000.0, 10_000.0])
    job.store.bundles = not job.store.deterministic and dice.random() < 0.7
    job.machines = [dice.choice([1, 2, 2, 3]) for _ in range(job.workers)]
    job.ways = [dice.choice(["pushpull", "push, pull", "push"]) for _ in range(16)]
    job.sets_rate = job.has_optimizer and dice.random() < 0.7
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
            if job.sets_rate:
                yield from patient(kv.set_rate, 1.0 + number)
            yield from one_batch(job, rank, number, versions)
        last.append((yield from patient(kv.join)))
        now = first + max(epoch)
        check(now, (yield from patient(kv.pull, job.initial())), versions[now])
    return last


def is_joined(job: Uneven, last: list[int]) -> None:
    assert len(last) == len(job.batches)


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
            yield from once(kv.push, gradients)
            check(number, (yield from patient(kv.pull, gradients)), versions[number + 1])
        case _:
            yield from once(kv.push, gradients)


@pytest.mark.spec("R120", "R121", "R122")
@pytest.mark.parametrize("seed", SEEDS)
def test_each_round_sums_those_who_have_batches(seed: int, request: pytest.FixtureRequest) -> None:
    job = drawn(seed)
    with replayable(request, job):
        cluster = play(job, run_out)
        for client in cluster.ended_well():
            assert all(isinstance(item, Timeout) for item in client.later), client.later
            assert client.result == cluster.clients[0].result  # all are told the same


@pytest.mark.spec("R122", "R123")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_is_away_whichever_process_has_it(seed: int, request: pytest.FixtureRequest) -> None:
    """Workers die anywhere; the replacement goes on, or waits where its predecessor waited."""
    dice, job = random.Random(seed), drawn(seed)
    job.store.timeout_s = 10_000.0
    with replayable(request, job):
        cluster = Cluster(
            job.workers, job.servers, lambda rank: go_on(job, rank, cluster), seed, job.faults, job.machines
        )
        for _ in range(dice.choice([1, 2, 3])):
            at, rank = dice.random() * dice.choice([1, 10]), dice.randrange(job.workers)
            cluster.lose(rank, at)
        cluster.run()
        for client in cluster.ended_well():
            check(job.rounds()[-1], client.result, expected(job)[-1])


def go_on(job: Uneven, rank: int, cluster: Cluster) -> Script:
    """As :func:`run_out`, from where this rank is."""
    kv, versions = job.store, expected(job)
    yield from kv.open()
    yield from kv.init(job.initial())
    if job.has_optimizer:
        yield from kv.set_optimizer("test", rescale_grad=2.0)
    begin = yield from kv.resume(list(job.sizes))
    joins = cluster.clients[rank].core.stores[kv.name].joins
    for epoch, first in list(zip(job.batches, job.rounds(), strict=False))[joins:]:
        for number in range(max(begin, first), first + epoch[rank]):
            if job.sets_rate:
                yield from kv.set_rate(1.0 + number)
            yield from one_batch(job, rank, number, versions)
        yield from kv.join()
    return (yield from kv.pull(job.initial()))


def few() -> Uneven:
    """Three ranks with few batches, so that every packet's loss can be played."""
    job = Uneven(0, 3, 2, 0, {"w": 100, "b": 1}, Store(bigarray_bound=64))
    job.batches, job.ways = [[1, 0, 2], [0, 1, 1]], ["pushpull"] * 4
    return job


@pytest.mark.spec("R120")
def test_a_push_that_overtakes_other_returns_is_waited_for() -> None:
    """RETURN of rank 1 to server 1 is lost for long; nobody's push is passed over there."""
    job = few()

    def lose(source: Process, target: Process, packet: Packet) -> bool:
        is_late = isinstance(packet.message, Return) and cluster.network.now < 30
        return is_late and (source.name, target.name) == ("worker 1", "server 1")

    cluster = Cluster(3, 2, lambda rank: run_out(job, rank), 0)
    cluster.network.lose = lose
    cluster.run(200)
    cluster.ended_well()


@pytest.mark.spec("R120")
def test_a_store_joins_by_itself() -> None:
    """While rank 0 has joined one store, rounds of another wait for it."""

    def script(rank: int) -> Script:
        ours, other = Store("ours"), Store("other")
        item = {"w": torch.ones(3)}
        for store in (ours, other):
            yield from store.open()
            yield from store.init({"w": torch.zeros(3)})
        if rank:
            for _ in range(3):
                pulled = yield from ours.pushpull(item)
                assert pulled["w"].tolist() == [1.0] * 3  # of this rank alone
            yield from other.barrier()
            yield from ours.join()
            return (yield from other.pushpull(item))["w"].tolist()
        with pytest.raises(Timeout, match=r"rank 1 \(alive, last request 1 s ago\) has not joined"):
            yield from Store("ours", timeout_s=1.0).join()
        with pytest.raises(ConfigError, match="has joined"):
            yield from ours.push(item)
        yield from other.barrier()
        yield from other.push(item, wait=True)
        yield from ours.join()
        return (yield from other.pull(item))["w"].tolist()

    cluster = Cluster(2, 2, script, 0)
    cluster.run(200)
    for client in cluster.ended_well():
        assert client.result == [2.0] * 3


@pytest.mark.spec("R123", "R433")
@pytest.mark.parametrize("seed", FEWER)
def test_nobody_waits_for_the_clock_of_a_rank_that_ran_out_of_data(seed: int) -> None:
    """Neither while it is away, nor after the join, nor in the next epoch: its process goes on all the while."""
    epochs = 2

    def script(rank: int) -> Script:
        kv = Store(mode="ssp", staleness=1)
        yield from kv.open()
        yield from kv.init({"w": torch.zeros(30)})
        yield from kv.set_optimizer("sgd", lr=1.0)
        for epoch in range(epochs):
            for _ in range(1 if rank == epoch else 6):
                yield from kv.push({"w": -torch.ones(30)})
                yield from kv.pull({"w": torch.zeros(30)})
            yield from kv.join()
            pulled = yield from kv.pull({"w": torch.zeros(30)})
            assert pulled["w"].unique().tolist() == [13.0 * (epoch + 1)]
            yield from kv.barrier()
        return None

    cluster = Cluster(3, 2, script, seed, faults_of(random.Random(seed)))
    cluster.run()
    cluster.ended_well()
