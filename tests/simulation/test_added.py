"""Workers that are added to a job, and workers that leave it: each push counts once, and nobody waits for ever.

Each worker pushes a one of its own, so the value says how many pushes of each worker it has.
"""

import random
from dataclasses import replace

import pytest
import torch

from kvps.errors import KvpsError
from kvps.protocol.membership import Drain
from tests.simulation.cluster import Cluster, Script, Store
from tests.simulation.test_replicas import is_given_up
from tests.simulation.training import FEWER, SEEDS, faults_of

WORKERS_MAX = 8


def own(number: int, size: int) -> torch.Tensor:
    """Return what worker ``number`` pushes: ones at its elements."""
    value = torch.zeros(size, dtype=torch.float64)
    value[number::WORKERS_MAX] = 1.0
    return value


def counted(value: torch.Tensor, number: int) -> set[float]:
    """Return how many pushes of a worker each of its elements has."""
    return set(value[number::WORKERS_MAX].tolist())


def come_and_go(
    kv: Store, number: int, steps: int, sizes: dict[str, int], way: str, pause_s: float = 0.01
) -> Script:
    """Push so often, and leave; return the values at the end."""
    zeros = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
    yield from kv.open()
    yield from kv.init(zeros)
    yield from kv.set_optimizer("test", rescale_grad=1.0)
    values = yield from kv.pull(zeros)
    for step in range(steps):
        mine = {name: own(number, size) for name, size in sizes.items()}
        if way == "pushpull":
            values = yield from kv.pushpull(mine)
        else:
            yield from kv.push(mine)
            values = yield from kv.pull(mine)
        for value in values.values():
            assert counted(value, number) == {step + 1.0}, (number, step, value)
        yield pause_s
    return values


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_come_and_go_and_each_push_counts_once(seed: int) -> None:
    dice = random.Random(seed)
    sizes = {f"k{index}": dice.choice([16, 40, 200]) for index in range(dice.randint(1, 3))}
    mode = dice.choice(["sync", "sync", "async", "ssp"])
    kv = Store(
        mode=mode,
        staleness=2 if mode == "ssp" else 0,
        on_worker_lost=dice.choice(["wait", "shrink", "fail"]),
        bigarray_bound=dice.choice([1, 64, 100_000]),
        deterministic=mode == "sync" and dice.random() < 0.3,
    )
    workers, way = dice.randint(1, 3), dice.choice(["pushpull", "push, pull"])
    steps = [dice.randint(0 if number >= workers else 1, 25) for number in range(WORKERS_MAX)]

    def script(number: int) -> Script:
        return come_and_go(kv, number, steps[number], sizes, way)

    cluster = Cluster(
        workers, dice.randint(1, 3), script, seed, faults_of(dice), most_workers=workers + dice.randint(1, 3)
    )
    for _ in range(WORKERS_MAX - workers):
        come(cluster, dice.random() * 2.0)
    cluster.coming = WORKERS_MAX - workers
    cluster.run(3_000)
    cluster.part(400)
    assert cluster.is_over or not cluster.scheduler.alive
    for number, client in cluster.clients.items():
        error = client.error or (client.done_at is None and client.core.member.end) or None
        assert error is None or (number >= workers and is_refusal(error)), error


