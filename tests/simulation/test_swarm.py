"""Whole clusters under a swarm of faults: which kinds there are is drawn, too.

``faults.py`` draws and does them: packets are lost, doubled, overtaken, far; a link is cut, one way or
both, and what it held comes later or never; connections break; a link is slow; a process is stopped for
0.5, 1.5 and 10 times the silence limit; one is replaced while it is stopped, and wakes; clocks go 10 %
wrong; workers are killed and replaced; the scheduler ends, also in the midst of a write or because the
disk is full, and is started again. ``README.md`` beside this file has the invariants that are checked,
and where.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvps.core.membership_client import EXIT_CONFIG
from kvps.errors import KvpsError, ServerLost, Timeout
from tests.simulation.cluster import Client, Cluster, Script, Store
from tests.simulation.faults import HARMLESS, PAUSES, Pause, Trouble, drawn, see_that_it_was_fenced
from tests.simulation.network import Faults
from tests.simulation.training import WAYS, Job, check, one_hot, replayable, seeds, train
from tests.simulation.witness import Witness

SEEDS = seeds(500)
FOURTH = SEEDS[::4]
SIXTEENTH = SEEDS[::16]
MILD = {"lose", "double", "overtake", "far", "slow", "clocks"}
"""Kinds of fault by which nobody is taken for lost, not even one who will speak again."""


def play(job: Job, trouble: Trouble, script: Callable[[int], Script]) -> tuple[Cluster, list[Client]]:
    """Play a job under trouble; return it, and the workers that were replaced while they were stopped.

    Whatever the trouble is, everybody must end (I6).
    """
    cluster = Cluster(
        job.workers,
        job.servers,
        script,
        job.seed,
        trouble.faults,
        job.machines,
        trouble.rates,
        has_keys=job.seed % 4 == 1,
    )
    cluster.network.overhears = Witness()
    usurped = trouble.befall(cluster)
    cluster.run(3_000)
    cluster.part(400)
    return cluster, usurped


def judge(cluster: Cluster, usurped: list[Client], trouble: Trouble) -> None:
    """See that all scripts ended well, and what was left behind."""
    for client in cluster.ended_well():
        assert all(map(is_harmless, client.later)), client.later
    for old in usurped:
        see_that_it_was_fenced(cluster, old)
    for server in cluster.servers:
        chunks = server.core.context.chunks.by_number.values()  # type: ignore[attr-defined]
        is_open = [span for chunk in chunks for span in chunk.spans if span.is_open]
        assert not is_open, f"I7: {server.name} keeps gradients of rounds that are over"
    if "usurp" not in trouble.kinds:
        for field in (item for some in cluster.started.values() for item in some):
            code = field.process.exit.code if field.process.exit else 0
            assert code != EXIT_CONFIG, (
                f"nothing would start {field.process.name} again: {field.process.exit.reason}"
            )
    if set(trouble.kinds) <= set(HARMLESS):
        for field in (cluster.scheduler, *cluster.servers):
            assert field.exit is not None, f"I13: {field.name} did not end"
            assert field.exit.code == 0, f"I13: {field.name} ended with {field.exit}"


def is_harmless(late: KvpsError) -> bool:
    """Whether it is no fault that a push which had returned was not confirmed in the end.

    What it pushed counts, as the weights show; only its ACK came too late, or not before the end.
    """
    return isinstance(late, Timeout) or "the job is over: every worker left" in str(late)


def job_of(seed: int) -> tuple[Job, Trouble]:
    """Draw a job, and what befalls it."""
    dice = random.Random(seed)
    job = Job(seed, dice.randint(1, 4), dice.randint(1, 3), dice.randint(2, 8))
    trouble = drawn(dice, job.workers, job.servers)
    for index in range(dice.randint(1, 5)):
        job.sizes[f"k{index}"] = dice.choice([1, 30, 65, 200, 500])
    job.store = Store(deterministic=dice.random() < 0.3, bigarray_bound=dice.choice([1, 64, 100_000]))
    job.has_optimizer = dice.random() < 0.5
    job.store.timeout_s = dice.choice([patience(trouble), 10_000.0, 10_000.0])
    job.ways = [dice.choice(WAYS) for _ in range(job.steps)]
    job.store.bundles = not job.store.deterministic and dice.random() < 0.5
    job.machines = [dice.choice([1, 2, 2, 3]) for _ in range(job.workers)]
    return job, trouble


def patience(trouble: Trouble) -> float:
    """Return a short timeout after which a call may still be made again until it succeeds."""
    if trouble.silences_the_scheduler:
        return 10_000.0  # one whose call is late while the scheduler is silent is told that it is lost
    if trouble.slow:
        return 60.0  # what crosses a slow link must have the time for it
    return 3 + 10 * (trouble.faults.jitter_s + trouble.faults.latency_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_weights_are_those_of_one_process(seed: int, request: pytest.FixtureRequest) -> None:
    """I1, I3: each round is the sum over all ranks, each once; I2: and nothing acknowledged is lost."""
    job, trouble = job_of(seed)
    with replayable(request, (job, trouble)):
        cluster, usurped = play(job, trouble, lambda rank: train(job, rank))
        judge(cluster, usurped, trouble)
        for client in cluster.clients.values():
            check(job.steps, client.result, job.versions[-1])


@pytest.mark.parametrize("seed", FOURTH)
def test_each_element_is_pushed_to_once(seed: int, request: pytest.FixtureRequest) -> None:
    """I14: as many updates as pushes; I1: to each element one."""
    job, trouble = job_of(seed)
    dice = random.Random(seed)
    mode, bound = dice.choice(["async", "ssp"]), job.store.bigarray_bound
    job.store = Store(mode=mode, staleness=dice.randrange(3), bigarray_bound=bound)
    job.ways = [dice.choice(["pull", "push", "push", "pushpull"]) for _ in range(job.steps)]
    job.is_hurt = not MILD.issuperset(trouble.kinds)
    job.machines = []
    with replayable(request, (job, trouble)):
        cluster, usurped = play(job, trouble, lambda rank: one_hot(job, rank))
        judge(cluster, usurped, trouble)
        for client in cluster.clients.values():
            assert torch.equal(client.result["hot"], torch.ones_like(client.result["hot"]))
            assert client.result["even"].unique().tolist() == [job.workers * job.steps]


@pytest.mark.parametrize("seed", SIXTEENTH)
@pytest.mark.parametrize("pause_s", PAUSES[1:])
def test_a_server_that_was_stopped_for_too_long(
    seed: int, pause_s: float, request: pytest.FixtureRequest
) -> None:
    """It is lost, also if it wakes. Everybody is told so (I6), or has what is right (I3)."""
    job, trouble = job_of(seed)
    dice = random.Random(seed)
    job.workers, job.machines = max(2, job.workers), []
    name = f"server {dice.randrange(job.servers)}"
    faults = dice.choice([trouble.faults, replace(trouble.faults, lose=0.0, double=0.0)])
    trouble = Trouble(("pause",), faults)
    trouble.pauses = [Pause(name, 0.1 + dice.random(), pause_s)]
    with replayable(request, (job, trouble)):
        cluster, _ = play(job, trouble, lambda rank: train(job, rank))
        for client in cluster.clients.values():
            if client.error is None:
                check(job.steps, client.result, job.versions[-1])
            else:
                assert isinstance(client.error, ServerLost), client.error
                assert name in str(client.error)


@pytest.mark.parametrize("seed", SIXTEENTH)
def test_replaced_worker_wakes_while_others_train(seed: int, request: pytest.FixtureRequest) -> None:
    """I9, wherever it was stopped: another worker stands still for longer, so the job goes on."""
    dice = random.Random(seed)
    job = Job(seed, 3, 2, 3, sizes={"k0": 200}, ways=["push", "pushpull", "push, pull"])
    trouble = Trouble(("usurp", "far"), Faults(latency_s=0.3, double=dice.choice([0.0, 0.3])))
    at = dice.uniform(1, 14)
    trouble.pauses = [Pause("worker 2", at, 40.0, is_usurped=True), Pause("worker 1", at, 60.0)]
    with replayable(request, (job, trouble)):
        cluster, usurped = play(job, trouble, lambda rank: train(job, rank))
        judge(cluster, usurped, trouble)
        for client in cluster.clients.values():
            check(job.steps, client.result, job.versions[-1])


@pytest.mark.parametrize("seed", SIXTEENTH)
def test_a_seed_plays_the_same_again(seed: int) -> None:
    """Else what it found could not be found again."""

    def said() -> list[str]:
        job, trouble = job_of(seed)
        cluster = Cluster(
            job.workers,
            job.servers,
            lambda rank: train(job, rank),
            seed,
            trouble.faults,
            job.machines,
            trouble.rates,
        )
        heard: list[str] = []
        cluster.network.overhears = lambda source, packet: heard.append(
            f"{cluster.network.now} {source.name} {packet.envelope} {packet.message}"
        )
        trouble.befall(cluster)
        cluster.run(3_000)
        return heard

    assert said() == said()
