"""Jobs in which every worker waits, and none can go on: all are told. A job that goes on is never told.

A rank that makes another call than the others is the planted standstill. In jobs without one, scripts compute for a while
between their calls, as others wait for them, under every kind of fault; the witness hears what the scheduler says (I16).
"""

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvps.errors import KvpsError, Mismatch
from tests.simulation import test_resume, test_returns
from tests.simulation.cluster import Cluster, Script, Store
from tests.simulation.network import Faults
from tests.simulation.test_swarm import MILD, job_of, judge, play
from tests.simulation.training import Job, check, faults_of, one_hot, replayable, seeds, train
from tests.simulation.witness import Witness

SEEDS = seeds(80)
TOLD_MAX_S = 30.0
"""Seconds after the last call until all are told, in a network that loses nothing: about 9 where nothing is late."""
LOSSES_MAX_S = 290.0
"""The same where packets are lost. A call ends by a Timeout after 300 s."""
THINKS_S = (0.5, 4.0, 12.0, 40.0)
"""How long a script computes between two calls."""
Mistake = Callable[[Job, int], Script]


# --- standstills ----------------------------------------------------------------------------------


def a_barrier(job: Job, rank: int) -> Script:
    if rank == 0:
        yield from job.store.barrier()
    else:
        yield from job.store.pushpull({"v": torch.ones(4)})


def two_barriers(job: Job, rank: int) -> Script:
    yield from job.store.barrier("even" if rank % 2 else "odd")


def two_keys(job: Job, rank: int) -> Script:
    """Each key needs all ranks."""
    yield from job.store.pushpull({"w": torch.ones(100)} if rank else {"v": torch.ones(4)})


def a_step_less(job: Job, rank: int) -> Script:
    if rank:
        yield from job.store.push({"v": torch.ones(4), "w": torch.ones(100)})
        yield from job.store.pull({"w": torch.ones(100)})
    yield from job.store.barrier()


def a_key_that_rank_0_lacks(job: Job, rank: int) -> Script:
    if rank:
        yield from job.store.init({"v": torch.zeros(4), "more": torch.zeros(4)})
    yield from job.store.barrier()


def a_broadcast(job: Job, rank: int) -> Script:
    if rank:
        yield from job.store.broadcast({"b": torch.zeros(4)})
    yield from job.store.barrier()


def a_join(job: Job, rank: int) -> Script:
    """The others wait at a barrier, which does not count one that has joined."""
    if rank == 0:
        yield from job.store.join()
    yield from job.store.barrier()


MISTAKES: dict[str, Mistake] = {
    item.__name__: item
    for item in (a_barrier, two_barriers, two_keys, a_step_less, a_key_that_rank_0_lacks, a_broadcast, a_join)
}


def mistaken(
    job: Job, mistake: Mistake, rank: int, began: dict[int, float], at: Callable[[], float]
) -> Script:
    """Make a few right steps, half a second for each, and then the mistake; a replacement goes on with the others."""
    kv = job.store
    yield from kv.open()
    yield from kv.init({"v": torch.zeros(4), "w": torch.zeros(100)})
    begin = yield from kv.resume(["v", "w"])
    for _ in range(begin, job.steps):
        yield 0.5
        yield from kv.pushpull({"v": torch.ones(4), "w": torch.ones(100)})
    began[rank] = at()
    yield from mistake(job, rank)


@pytest.mark.spec("R435", "R436", "R437", "R438")
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("seed", SEEDS[::4])
def test_standstill_is_told_to_all_workers(seed: int, mistake: str, request: pytest.FixtureRequest) -> None:
    dice = random.Random(seed)
    job = Job(seed, dice.randint(2, 4), dice.randint(1, 3), dice.randint(0, 3))
    job.store = Store(
        deterministic=dice.random() < 0.3,
        bigarray_bound=dice.choice([1, 64, 100_000]),
        timeout_s=300.0,
        bundles=dice.random() < 0.5,
    )
    job.machines = [dice.choice([1, 2, 2, 3]) for _ in range(job.workers)]
    job.faults = Faults(
        lose=dice.choice([0.0, 0.0, 0.02]),
        double=dice.choice([0.0, 0.3]),
        latency_s=dice.choice([0.001, 0.3]),
        jitter_s=dice.choice([0.0, 0.1, 0.5]),
        in_order=dice.random() < 0.3,
    )
    names = ["scheduler", *(f"worker {item}" for item in range(job.workers))]
    rates = {name: dice.uniform(0.9, 1.1) for name in names} if dice.random() < 0.5 else {}
    began: dict[int, float] = {}

    def script(rank: int) -> Script:
        return mistaken(job, MISTAKES[mistake], rank, began, lambda: cluster.network.now)

    with replayable(request, job):
        cluster = Cluster(job.workers, job.servers, script, seed, job.faults, job.machines, rates)
        cluster.run(1_000)
        since = max(began.values())
        for client in cluster.clients.values():
            assert isinstance(client.error, Mismatch), f"{client.process.name}: {client.error}"
            assert "every worker waits, and none can go on" in str(client.error), client.error
            assert client.done_at is not None
            limit_s = LOSSES_MAX_S if job.faults.lose else TOLD_MAX_S
            assert client.done_at - since < limit_s, f"told after {client.done_at - since:.0f} s"


