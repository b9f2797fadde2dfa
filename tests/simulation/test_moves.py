"""The seats of servers move to other processes: no call fails, no step is repeated, and the bits are right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvps.protocol.envelope import Packet
from kvps.protocol.membership import Drain, Scale
from kvps.protocol.replicas import CopyValues
from tests.simulation.cluster import Cluster, Script
from tests.simulation.network import Process
from tests.simulation.test_replicas import WAYS, job_of, standing, train
from tests.simulation.training import (
    FEWER,
    ON_TIME,
    Fault,
    Job,
    Play,
    befall_each_packet,
    each_fate,
    end_at_each_packet_from,
    faults_of,
    is_trained,
    play_with,
    replayable,
)

PAUSE_S = 0.05
"""How long each step computes, so that a job lasts for some moves."""


def slowly(job: Job, rank: int) -> Script:
    """Train, with a pause in each step."""
    script = train(job, rank)
    answer = None
    while True:
        try:
            step = script.send(answer)
        except StopIteration as end:
            return end.value
        answer = yield step + PAUSE_S if isinstance(step, float) else step


PLAY: Play = (slowly, is_trained)
AT_S = 1.41
"""When a server is drained: in the midst of the first steps."""


def moving_job(has_optimizer: bool = True) -> Job:
    job = job_of(has_optimizer)
    job.replicas = 0
    return job


def drain(cluster: Cluster, rank: int = 0, at: float = AT_S) -> None:
    cluster.network.at(at, lambda: cluster.is_done or cluster.order(Drain(rank, 60.0)))


def moved(cluster: Cluster) -> list[int]:
    """The ranks of the seats that have moved, in order."""
    return [each.rank for each in cluster.scheduler.core.job.standbys.moves.moved]  # type: ignore[attr-defined]


def has_moved(cluster: Cluster) -> bool:
    return bool(moved(cluster))


@pytest.mark.spec("R462", "R463", "R469", "R470")
@pytest.mark.parametrize("has_optimizer", [False, True], ids=["sums", "optimizer"])
def test_each_server_moves_while_workers_train(has_optimizer: bool) -> None:
    job = moving_job(has_optimizer)
    job.steps, job.ways = 90, 15 * WAYS
    cluster = Cluster(2, 2, lambda rank: slowly(job, rank), 0, job.faults)
    former = []
    for at, rank in ((1.45, 0), (3.0, 1), (4.5, 0)):
        cluster.network.at(at, lambda rank=rank: former.append(cluster.holders(rank)[0]))  # type: ignore[misc]
        drain(cluster, rank, at)
    cluster.run(400)
    for client in cluster.ended_well():
        is_trained(job, client.result)
    assert moved(cluster) == [0, 1, 0]
    assert [process.exit.code for process in former if process is not None and process.exit] == [0, 0, 0]


def test_a_seat_is_copied_once_though_its_copy_takes_many_steps(
    monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    monkeypatch.setattr("kvps.core.server.replicas.primary.WINDOW_BYTES", 64)
    monkeypatch.setattr("kvps.core.server.replicas.primary.BLOCK", 16)
    job = moving_job()
    job.sizes = {f"k{at}": 15 for at in range(16)}
    job.steps, job.ways = 18, 3 * WAYS
    job.faults = replace(job.faults, latency_s=0.02)
    cluster = Cluster(2, 2, lambda rank: slowly(job, rank), 0, job.faults)
    copied = 0

    def count(source: Process, target: Process, packet: Packet) -> Sequence[float]:
        nonlocal copied
        if isinstance(packet.message, CopyValues):
            copied += packet.message.size * (1 + len(packet.message.fields))
        return ON_TIME

    cluster.network.delays = count
    drain(cluster, at=2.2)
    cluster.run(400)
    for client in cluster.ended_well():
        is_trained(job, client.result)
    assert moved(cluster) == [0]
    holder, _ = cluster.holders(0)
    assert holder is not None
    chunks = holder.core.context.chunks.by_number.values()  # type: ignore[attr-defined]
    held = sum([chunk.used * (1 + len(chunk.state or ())) for chunk in chunks])
    assert copied == held


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first spare that comes gets the seat, so that a short job is long enough."""
    monkeypatch.setattr("kvps.core.scheduler.standbys.GATHER_MAX_S", 0.0)


