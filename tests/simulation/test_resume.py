"""A worker that is replaced goes on with its predecessor's barriers and calls of all ranks.

Each step sets a learning rate of its own, pushes, and stands at a barrier. Wherever a worker dies, its
replacement must neither wait for a call that rank 0 has made already, nor be waited for at a barrier
that it will not come by again; and every round must be updated with the rate of its step.
"""

import random

import pytest

from tests.simulation.cluster import Cluster, Script, Store, Values
from tests.simulation.network import Faults
from tests.simulation.training import SEEDS, Job, check, faults_of, replayable

ORDERS = ("rate, push, barrier", "barrier, rate, push")


def rate_of(step: int) -> float:
    return [1.0, 1.0, 0.5, 0.25][step % 4]


def reference(job: Job) -> list[Values]:
    """Return the weights before the first step and after each."""
    versions = [job.initial()]
    for step in range(job.steps):
        lr = rate_of(step)
        total = {
            name: sum(job.gradients(rank, step)[name] for rank in range(job.workers)) for name in job.sizes
        }
        versions.append({name: row - lr * total[name] for name, row in versions[-1].items()})
    return versions


def loop(job: Job, rank: int) -> Script:
    kv, order, versions = job.store, job.ways[0], reference(job)
    yield from kv.open()
    yield from kv.init(job.initial())
    yield from kv.set_optimizer("sgd", lr=1.0)
    begin = yield from kv.resume(list(job.sizes))
    for step in range(begin, job.steps):
        for what in order.split(", "):
            if what == "rate":
                yield from kv.set_rate(rate_of(step))
            elif what == "barrier":
                yield from kv.barrier()
            elif job.store.mode == "sync":
                pulled = yield from kv.pushpull(job.gradients(rank, step))
                check(step, pulled, versions[step + 1])
            else:
                yield from kv.push(job.gradients(rank, step))
    yield from kv.barrier("end")
    return (yield from kv.pull(job.initial()))


def is_trained(job: Job, weights: Values) -> None:
    if job.store.mode == "sync":
        check(job.steps, weights, reference(job)[-1])


def small(order: str) -> Job:
    job = Job(0, 2, 2, 3, {"w": 200, "b": 1}, Store(bigarray_bound=64), ways=[order])
    job.faults = Faults(in_order=True)
    return job


@pytest.mark.spec("R124", "R125", "R126")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_may_be_replaced_again_and_again(seed: int, mode: str, request: pytest.FixtureRequest) -> None:
    dice = random.Random(seed)
    job = Job(seed, dice.randint(1, 4), dice.choice((1, 2, 3, 5)), dice.randint(2, 6), {"w": 100, "b": 3})
    job.store, job.faults = Store(mode=mode, bigarray_bound=64), faults_of(dice)
    # Where there are no rounds, nobody knows which barrier of a loop a replacement comes to.
    job.ways = [dice.choice(ORDERS) if mode == "sync" else "rate, push"]
    with replayable(request, job):
        cluster = Cluster(job.workers, job.servers, lambda rank: loop(job, rank), seed, job.faults)
        for _ in range(dice.choice([1, 2, 3])):
            at, rank = dice.random() * dice.choice([1, 10]), dice.randrange(job.workers)
            cluster.lose(rank, at)
        cluster.run(2_000)
        for client in cluster.ended_well():
            is_trained(job, client.result)