@pytest.mark.spec("R436", "R437")
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("seed", SEEDS[::8])
def test_standstill_is_told_where_a_worker_was_replaced(
    seed: int, mistake: str, request: pytest.FixtureRequest
) -> None:
    dice = random.Random(seed)
    job = Job(seed, dice.randint(2, 4), dice.randint(1, 3), dice.randint(3, 5))
    job.store = Store(bigarray_bound=dice.choice([1, 64, 100_000]), timeout_s=300.0)
    job.machines = [dice.choice([1, 2, 2, 3]) for _ in range(job.workers)]
    began: dict[int, float] = {}

    def script(rank: int) -> Script:
        return mistaken(job, MISTAKES[mistake], rank, began, lambda: cluster.network.now)

    with replayable(request, job):
        cluster = Cluster(job.workers, job.servers, script, seed, job.faults, job.machines)
        at, lost = 0.3 + dice.random(), dice.randrange(job.workers)
        cluster.lose(lost, at, 3.0)
        cluster.run(1_000)
        assert len(cluster.started[lost]) == 2
        since = max(began.values())
        for client in cluster.clients.values():
            assert isinstance(client.error, Mismatch), f"{client.process.name}: {client.error}"
            assert client.done_at is not None
            assert client.done_at - since < TOLD_MAX_S, f"told after {client.done_at - since:.0f} s"


# --- no standstills -------------------------------------------------------------------------------


def thinking(script: Script, dice: random.Random) -> Script:
    """Run a script that computes for a while before some of its calls."""
    resume = partial(next, script)
    while True:
        try:
            step = resume()
        except StopIteration as end:
            return end.value
        if dice.random() < 0.3:
            yield dice.choice(THINKS_S) * dice.random()
        try:
            resume = partial(script.send, (yield step))
        except KvpsError as error:
            resume = partial(script.throw, error)


@pytest.mark.spec("R435", "R436")
@pytest.mark.parametrize("seed", SEEDS)
def test_job_is_not_told_while_a_script_computes(seed: int, request: pytest.FixtureRequest) -> None:
    """I16, under every kind of fault."""
    job, trouble = job_of(seed)
    job.workers = max(2, job.workers)
    job.store.timeout_s = 10_000.0
    with replayable(request, (job, trouble)):
        cluster, usurped = play(
            job, trouble, lambda rank: thinking(train(job, rank), random.Random(seed + rank))
        )
        judge(cluster, usurped, trouble)
        for client in cluster.clients.values():
            check(job.steps, client.result, job.versions[-1])


@pytest.mark.spec("R435", "R436")
@pytest.mark.parametrize("seed", SEEDS[::2])
def test_job_without_rounds_is_not_told(seed: int, request: pytest.FixtureRequest) -> None:
    """I16. A read that waits for pushes of a lost worker goes on after a while."""
    job, trouble = job_of(seed)
    dice = random.Random(seed)
    job.workers = max(2, job.workers)
    job.store = Store(mode=dice.choice(["async", "ssp"]), staleness=dice.randrange(3), timeout_s=10_000.0)
    job.store.bigarray_bound = dice.choice([1, 64])
    job.ways = [dice.choice(["pull", "push", "push", "pushpull"]) for _ in range(job.steps)]
    job.is_hurt = not MILD.issuperset(trouble.kinds)
    job.machines = []
    trouble.kills.append((1.0 + dice.random() * 4, dice.randrange(job.workers), True))
    with replayable(request, (job, trouble)):
        cluster, usurped = play(
            job, trouble, lambda rank: thinking(one_hot(job, rank), random.Random(seed + rank))
        )
        judge(cluster, usurped, trouble)


@pytest.mark.spec("R435", "R436")
@pytest.mark.parametrize("seed", SEEDS[::2])
def test_job_is_not_told_while_replacements_catch_up(seed: int, request: pytest.FixtureRequest) -> None:
    """I16. They make their predecessors' calls of all ranks again."""
    dice = random.Random(seed)
    job = Job(seed, dice.randint(2, 4), dice.randint(1, 3), dice.randint(2, 6), {"w": 100, "b": 3})
    job.store, job.faults = Store(bigarray_bound=64, timeout_s=10_000.0), faults_of(dice)
    job.ways = [dice.choice(test_resume.ORDERS)]
    with replayable(request, job):
        cluster = Cluster(
            job.workers,
            job.servers,
            lambda rank: thinking(test_resume.loop(job, rank), random.Random(seed + rank)),
            seed,
            job.faults,
        )
        cluster.network.overhears = Witness()
        for at in (1.0, 8.0, 40.0):
            rank = dice.randrange(job.workers)
            cluster.lose(rank, at, 3.0)
        cluster.run(3_000)
        for client in cluster.ended_well():
            test_resume.is_trained(job, client.result)


@pytest.mark.spec("R435", "R436")
@pytest.mark.parametrize("seed", SEEDS[::8])
def test_job_is_not_told_while_servers_are_replaced(seed: int, request: pytest.FixtureRequest) -> None:
    """I16. A worker that is told ends with Mismatch, which the campaign does not forgive."""
    campaign = test_returns.campaign_of(seed)
    campaign.job.steps = 20
    with replayable(request, campaign):
        test_returns.play(campaign, lambda script, rank: thinking(script, random.Random(seed + rank)))
