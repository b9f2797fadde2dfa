"""Servers end and are started again: all return to a cut, and the job ends as if none had."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvps.core.membership_client import EXIT_CONFIG
from kvps.errors import EpochChanged
from tests.simulation.cluster import Cluster, Script, Store, Values
from tests.simulation.network import Faults, Process
from tests.simulation.training import FEWER, Job, check, faults_of, patient, replayable

LOOK_EVERY_S = 0.5


@dataclass
class Loss:
    """A process that is killed, and started again."""

    name: str
    at: float
    after_s: float


@dataclass
class Campaign:
    """A job, and what befalls it."""

    job: Job
    every_s: float = 0.2
    takes_s: float = 0.05
    losses: list[Loss] = field(default_factory=list)
    full: list[tuple[float, float, int]] = field(default_factory=list)
    """From when until when which server's disk is full."""
    pairs: list[tuple[float, tuple[str, str]]] = field(default_factory=list)
    """When which two processes are killed at once, and started again at once."""


Check = Callable[[int, Values, Values], None]


def train(job: Job, rank: int, check: Check) -> Script:
    """Train, from where the servers are whenever they say that they have returned to a cut."""
    kv, versions = job.store, job.versions
    is_begun = False
    while True:
        try:
            if not is_begun:
                yield from patient(kv.open)
                yield from patient(kv.init, job.initial())
                if job.has_optimizer:
                    yield from patient(kv.set_optimizer, "test", **job.hyper)
                step = yield from patient(kv.resume, list(job.sizes))
                is_begun = True
            while step < job.steps:
                if job.has_optimizer and step % 3 == 0:  # all ranks count these calls, too
                    yield from kv.set_rate(1.0 + step)
                gradients = job.gradients(rank, step)
                if job.ways[step] == "one by one":
                    for name in gradients:
                        yield from kv.push({name: gradients[name]})
                    pulled = yield from kv.pull(gradients)
                elif job.ways[step] == "key by key":
                    pulled = {}
                    for name in gradients:  # each waits for all ranks before the next is pushed
                        pulled |= yield from kv.pushpull({name: gradients[name]})
                else:
                    pulled = yield from kv.pushpull(gradients)
                check(step, pulled, versions[step + 1])
                step += 1
            yield from kv.barrier()
            weights = yield from kv.pull(job.initial())
            assert (yield from kv.versions(list(job.sizes))) == [step] * len(job.sizes)
            return weights
        except EpochChanged as error:
            is_begun = error.has_optimizer == job.has_optimizer and set(error.after) == set(job.sizes)
            if is_begun:
                step = where(error)


def where(error: EpochChanged) -> int:
    """Return the step at which the servers are now."""
    (step,) = set(error.after.values())  # a model of two moments is none
    return step


def campaign_of(seed: int) -> Campaign:
    """Draw a job in which servers, workers and the scheduler are killed."""
    dice = random.Random(seed)
    workers, servers = dice.choice([(1, 1), (2, 1), (2, 2), (3, 2), (2, 3)])
    sizes = {name: dice.choice([1, 7, 150, 400]) for name in "abc"[: dice.randint(1, 3)]}
    faults = faults_of(dice)
    steps = 20 if faults.jitter_s > 1 else dice.choice([30, 60, 120])
    job = Job(
        seed,
        workers,
        servers,
        steps,
        sizes,
        Store(bigarray_bound=dice.choice([100, 100_000])),
        dice.random() < 0.5,
        faults,
    )
    job.ways = [dice.choice(["pushpull", "one by one", "key by key"]) for _ in range(steps)]
    campaign = Campaign(job, dice.choice([0.05, 0.3, 1.0]), dice.choice([0.01, 0.2]))
    for _ in range(dice.randint(1, 3)):
        kind = dice.choice(["server", "server", "server", "worker", "scheduler"])
        rank = dice.randrange({"server": servers, "worker": workers, "scheduler": 1}[kind])
        name = "scheduler" if kind == "scheduler" else f"{kind} {rank}"
        campaign.losses.append(Loss(name, dice.random() * 20, dice.choice([0.1, 1.0, 5.0])))
    if dice.random() < 0.3:
        begin = dice.random() * 10
        campaign.full.append((begin, begin + dice.random() * 5, dice.randrange(servers)))
    return campaign


