"""Whole clusters whose rounds close at a quorum, on networks that lose, repeat and delay.

Each rank pushes to elements that nobody else pushes to, once in each step. Where late pushes count in the next round,
the end is the sum of all pushes, to the bit, whichever rounds they were in: that is the reference. Where they are
dropped, an element of a server has the push or has it not.
"""

import random

import pytest
import torch

from tests.simulation.cluster import Cluster, Script, Store, Values
from tests.simulation.training import SEEDS, Job, faults_of, replayable


def job_of(seed: int) -> Job:
    dice = random.Random(seed)
    job = Job(seed, dice.randint(2, 5), dice.randint(1, 3), dice.randint(2, 8))
    job.store = Store(
        deterministic=dice.random() < 0.3,
        bigarray_bound=dice.choice([1, 64, 100_000]),
        quorum=dice.randint(1, job.workers),
        grace_s=dice.choice([-1.0, 0.0, 0.01, 2.0]),
        late=dice.choice(["drop", "next"]),
        on_worker_lost="shrink",
    )
    job.ways = [dice.choice(["pushpull", "push, pull", "push"]) for _ in range(job.steps)]
    job.faults = faults_of(dice)
    return job


def gradients(job: Job, rank: int, step: int) -> Values:
    hot = torch.zeros(job.workers * job.steps * 3)
    hot[rank * job.steps + step :: job.workers * job.steps] = -1
    return {"hot": hot, "even": -torch.ones(70)}


def train(job: Job, rank: int, *, resumes: bool = False) -> Script:
    kv, zeros = job.store, {name: 0 * item for name, item in gradients(job, 0, 0).items()}
    yield from kv.open()
    yield from kv.init(zeros)
    yield from kv.set_optimizer("sgd", lr=1.0)
    begin = (yield from kv.resume(list(zeros))) if resumes else 0
    seen = 0
    for step in range(begin, job.steps):
        pushed = gradients(job, rank, step)
        if job.ways[step] == "pushpull":
            pulled = yield from kv.pushpull(pushed)
        else:
            yield from kv.push(pushed)
            pulled = (yield from kv.pull(zeros)) if job.ways[step] == "push, pull" else None
        if pulled is not None:
            assert pulled["hot"].max() <= 1, "an element was pushed to twice"
            total = int(pulled["hot"].sum())
            assert total >= seen, "a value went back"
            seen = total
    yield from kv.join()  # the open rounds close, with what is in them
    return (yield from kv.pull(zeros))


def judge(job: Job, values: Values) -> None:
    hot, even = values["hot"], values["even"]
    if job.store.late == "next":
        assert hot.tolist() == [1.0] * len(hot), "a push was lost, or counted twice"
        assert even.tolist() == [float(job.workers * job.steps)] * len(even)
        return
    assert set(hot.tolist()) <= {0.0, 1.0}
    assert even.min() > 0
    assert even.max() <= job.workers * job.steps


@pytest.mark.parametrize("seed", SEEDS)
def test_each_push_counts_once_or_late_or_not_at_all(seed: int, request: pytest.FixtureRequest) -> None:
    job = job_of(seed)
    with replayable(request, job):
        cluster = Cluster(job.workers, job.servers, lambda rank: train(job, rank), seed, job.faults)
        cluster.run(40_000)
        for client in cluster.ended_well():
            judge(job, client.result)  # type: ignore[arg-type]
        results = [client.result for client in cluster.clients.values()]
        assert all(torch.equal(result["hot"], results[0]["hot"]) for result in results)  # type: ignore[index,call-overload]


def smallest(late: str) -> Job:
    job = Job(0, workers=2, servers=1, steps=2, ways=["pushpull", "pushpull"])
    job.store = Store(quorum=1, grace_s=0.0, late=late, on_worker_lost="shrink")
    return job
