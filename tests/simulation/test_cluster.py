"""Whole clusters in virtual time: after any survivable faults all weights are the reference's.

A test draws a job and its faults from a seed. A failure names the seed and the command that plays
the same run again; ``KVPS_SEEDS=5000`` plays more of them.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvps.errors import KvpsError, SchedulerLost, ServerLost, Timeout, WorkerLost
from kvps.protocol.membership import Barrier
from tests.simulation.cluster import Cluster, Script, Store
from tests.simulation.network import Faults
from tests.simulation.training import FEWER, WAYS, Job, check, faults_of, outlive, patient, play, replayable


def test_coverage_is_off() -> None:
    """It is off also where xdist runs this test: to trace the simulation takes three times as long."""
    assert type(sys.gettrace()).__name__ != "CTracer"


# --- synchronous: the weights are those of one process --------------------------------------------


def job_of(seed: int) -> Job:
    dice = random.Random(seed)
    job = Job(seed, dice.randint(1, 4), dice.choice((1, 2, 3, 5)), dice.randint(1, 8))
    for index in range(dice.randint(1, 6)):
        job.sizes[f"k{index}"] = dice.choice([1, 2, 30, 64, 65, 200, 500])
    job.store = Store(deterministic=dice.random() < 0.3, bigarray_bound=dice.choice([1, 64, 100_000]))
    job.has_optimizer = dice.random() < 0.5
    job.faults = faults_of(dice)
    # Below the time of a few round trips, a call would never be done.
    patience = [0.1 + 10 * job.faults.jitter_s, 3 + 10 * job.faults.jitter_s, 10_000.0, 10_000.0]
    job.store.timeout_s = dice.choice(patience)
    job.ways = [dice.choice(WAYS) for _ in range(job.steps)]
    for _ in range(dice.choice([0, 0, 1, 2])):
        at = dice.choice([dice.random(), dice.random() * 10])
        job.kills.append((at, dice.randrange(job.workers), dice.random() < 0.7))
    job.store.bundles = not job.store.deterministic and dice.random() < 0.7
    job.machines = [dice.choice([1, 2, 2, 2, 3]) for _ in range(job.workers)]
    return job


@pytest.mark.spec("R111")
@pytest.mark.parametrize("seed", FEWER)
def test_bits_may_change_on_the_way(seed: int, request: pytest.FixtureRequest) -> None:
    job = job_of(seed)
    job.faults = replace(job.faults, flip=0.05)
    with replayable(request, job):
        cluster = play(job, has_keys=job.seed % 2 == 1)
        assert cluster.network.damaged
        for client in cluster.ended_well():
            check(job.steps, client.result, job.versions[-1])


# --- every single fault of a small job ------------------------------------------------------------


def small_job() -> Job:
    job = Job(0, 2, 2, 2, {"w": 200, "b": 1}, has_optimizer=True)
    job.store = Store(bigarray_bound=64)
    job.faults = Faults(in_order=True)
    job.ways = ["pushpull", "push, pull"]
    return job


# --- asynchronous: each push counts once, and every pull is of one version ------------------------


def draw(seed: int) -> tuple[random.Random, Job]:
    """Draw a job of another kind: only its size and faults."""
    dice = random.Random(seed)
    job = Job(seed, dice.randint(1, 4), dice.choice((1, 2, 3, 5)), dice.randint(2, 8))
    job.faults = faults_of(dice)
    job.store = Store(bigarray_bound=dice.choice([64, 100_000]))
    return dice, job


def play_well(job: Job, script: Callable[[Job, int], Script]) -> None:
    """Play a job, and see that no call failed."""
    for client in play(job, script).ended_well():
        assert not client.later, client.later


def many_pulls(job: Job, rank: int) -> Script:
    """Rank 0 pulls what the others push, as fast as they do."""
    kv, zeros = job.store, {"even": torch.zeros(260)}
    yield from kv.open()
    yield from kv.init(zeros)
    yield from kv.set_optimizer("sgd", lr=1.0)
    last = -1.0
    for _ in range(3 * job.steps):
        if rank:
            yield from kv.push({"even": -torch.ones(260)})
        else:
            pulled = yield from kv.pull(zeros)
            (value,) = pulled["even"].unique().tolist()  # of one version, never torn
            assert value >= last, f"the version fell from {last} to {value}"
            last = value
    yield from kv.barrier()


@pytest.mark.parametrize("seed", FEWER)
def test_a_pull_among_pushes_is_of_one_version(seed: int, request: pytest.FixtureRequest) -> None:
    _, job = draw(seed)
    job.store.mode = "async"
    with replayable(request, job):
        play_well(job, many_pulls)


@pytest.mark.parametrize("seed", FEWER)
def test_nobody_waits_for_a_lost_worker(seed: int, request: pytest.FixtureRequest) -> None:
    """Not even if it died between two parts of its push; nor at a barrier."""
    _, job = draw(seed)
    job.workers, job.store.mode = 3, "async"
    zeros = {"even": torch.zeros(260)}

    def script(rank: int) -> Script:
        kv = job.store
        yield from kv.open()
        yield from kv.init(zeros)
        yield from kv.set_optimizer("test")
        for _ in range(job.steps):
            yield from kv.push({"even": torch.ones(260)})
            yield from kv.pull(zeros)
        yield from kv.barrier()
        yield from kv.pull(zeros)

    with replayable(request, job):
        outlive(job, script)


def bounded(job: Job, rank: int, cluster: list[Cluster]) -> Script:
    """Push and pull, some ranks slowly; no pull may be too far ahead."""
    kv, zeros = job.store, {"w": torch.zeros(100), "x": torch.zeros(3)}
    dice = random.Random(rank)
    yield from kv.open()
    yield from kv.init(zeros)
    yield from kv.set_optimizer("sgd", lr=1.0)
    yield from kv.push(zeros)
    yield from kv.barrier()
    for pushes in range(2, job.steps + 2):
        yield from kv.push(zeros)
        yield from kv.pull(zeros)
        for span in spans(cluster[0]):
            slowest = min(span.pushed.values())
            assert pushes - slowest <= kv.staleness, f"{pushes} pushes, and another has {slowest}"
        for _ in range(dice.choice([0, 0, rank * 10])):
            yield from kv.flush()
    yield from kv.barrier()


def spans(cluster: Cluster) -> Iterator[Any]:
    for server in cluster.servers:
        for chunk in server.core.context.chunks.by_number.values():  # type: ignore[attr-defined]
            yield from chunk.spans


@pytest.mark.parametrize("seed", FEWER)
def test_staleness_is_bounded_at_all_times(seed: int, request: pytest.FixtureRequest) -> None:
    dice, job = draw(seed)
    job.store.mode, job.store.staleness = "ssp", dice.choice([0, 1, 3])
    cluster: list[Cluster] = []
    with replayable(request, job):
        cluster.append(
            Cluster(job.workers, job.servers, lambda rank: bounded(job, rank, cluster), job.seed, job.faults)
        )
        cluster[0].run()
        cluster[0].ended_well()


# --- what all ranks do together -------------------------------------------------------------------


def meeting(job: Job, rank: int) -> Script:
    """Whatever a rank pushed before a barrier, all see after it; in two stores at once."""
    sums = Store("sums", bigarray_bound=job.store.bigarray_bound)
    counts = Store("counts", "async", bigarray_bound=job.store.bigarray_bound)
    zeros = {"w": torch.zeros(130)}
    for kv in (sums, counts):
        yield from kv.open()
        yield from kv.init(zeros)
    yield from counts.set_optimizer("test")
    for step in range(job.steps):
        name = None if step % 2 else "epoch"
        yield from sums.push({"w": torch.full((130,), 10.0 * step + rank)})
        yield from counts.push({"w": torch.ones(130)})
        yield from counts.barrier(name)
        counted = yield from counts.pull(zeros)
        assert counted["w"].unique().numel() == 1
        assert counted["w"][0] >= (step + 1) * job.workers, f"{counted['w'][0]} at step {step}"
        yield from sums.barrier()
        expected = 10.0 * step * job.workers + sum(range(job.workers))
        assert (yield from sums.pull(zeros))["w"].unique().tolist() == [expected]
        yield from sums.barrier()


@pytest.mark.parametrize("seed", FEWER)
def test_pushes_before_a_barrier_are_seen_after_it(seed: int, request: pytest.FixtureRequest) -> None:
    _, job = draw(seed)
    with replayable(request, job):
        play_well(job, meeting)


def announcements(job: Job, rank: int) -> Script:
    """Every broadcast reads rank 0's value of that call, also where the shape changes."""
    kv = job.store
    yield from kv.open()
    yield from kv.init({"w": torch.full((200,), 9.0 - rank)})
    assert (yield from kv.pull({"w": torch.zeros(200)}))["w"].unique().tolist() == [9.0]
    for step in range(job.steps):
        size = 40 + 50 * (step // 3)
        told = yield from kv.broadcast({"w": torch.full((size,), 100.0 * rank + step)})
        assert told["w"].tolist() == [step] * size
        if step % 2:
            total = yield from kv.pushpull({"w": torch.ones(size)})
            assert total["w"].tolist() == [job.workers] * size


@pytest.mark.spec("R223", "R224", "R225", "R226")
@pytest.mark.parametrize("seed", FEWER)
def test_a_broadcast_reaches_all(
    seed: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and in parts that are read while others are loaded."""
    if seed % 2:
        monkeypatch.setattr("kvps.core.worker.calls.keys.RELAYED_LEAST_BYTES", 0)
        monkeypatch.setattr("kvps.core.worker.calls.keys.PART_LEAST_BYTES", 16)
    _, job = draw(seed)
    with replayable(request, job):
        play_well(job, announcements)


def test_a_key_that_others_initialised_is_found() -> None:
    def script(rank: int) -> Script:
        kv = Store(bigarray_bound=64)
        yield from kv.open()
        if rank == 0:
            yield from kv.init({"w": torch.arange(200.0), "b": torch.ones(2, dtype=torch.int8)})
        yield from kv.barrier()
        found = yield from kv.lookup(["w", "b", "nothing"])
        like = {"w": torch.zeros(200), "b": torch.zeros(2, dtype=torch.int8)}
        return found, (yield from kv.pull(like))

    cluster = Cluster(2, 3, script)
    cluster.run()
    for client in cluster.clients.values():
        found, pulled = client.result
        assert {name: str(spec) for name, spec in found.items()} == {
            "w": "float32[200]",
            "b": "int8[2]",
            "nothing": "None",
        }
        assert pulled["w"].tolist() == list(range(200))
        assert pulled["b"].tolist() == [1, 1]


def test_a_learning_rate_holds_from_the_next_round_on() -> None:
    def script(rank: int) -> Script:
        kv = Store()
        yield from kv.open()
        yield from kv.init({"w": torch.zeros(3)})
        yield from kv.set_optimizer("sgd", lr=1.0)
        for step in range(4):
            yield from kv.push({"w": -torch.ones(3)})
            yield from kv.set_rate(10.0 ** (step + 1))
        return (yield from kv.pull({"w": torch.zeros(3)}))

    cluster = Cluster(3, 2, script, faults=Faults(jitter_s=0.05, lose=0.05))
    cluster.run()
    for client in cluster.clients.values():
        assert client.error is None
        assert client.result["w"].tolist() == [3333.0] * 3


def test_a_job_without_faults_leaves_nothing_behind() -> None:
    job = small_job()
    cluster = play(job)
    cluster.run_for(1)
    processes = [cluster.scheduler, *cluster.servers]
    processes += [client.process for client in cluster.clients.values()]
    assert [process.exit and process.exit.code for process in processes] == [0] * 5
    assert not any(process.alive for process in processes)
    levels = [note.split(":")[0] for process in processes for note in process.notes]
    assert set(levels) == {"info", "debug"}


# --- lost for good --------------------------------------------------------------------------------


def endless(kv: Store, log: list[tuple[float, KvpsError]], now: Callable[[], float]) -> Script:
    """Train until an error; then note when it came, and what a later call says."""
    zeros = {"w": torch.zeros(200)}
    try:
        yield from kv.open()
        yield from kv.init(zeros)
        while True:
            yield from kv.pushpull({"w": torch.ones(200)})
    except KvpsError as error:
        log.append((now(), error))
    with suppress(KvpsError):
        yield from kv.push(zeros)
    try:
        yield from kv.pull(zeros)
    except KvpsError as error:
        log.append((now(), error))


def lose_one(
    workers: int, servers: int, lose: Callable[[Cluster], None], **options: Any
) -> dict[int, list[tuple[float, KvpsError]]]:
    """Run :func:`endless` on every rank, and after 1 s ``lose``; return what each rank noted."""
    logs: dict[int, list[tuple[float, KvpsError]]] = {rank: [] for rank in range(workers)}
    kv = Store(bigarray_bound=64, timeout_s=1_000.0, **options)
    cluster = Cluster(workers, servers, lambda rank: endless(kv, logs[rank], lambda: cluster.network.now - 1))
    cluster.network.at(1.0, lambda: lose(cluster))
    cluster.run_for(400)
    return logs


@pytest.mark.parametrize(
    ("options", "least_s", "told"),
    [
        ({"on_worker_lost": "fail"}, 0.0, "worker 1 (host-worker-1) is lost"),
        ({"worker_grace_s": 60.0}, 60.0, "no replacement came in 60 s"),
    ],
    ids=["fail: at once", "wait: when the grace is over"],
)
def test_lost_worker_is_told_to_everyone(options: dict[str, Any], least_s: float, told: str) -> None:
    logs = lose_one(3, 2, lambda cluster: cluster.kill(1), **options)
    for rank in (0, 2):
        assert [type(error) for _, error in logs[rank]] == [WorkerLost, WorkerLost]
        assert least_s < logs[rank][0][0] < least_s + 2.0
        assert told in str(logs[rank][0][1])


def test_a_vanished_host_is_noticed_within_fifteen_seconds() -> None:
    logs = lose_one(2, 1, lambda cluster: cluster.kill(1, is_noticed=False), on_worker_lost="fail")
    assert 11.0 < logs[0][0][0] < 15.0


def test_a_lost_server_ends_every_call() -> None:
    logs = lose_one(3, 2, lambda cluster: cluster.network.kill(cluster.servers[1]))
    for log in logs.values():
        assert [type(error) for _, error in log] == [ServerLost, ServerLost]
        assert log[0][0] < 2.0
        assert "server 1 (host-server-1 tcp://server-1:" in str(log[0][1])
        assert "Start the job again from saved weights" in str(log[0][1])


def test_a_server_that_was_replaced_is_as_good_as_lost() -> None:
    def replace(cluster: Cluster) -> None:
        cluster.network.kill(cluster.servers[1])
        cluster.network.at(3.0, lambda: cluster.start_server(1))

    for log in lose_one(2, 2, replace).values():
        assert [type(error) for _, error in log] == [ServerLost, ServerLost]


@pytest.mark.parametrize("seed", FEWER)
def test_shrink_goes_on_without_the_lost(seed: int, request: pytest.FixtureRequest) -> None:
    """Each round is the sum over those who were there: all of them, or all but the lost."""
    _, job = draw(seed)
    job.workers, job.steps = 3, 40
    job.store.on_worker_lost = "shrink"

    def script(rank: int) -> Script:
        kv = job.store
        yield from kv.open()
        yield from kv.init({"w": torch.zeros(200)})
        for _ in range(job.steps):
            pulled = yield from kv.pushpull({"w": torch.full((200,), 10.0**rank)})
            assert set(pulled["w"].tolist()) <= {111.0, 11.0}, pulled["w"].unique()
        yield from kv.barrier()

    with replayable(request, job):
        outlive(job, script)


def test_without_the_scheduler_pushes_and_pulls_go_on_and_barriers_do_not() -> None:
    log: list[tuple[float, type[KvpsError] | None]] = []
    kv = Store()

    def script(rank: int) -> Script:
        zeros = {"w": torch.zeros(200)}
        yield from kv.open()
        yield from kv.init(zeros)
        yield from kv.barrier()
        cluster.network.kill(cluster.scheduler)
        for _ in range(100):
            assert (yield from kv.pushpull({"w": torch.ones(200)}))["w"].sum() == 400
        for timeout_s in (5.0, 20.0):
            begun = cluster.network.now
            try:
                yield from Store(timeout_s=timeout_s).barrier()
            except KvpsError as error:
                log.append((round(cluster.network.now - begun), type(error)))

    cluster = Cluster(2, 2, script)
    cluster.run()
    assert log == [(5, Timeout), (5, Timeout), (20, SchedulerLost), (20, SchedulerLost)]


def test_a_barrier_that_timed_out_is_waited_for_again() -> None:
    """A late rank does not put the others out of step."""
    seen: dict[int, list[int]] = {0: [], 1: []}

    def script(rank: int) -> Script:
        kv = Store(timeout_s=0.5)
        yield from kv.open()
        for number in range(6):
            for _ in range(1000 * rank * (number % 3)):
                yield from kv.flush()
            yield from patient(kv.barrier)
            seen[rank].append(number)
            assert abs(len(seen[0]) - len(seen[1])) <= 1

    cluster = Cluster(2, 1, script)
    cluster.run()
    assert all(client.error is None for client in cluster.clients.values())
    assert cluster.network.carried[Barrier.__name__] >= 12
