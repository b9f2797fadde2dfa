"""Whole clusters under a swarm of faults: which kinds there are is drawn, too.

Kinds, drawn by :func:`~tests.simulation.faults.drawn`: packets are lost, doubled, overtaken, far; a link
is cut, one way or both, and what it held comes later or never; a link is slow; a process is stopped
for 0.5, 1.5 and 10 times the silence limit; one is replaced while it is stopped, and wakes; clocks go
10 % wrong; workers are killed and replaced; the scheduler ends, also in the midst of a save, and is
started again. ``tests/simulation/README.md`` has the invariants that are checked, and where.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from kvps.errors import KvpsError, ServerLost, Timeout
from kvps.messages import Packet, Pulled
from tests.simulation.cluster import Cluster, Script, Store
from tests.simulation.faults import PAUSES, Pause, Trouble, drawn
from tests.simulation.network import Process
from tests.simulation.training import (
    FEWER,
    SEEDS,
    WAYS,
    Job,
    check,
    one_hot,
    reference,
    replayable,
    train,
)


class Witness:
    """Reads what servers answer: one value per version (I5), and versions that do not fall (I4)."""

    def __init__(self, cluster: Cluster) -> None:
        self._values: dict[tuple[int, int, int, int], bytes] = {}
        self._newest: dict[tuple[int, int, int], int] = {}
        self._delays = cluster.network.delays
        cluster.network.delays = self

    def __call__(self, source: Process, target: Process, packet: Packet) -> Sequence[float]:
        if isinstance(packet.message, Pulled) and source.name.startswith("server"):
            self._read(packet.message, b"".join(bytes(one) for one in packet.payload))
        return self._delays(source, target, packet)

    def _read(self, pulled: Pulled, values: bytes) -> None:
        at = 0
        for start, size, version, _ in pulled.runs:
            where = (pulled.chunk, start, size)
            assert version >= self._newest.get(where, 0), f"I4: {where} fell to {version}"
            self._newest[where] = version
            if pulled.values:
                part = values[at : at + 4 * size]
                at += 4 * size
                first = self._values.setdefault((*where, version), part)
                assert part == first, f"I5: {where} has two values at version {version}"


def play(job: Job, trouble: Trouble, script: Callable[[int], Script], limit_s: float) -> Cluster:
    """Play a job under trouble; whatever it is, everybody must end (I6), and well."""
    cluster = Cluster(
        job.workers, job.servers, script, job.seed, trouble.faults, job.machines, trouble.rates
    )
    usurped = trouble.befall(cluster)
    if job.store.mode == "sync":
        Witness(cluster)
    cluster.run(limit_s)
    cluster.part(400)
    for client in cluster.clients.values():
        assert client.error is None, client.error
        assert all(map(is_harmless, client.later)), client.later
    for old in usurped:
        assert old.done_at is None, "I9: its seat was taken, and its script ended"
        if old.process.exit is not None:
            assert old.process.exit.code in (1, 78), old.process.exit
    return cluster


def is_harmless(late: KvpsError) -> bool:
    """Whether it is no fault that a push which had returned was not confirmed in the end.

    What it pushed counts, as the weights show; only its ACK came too late, or not before the end.
    """
    return isinstance(late, Timeout) or "the job is over: every worker left" in str(late)


def job_of(seed: int) -> tuple[Job, Trouble]:
    dice = random.Random(seed)
    job = Job(seed, dice.randint(1, 4), dice.randint(1, 3), dice.randint(2, 8))
    trouble = drawn(dice, job.workers, job.servers)
    for index in range(dice.randint(1, 5)):
        job.sizes[f"k{index}"] = dice.choice([1, 30, 65, 200, 500])
    job.store = Store(
        deterministic=dice.random() < 0.3, bigarray_bound=dice.choice([1, 64, 100_000])
    )
    job.has_optimizer = dice.random() < 0.5
    patience = 10 * (trouble.faults.jitter_s + trouble.faults.latency_s)
    # One whose call is late while the scheduler is silent is told that it is lost.
    short_s = 10_000.0 if trouble.silences_the_scheduler else 3 + patience
    job.store.timeout_s = dice.choice([short_s, 10_000.0, 10_000.0])
    job.ways = [dice.choice(WAYS) for _ in range(job.steps)]
    job.store.bundles = not job.store.deterministic and dice.random() < 0.5
    job.machines = [dice.choice([1, 2, 2, 3]) for _ in range(job.workers)]
    return job, trouble


@pytest.mark.parametrize("seed", SEEDS)
def test_all_weights_are_those_of_one_process(seed: int, request: pytest.FixtureRequest) -> None:
    """I1, I3: each round is the sum over all ranks, each once; I2: and nothing acknowledged is lost."""
    job, trouble = job_of(seed)
    with replayable(request, (job, trouble)):
        cluster = play(job, trouble, lambda rank: train(job, rank), 3_000)
        for client in cluster.clients.values():
            check(job.steps, client.result, reference(job)[-1])
        for server in cluster.servers:
            chunks = server.core.requests.engine.chunks.by_number.values()  # type: ignore[attr-defined]
            is_open = [span for chunk in chunks for span in chunk.spans if span.is_open]
            assert not is_open, f"I7: {server.name} keeps gradients of rounds that are over"


@pytest.mark.parametrize("mode", ["async", "ssp"])
@pytest.mark.parametrize("seed", SEEDS[: len(SEEDS) // 3])
def test_each_element_is_pushed_to_once(
    seed: int, mode: str, request: pytest.FixtureRequest
) -> None:
    """I14: as many updates as pushes; I1: to each element one."""
    job, trouble = job_of(seed)
    job.store = Store(mode=mode, staleness=seed % 3, bigarray_bound=job.store.bigarray_bound)
    job.ways = [random.Random(seed).choice(["pull", "push"]) for _ in range(job.steps)]
    job.machines = []
    with replayable(request, (job, trouble)):
        cluster = play(job, trouble, lambda rank: one_hot(job, rank), 3_000)
        for client in cluster.clients.values():
            assert torch.equal(client.result["hot"], torch.ones_like(client.result["hot"]))
            assert client.result["even"].unique().tolist() == [job.workers * job.steps]


@pytest.mark.parametrize("seed", FEWER)
@pytest.mark.parametrize("pause_s", PAUSES[1:])
def test_a_server_that_was_stopped_for_too_long(
    seed: int, pause_s: float, request: pytest.FixtureRequest
) -> None:
    """It is lost, also if it wakes. Everybody is told so (I6), or has what is right (I3)."""
    job, trouble = job_of(seed)
    dice = random.Random(seed)
    job.workers, job.machines = max(2, job.workers), []
    trouble = Trouble(("pause",))
    trouble.pauses = [Pause(f"server {dice.randrange(job.servers)}", 0.1 + dice.random(), pause_s)]
    trouble.faults = dice.choice([drawn(dice, 1, 1).faults, trouble.faults])
    with replayable(request, (job, trouble)):
        cluster = Cluster(
            job.workers, job.servers, lambda rank: train(job, rank), seed, trouble.faults
        )
        trouble.befall(cluster)
        cluster.run(1_000)
        for client in cluster.clients.values():
            if client.error is None:
                check(job.steps, client.result, reference(job)[-1])
            else:
                assert isinstance(client.error, ServerLost), client.error
                assert trouble.pauses[0].name in str(client.error)