def lose_source(cluster: Cluster) -> None:
    source, _ = cluster.holders(0)
    if source is not None:
        cluster.network.kill(source)


def lose_target(cluster: Cluster) -> None:
    """End the target, unless it has said that it is level: from then on it is lost as a server is."""
    _, target = cluster.holders(0)
    if target is not None and not standing(target).level:
        cluster.network.kill(target)


def lose_scheduler(cluster: Cluster) -> None:
    cluster.network.kill(cluster.scheduler)
    cluster.network.at(cluster.network.now + 0.2, cluster.start_scheduler)


@pytest.mark.spec("R471")
@pytest.mark.parametrize("end", [lose_target, lose_scheduler], ids=["target", "scheduler"])
def test_the_target_and_the_scheduler_may_end_at_any_packet(
    end: Callable[[Cluster], None], soon: None
) -> None:
    job = moving_job()
    end_at_each_packet_from(AT_S, end, lambda die: play_with(job, die, PLAY, drain), has_moved)


@pytest.mark.spec("R472")
def test_a_source_that_ends_at_any_packet_is_lost_or_has_moved(soon: None) -> None:
    ends, job = set(), moving_job()

    def play(die: Fault) -> None:
        cluster = Cluster(2, 2, lambda rank: slowly(job, rank), 0, job.faults)
        count = 0

        def delays(source: Process, target: Process, packet: object) -> Sequence[float]:
            nonlocal count
            count += 1
            return die(cluster, count, source, target)

        cluster.network.delays = delays
        drain(cluster)
        cluster.run(400)
        for client in cluster.clients.values():
            if client.error is None:
                is_trained(job, client.result)
            else:
                assert "server 0" in str(client.error)
        ends.add(tuple(type(client.error).__name__ for client in cluster.clients.values()))

    end_at_each_packet_from(AT_S, lose_source, play, has_moved)
    assert ends == {("ServerLost", "ServerLost")} | (ends & {("NoneType", "NoneType")})


@pytest.mark.spec("R471")
@each_fate
def test_anything_may_befall_any_one_packet_meanwhile(fate: Sequence[float], soon: None) -> None:
    befall_each_packet(moving_job(), fate, PLAY, prepare=drain)


@pytest.mark.spec("R462", "R470", "R471")
@pytest.mark.parametrize("seed", FEWER)
def test_swarm(seed: int, request: pytest.FixtureRequest, soon: None) -> None:
    """Seats move while targets and workers die; packets are lost, doubled and late."""
    dice = random.Random(seed)
    job = moving_job(dice.random() < 0.7)
    job.seed, job.steps = seed, 30
    job.ways = [dice.choice(WAYS) for _ in range(job.steps)]
    job.faults = replace(faults_of(dice), in_order=True)
    job.store.deterministic = dice.random() < 0.3
    job.replicas = int(dice.random() < 0.3)
    cluster = Cluster(2, 2, lambda rank: slowly(job, rank), seed, job.faults, replicas=job.replicas)

    def strike(left: int) -> None:
        if cluster.is_done or not left:
            return
        cluster.network.at(cluster.network.now + dice.random(), lambda: strike(left - 1))
        rank = dice.randrange(2)
        if dice.random() < 0.6:
            cluster.order(dice.choice([Drain(rank, 5.0 * dice.random() + 0.1), Scale(1 + rank, 3.0)]))
        elif dice.random() < 0.3:
            cluster.kill(rank)
            cluster.network.at(cluster.network.now + 3 * dice.random(), lambda: cluster.replace(rank))
        else:
            lose_target(cluster)

    cluster.network.at(AT_S, lambda: strike(12))
    with replayable(request, job):
        cluster.run(2_000)
        for client in cluster.ended_well():
            is_trained(job, client.result)
