"""A server whose standby is level may die at any moment: no call fails, no step is repeated, and the bits are right."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.server.server import Server
from kvps.protocol.membership import Standing
from tests.simulation import test_compression as compression
from tests.simulation import test_embeddings as embeddings
from tests.simulation import test_nonfinite as nonfinite
from tests.simulation import test_quorum as quorum
from tests.simulation import training
from tests.simulation.cluster import Cluster, Script, Store, Values
from tests.simulation.network import Faults, Process
from tests.simulation.training import (
    FEWER,
    Job,
    Play,
    befall_each_packet,
    check,
    each_fate,
    end_at_each_packet_from,
    faults_of,
    is_trained,
    play_with,
    replayable,
)

SIZES = {"w": 3, "big": 90}
"""One key on one server, and one that is cut."""
WAYS = ["pushpull", "push, pull", "push", "push and wait", "one by one", "pushpull"]
STRIKES = 12
BEGIN_S = 1.4
"""When all copies are level, and training begins."""


def train(job: Job, rank: int) -> Script:
    """Train as rank ``rank``, from where this rank is; return the weights."""
    kv, versions = job.store, job.versions
    yield from kv.open()
    yield BEGIN_S
    yield from kv.init(job.initial())
    if job.has_optimizer:
        yield from kv.set_optimizer("test", **job.hyper)
    begin = yield from kv.resume(list(job.sizes))
    for step in range(begin, job.steps):
        gradients, expected = job.gradients(rank, step), versions[step + 1]
        yield 0.004 * rank  # so that rank 0 is ahead
        match job.ways[step]:
            case "pushpull":
                check(step, (yield from kv.pushpull(gradients)), expected)
            case "one by one":
                for name in gradients:
                    yield from kv.push({name: gradients[name]})
                for name in reversed(list(gradients)):
                    check(step, (yield from kv.pull({name: gradients[name]})), {name: expected[name]})
            case way:
                yield from kv.push(gradients, wait=way == "push and wait")
                if way == "push, pull":
                    check(step, (yield from kv.pull(gradients)), expected)
    yield from kv.barrier()
    assert (yield from kv.versions(list(job.sizes))) == [job.steps] * len(job.sizes)
    return (yield from kv.pull(job.initial()))


COPIED: Play = (train, is_trained)


def job_of(has_optimizer: bool = False, workers: int = 2) -> Job:
    job = Job(0, workers, 2, len(WAYS), SIZES, ways=WAYS, has_optimizer=has_optimizer, replicas=1)
    job.store = Store(bigarray_bound=16)
    job.faults = Faults(in_order=True)
    return job


def lose_primary(cluster: Cluster) -> None:
    primary, _ = cluster.holders(0)
    if primary is not None and cluster.is_level(0):
        cluster.network.kill(primary)


def lose_standby(cluster: Cluster) -> None:
    _, standby = cluster.holders(0)
    if standby is not None:
        cluster.network.kill(standby)


def end_at_each_packet(job: Job, end: Callable[[Cluster], None], play: Play = COPIED) -> None:
    """End something at each packet of today once the copies of a job are level."""
    end_at_each_packet_from(BEGIN_S, end, lambda die: play_with(job, die, play))


@pytest.mark.parametrize("has_optimizer", [False, True], ids=["sums", "optimizer"])
def test_a_primary_may_die_at_any_packet(has_optimizer: bool) -> None:
    end_at_each_packet(job_of(has_optimizer), lose_primary)


def test_a_standby_may_die_at_any_packet() -> None:
    end_at_each_packet(job_of(), lose_standby)


@each_fate
def test_anything_may_befall_any_one_packet_meanwhile(fate: Sequence[float]) -> None:
    def prepare(cluster: Cluster) -> None:
        cluster.network.at(BEGIN_S + 0.03, lambda: lose_primary(cluster))

    befall_each_packet(job_of(has_optimizer=True), fate, COPIED, prepare=prepare)


# --- embedding tables -----------------------------------------------------------------------------


def once_level(script: Callable[[Any, int], Script]) -> Play:
    """Let a script begin when the copies are level."""

    def begin(job: Job, rank: int) -> Script:
        yield BEGIN_S
        return (yield from script(job, rank))

    return begin, lambda job, result: None


def table_job(recipe: EmbeddingSpec, steps: int = 5) -> embeddings.TableJob:
    job = embeddings.TableJob(3, 2, 2, steps, recipe=recipe, replicas=1)
    job.faults = Faults(in_order=True)
    return job


@pytest.mark.spec("R445", "R446")
def test_a_primary_with_a_table_may_die_at_any_packet() -> None:
    recipe = embeddings.recipe(admit=2, age=2, momentum=0.5, lr=1.0)
    end_at_each_packet(table_job(recipe), lose_primary, once_level(embeddings.train))


@pytest.mark.spec("R446")
def test_evictions_are_those_of_a_run_without_a_loss() -> None:
    """How many rows a server has decides which are evicted; so there is no table of one process to compare."""
    whole: list[object] = []

    def push(job: Job, rank: int) -> Script:
        assert isinstance(job, embeddings.TableJob)
        kv, found = job.store, []
        yield from kv.open()
        yield BEGIN_S
        yield from kv.embed(embeddings.KEY, job.recipe, rank)
        for step in range(job.steps):
            ids, rows = job.ids(rank, step), job.rows(rank, step)
            yield from kv.push_ids(embeddings.KEY, ids, rows, job.servers)
            pulled = yield from kv.pull_ids(embeddings.KEY, job.recipe, embeddings.ALL, job.servers)
            found.append(pulled.tolist())
        yield from kv.barrier()
        return found, (yield from embeddings.export(job))

    def is_same(job: Job, result: object) -> None:
        whole.append(result)
        assert result == whole[0]

    recipe = embeddings.recipe("adagrad", rows=12, lr=0.5)
    end_at_each_packet(table_job(recipe, 4), lose_primary, (push, is_same))


@pytest.mark.spec("R445", "R447")
def test_a_primary_with_several_tables_may_die_at_any_packet() -> None:
    end_at_each_packet(table_job(embeddings.recipe(), 3), lose_primary, once_level(embeddings.train_all))


@pytest.mark.spec("R446")
@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_each_push_to_tables_counts_once_without_rounds(mode: str) -> None:
    job = table_job(embeddings.recipe(), 3)
    job.store = Store(mode=mode, staleness=2)
    end_at_each_packet(job, lose_primary, (once_level(embeddings.train_all_alone)[0], embeddings.is_sum))


@pytest.mark.spec("R557")
def test_a_primary_whose_values_are_pulled_compressed_may_die_at_any_packet() -> None:
    job = compression.Compressed(5, 2, 2, 4, SIZES, has_optimizer=True, replicas=1)
    job.ways, job.faults = ["pushpull", "push", "push, pull", "pushpull"], Faults(in_order=True)
    job.store = Store(bigarray_bound=16)
    end_at_each_packet(job, lose_primary, (once_level(training.train)[0], is_trained))


@pytest.mark.parametrize("mode", ["skip", "error"])
def test_a_primary_that_drops_updates_may_die_at_any_packet(mode: str) -> None:
    job = nonfinite.Flawed(5, 2, 2, 4, SIZES, has_optimizer=True, replicas=1)
    job.ways, job.faults = ["pushpull", "push", "push, pull", "pushpull"], Faults(in_order=True)
    job.store = Store(bigarray_bound=16, on_nonfinite=mode)
    job.flaws = {(1, 1, "w"): (2, math.nan), (0, 1, "big"): (0, math.inf), (0, 2, "big"): (89, -math.inf)}
    job.flaws[1, 3, "w"] = 0, math.nan
    end_at_each_packet(job, lose_primary, (once_level(nonfinite.train)[0], nonfinite.is_trained))


# --- late pushes that count in the next round -------------------------------------------------------

each_way = pytest.mark.parametrize(
    "ways", [["pushpull"] * 4, ["push", "push, pull", "push", "push"]], ids=["pushpull", "push"]
)
LATE: Play = (once_level(quorum.train)[0], quorum.judge)


def late_job(ways: list[str]) -> Job:
    job = Job(0, 3, 2, len(ways), ways=ways, replicas=1)
    job.store = Store(bigarray_bound=16, quorum=2, grace_s=0.0, late="next", on_worker_lost="shrink")
    job.faults = Faults(in_order=True)
    return job


@pytest.mark.spec("R656", "R657", "R658")
@each_way
def test_a_primary_whose_late_pushes_count_later_may_die_at_any_packet(ways: list[str]) -> None:
    end_at_each_packet(late_job(ways), lose_primary, LATE)


@each_way
@each_fate
def test_anything_may_befall_any_packet_of_late_pushes_meanwhile(
    ways: list[str], fate: Sequence[float]
) -> None:
    def prepare(cluster: Cluster) -> None:
        cluster.network.at(BEGIN_S + 0.02, lambda: lose_primary(cluster))

    befall_each_packet(late_job(ways), fate, LATE, prepare=prepare)


@each_way
@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05])
def test_a_worker_may_die_with_the_primary_of_its_late_pushes(ways: list[str], after_s: float) -> None:
    """Pushes of the other workers count once; of the lost worker's, some may count in no round."""

    def lose(cluster: Cluster) -> None:
        cluster.kill(2)
        cluster.network.at(cluster.network.now + 0.02, lambda: cluster.replace(2))
        cluster.network.at(cluster.network.now + after_s, lambda: lose_primary(cluster))

    def is_trained(job: Job, values: Values) -> None:
        hot = values["hot"].reshape(3, job.workers, job.steps)
        assert hot[:, :2].eq(1).all()
        assert hot[:, 2].eq(0).logical_or(hot[:, 2].eq(1)).all()

    script = once_level(lambda job, rank: quorum.train(job, rank, resumes=rank == 2))[0]
    end_at_each_packet(late_job(ways), lose, (script, is_trained))