@pytest.mark.parametrize("seed", SEEDS)
def test_added_workers_and_the_scheduler_may_be_killed_at_any_time(seed: int) -> None:
    dice = random.Random(seed)
    mode = dice.choice(["sync", "sync", "async", "ssp"])
    kv = Store(
        mode=mode,
        staleness=3 if mode == "ssp" else 0,
        on_worker_lost="shrink",
        bigarray_bound=dice.choice([1, 64]),
    )
    sizes, way = {"k0": 40, "k1": 16}, dice.choice(["pushpull", "push, pull"])
    steps = [dice.randint(20, 40) for _ in range(WORKERS_MAX)]

    def script(number: int) -> Script:
        return come_and_go(kv, number, steps[number], sizes, way)

    cluster = Cluster(2, 2, script, seed, faults_of(dice), most_workers=5)
    killed: set[int] = set()

    def kill(number: int) -> None:
        client = cluster.clients.get(number)
        if client is not None and client.done_at is None and client.process.alive:
            killed.add(number)
            cluster.kill(number)

    def restart() -> None:
        if cluster.scheduler.alive and not cluster.is_over:
            cluster.network.kill(cluster.scheduler)
            cluster.start_scheduler()

    for number in range(2, WORKERS_MAX):
        at = dice.random() * 2.0
        come(cluster, at)
        if dice.random() < 0.5:
            cluster.network.at(at + dice.random() * 1.5, lambda number=number: kill(number))  # type: ignore[misc]
    if dice.random() < 0.5:
        cluster.network.at(0.5 + dice.random() * 2.0, restart)
    cluster.coming = WORKERS_MAX - 2
    cluster.network.run(
        lambda: (
            not cluster.coming
            and all(
                number in killed or client.done_at is not None or client.core.member.end is not None
                for number, client in cluster.clients.items()
            )
        ),
        3_000,
    )
    for number, client in cluster.clients.items():
        error = client.error or (client.done_at is None and client.core.member.end) or None
        assert number in killed or error is None or (number >= 2 and is_refusal(error)), error


@pytest.mark.spec("R631")
@pytest.mark.parametrize("replicas", [0, 1], ids=["move", "are lost"])
@pytest.mark.parametrize("seed", FEWER)
def test_servers_move_or_are_lost_while_workers_come_and_go(seed: int, replicas: int) -> None:
    """What takes the seat of a server knows which workers were added, and have entered."""
    dice = random.Random(seed)
    mode = dice.choice(["sync", "sync", "async", "ssp"])
    kv = Store(mode=mode, staleness=3 * (mode == "ssp"), on_worker_lost="shrink", bigarray_bound=16)
    sizes, way = {"k0": 40, "k1": 16}, dice.choice(["pushpull", "push, pull"])
    steps = [dice.randint(20, 40) if number < 2 else dice.randint(1, 20) for number in range(WORKERS_MAX)]

    def script(number: int) -> Script:
        return come_and_go(kv, number, steps[number], sizes, way, 0.04)

    faults = replace(faults_of(dice), in_order=True)
    cluster = Cluster(2, 2, script, seed, faults, most_workers=4, replicas=replicas)
    for _ in range(2, WORKERS_MAX):
        come(cluster, 1.4 + dice.random() * 1.5)
    cluster.coming = WORKERS_MAX - 2

    def strike(left: int, rank: int) -> None:
        if cluster.is_done or not left:
            return
        cluster.network.at(cluster.network.now + dice.random(), lambda: strike(left - 1, 1 - rank))
        primary, _ = cluster.holders(rank)
        if not replicas:
            cluster.order(Drain(rank, 60.0))
        elif primary is not None and cluster.is_level(rank) and not is_given_up(primary):
            cluster.network.kill(primary)

    cluster.network.at(1.4 + dice.random() * 0.5, lambda: strike(8, 0))
    cluster.run(3_000)
    for number, client in cluster.clients.items():
        error = client.error or (client.done_at is None and client.core.member.end) or None
        assert error is None or (number >= 2 and is_refusal(error)), error


def come(cluster: Cluster, at: float) -> None:
    """Add a worker at a time, or as soon as the job has formed."""

    def add() -> None:
        if cluster.scheduler.core.job.formed:
            cluster.add_worker()
        else:
            come(cluster, cluster.network.now + 0.05)

    cluster.network.at(at, add)


def is_refusal(error: KvpsError) -> bool:
    """Whether a worker came when the job was full, or over."""
    return any(
        words in str(error)
        for words in ("already has", "accepts no new members", "the job is over", "no answer")
    )