class Supervisor:
    """Kills, and starts again what has ended but should run, as a guardian would."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._last: dict[str, Process] = {}
        self.killed = 0
        cluster.network.at(LOOK_EVERY_S, self._look)

    def kill(self, loss: Loss) -> None:
        """Kill a process when there is a cut to return to, and start it again a little later."""
        cluster = self._cluster
        process = self._process(loss.name)
        if cluster.is_done or process is None or not process.alive:
            return
        is_server = loss.name.startswith("server")
        if is_server and (not cluster.scheduler.alive or not self._has_cut):
            cluster.network.at(cluster.network.now + 0.1, lambda: self.kill(loss))
            return
        self.killed += is_server
        cluster.network.kill(process)
        cluster.network.at(cluster.network.now + loss.after_s, lambda: self._start(loss.name))

    @property
    def _has_cut(self) -> bool:
        return self._cluster.scheduler.core.job.checkpoints.kept > 0  # type: ignore[attr-defined]

    def kill_both(self, names: tuple[str, str]) -> None:
        """Kill two processes when there is a cut, and start them again before anybody knows of it."""
        cluster = self._cluster
        running = [item for item in map(self._process, names) if item is not None and item.alive]
        if cluster.is_done:
            return
        if len(running) < len(names) or not cluster.scheduler.alive or not self._has_cut:
            cluster.network.at(cluster.network.now + 0.1, lambda: self.kill_both(names))
            return
        for process in running:
            cluster.network.kill(process)
        self.killed += len(running)
        for name in names:
            self._start(name)

    def _process(self, name: str) -> Process | None:
        return next((process for process in self._cluster.processes if process.name == name), None)

    def _start(self, name: str) -> None:
        kind, _, rank = name.partition(" ")
        process = self._process(name)
        if self._cluster.is_done or process is None or process.alive:
            return
        ended = [client for client in self._cluster.clients.values() if client.done_at is not None]
        if process in [item.process for item in ended]:
            return
        if kind == "scheduler":
            self._cluster.start_scheduler()
        elif kind == "server":
            self._cluster.start_server(int(rank))
        else:
            self._cluster.start_worker(int(rank))

    def _look(self) -> None:
        """Start again what ended by itself while the job goes on: it came too early, say."""
        cluster = self._cluster
        for process in [*cluster.servers, *[client.process for client in cluster.clients.values()]]:
            if not process.alive and process.exit is not None and process.exit.code:
                code, why = process.exit.code, process.exit.reason
                assert code != EXIT_CONFIG, f"nothing would start {process.name} again: {why}"
                self._start(process.name)
        if not cluster.is_done:
            cluster.network.at(cluster.network.now + LOOK_EVERY_S, self._look)


def play(
    campaign: Campaign, begun: Callable[[Script, int], Script] = lambda script, rank: script
) -> tuple[Cluster, Supervisor]:
    """Play a campaign to its end; ``begun`` returns the script of a rank, of the usual script."""
    job = campaign.job

    def check_all(step: int, values: Values, expected: Values) -> None:
        """Check values, unless rounds were repeated without a worker that had left when a server was lost."""
        notes = [note for scheduler in cluster.schedulers for note in scheduler.notes]
        if not any("repeated without" in note for note in notes):
            check(step, values, expected)

    cluster = Cluster(
        job.workers,
        job.servers,
        lambda rank: begun(train(job, rank, check_all), rank),
        job.seed,
        job.faults,
        checkpoint_every_s=campaign.every_s,
        has_keys=job.seed % 2 == 1,
    )
    cluster.shelves.takes_s = campaign.takes_s
    supervisor = Supervisor(cluster)
    for loss in campaign.losses:
        cluster.network.at(loss.at, lambda loss=loss: supervisor.kill(loss))  # type: ignore[misc]
    for at, names in campaign.pairs:
        cluster.network.at(at, lambda names=names: supervisor.kill_both(names))  # type: ignore[misc]
    for begin, end, server in campaign.full:
        cluster.network.at(begin, lambda server=server: cluster.shelves.full.add(server))  # type: ignore[misc]
        cluster.network.at(end, lambda server=server: cluster.shelves.full.discard(server))  # type: ignore[misc]
    cluster.run(2_000)
    for client in cluster.ended_well():
        check_all(job.steps, client.result, job.versions[-1])
    return cluster, supervisor


@pytest.mark.parametrize("seed", FEWER)
def test_a_job_ends_as_if_no_server_had_been_lost(seed: int, request: pytest.FixtureRequest) -> None:
    campaign = campaign_of(seed)
    with replayable(request, campaign):
        play(campaign)


@pytest.mark.parametrize("seed", FEWER[::2])
def test_pairs_that_are_killed_and_started_again_at_once(seed: int, request: pytest.FixtureRequest) -> None:
    """Who comes finds its seat taken, by one who is dead; nobody may be refused for that."""
    campaign = campaign_of(seed)
    dice = random.Random(-seed - 1)
    job = campaign.job
    names = [f"server {rank}" for rank in range(job.servers)]
    names += ["scheduler", *(f"worker {rank}" for rank in range(job.workers))]
    campaign.losses, campaign.full = [], []
    for _ in range(dice.randint(1, 3)):
        first, other = dice.sample(names, 2)
        campaign.pairs.append((dice.random() * 20, (first, other)))
    with replayable(request, campaign):
        play(campaign)


def test_a_cut_holds_up_nobody_who_waits_for_others_in_the_middle_of_a_step() -> None:
    """One has pushed a key and waits for it; the other has halted before that push."""
    sizes = {"a": 8, "b": 8, "c": 8}
    job = Job(0, 3, 2, 60, sizes, faults=Faults(jitter_s=0.02))
    job.ways = ["key by key"] * job.steps
    cluster, _ = play(Campaign(job, every_s=0.05, takes_s=0.01))
    assert cluster.scheduler.core.job.checkpoints.kept >= 3  # type: ignore[attr-defined]
    late = "in the middle of a step", "could not wait any longer"
    assert not [note for note in cluster.scheduler.notes if any(why in note for why in late)]