def standing(process: Process) -> Standing:
    """What a primary or a standby tells the scheduler of the copy."""
    core = process.core
    assert isinstance(core, Server)
    assert core.member.standing is not None
    return core.member.standing()


def is_given_up(primary: Process) -> bool:
    """Whether a primary has asked for another standby."""
    return standing(primary).dismiss != 0


@pytest.mark.parametrize("seed", FEWER)
def test_swarm(seed: int, request: pytest.FixtureRequest) -> None:
    """Primaries, standbys and workers die one after another; packets are lost, doubled and late."""
    dice = random.Random(seed)
    job = job_of(dice.random() < 0.7, dice.choice([2, 3]))
    job.seed, job.steps = seed, 12
    job.ways = [dice.choice(WAYS) for _ in range(job.steps)]
    # What a standby says of its copy counts as it arrives, and ZeroMQ keeps the order.
    job.faults = replace(faults_of(dice), in_order=True)
    job.store.deterministic = dice.random() < 0.3
    cluster = Cluster(job.workers, 2, lambda rank: train(job, rank), seed, job.faults, replicas=1)

    loses_workers = dice.random() < 0.5

    def strike(left: int) -> None:
        if cluster.is_done or not left:
            return
        cluster.network.at(cluster.network.now + dice.random() * 2, lambda: strike(left - 1))
        rank = dice.randrange(2)
        if loses_workers and dice.random() < 0.2:
            cluster.kill(rank)
            cluster.network.at(cluster.network.now + 3 * dice.random(), lambda: cluster.replace(rank))
        primary, standby = cluster.holders(rank)
        if dice.random() < 0.7:
            if primary and standby and cluster.is_level(rank) and not is_given_up(primary):
                cluster.network.kill(primary)
        elif primary is not None and standby is not None:
            cluster.network.kill(standby)

    cluster.network.at(BEGIN_S + dice.random(), lambda: strike(STRIKES))
    with replayable(request, job):
        cluster.run(2_000)
        for client in cluster.ended_well():
            is_trained(job, client.result)
