"""Stores of a lost server are made again from what the workers hold: no push is lost, no step repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from kvps.errors import ServerLost
from tests.simulation.cluster import Cluster, Script, Store
from tests.simulation.network import Faults
from tests.simulation.training import (
    Job,
    Play,
    all_of,
    befall_each_packet,
    check,
    each_fate,
    end_at_each_packet,
    is_trained,
)

SIZES = {"w": 3, "big": 90}
"""One key on one server, and one that is cut."""
AGAIN_S = 3.0
"""When a supervisor starts a lost process again."""
MIDDLE_S = 0.112
"""When a round is open."""


def train(job: Job, rank: int) -> Script:
    """Train as rank ``rank``, from where this rank is; return the last sums."""
    kv, versions = job.store, job.versions
    yield from kv.open()
    yield from kv.init(job.initial())
    begin = yield from kv.resume(list(job.sizes))
    for step in range(begin, job.steps):
        check(step, (yield from kv.pushpull(job.gradients(rank, step))), versions[step + 1])
    yield from kv.barrier()
    assert (yield from kv.versions(list(job.sizes))) == [job.steps] * len(job.sizes)
    return (yield from kv.pull(job.initial()))


REBUILT: Play = (train, is_trained)


def job_of(servers: int = 2, workers: int = 2) -> Job:
    job = Job(0, workers, servers, 3, SIZES)
    job.store = Store(rebuilds=True, bigarray_bound=16)
    job.faults = Faults(in_order=True)
    return job


def lose(cluster: Cluster, again_s: float = AGAIN_S) -> None:
    """Kill server 0; its supervisor starts another one."""
    server = cluster.servers[0]
    if server.alive:
        cluster.network.kill(server)
        cluster.network.at(cluster.network.now + again_s, lambda: cluster.start_server(0))


# --- what holds -------------------------------------------------------------------------------------


@pytest.mark.spec("R487", "R488", "R490")
@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_may_die_at_any_packet(servers: int) -> None:
    end_at_each_packet(job_of(servers), "server 0", lose, REBUILT, all_of)


@pytest.mark.spec("R487", "R489")
@pytest.mark.parametrize("again_s", [2.5, 3.5], ids=["the worker is back first", "the server is back first"])
def test_a_worker_may_die_with_it(again_s: float) -> None:
    def lose_both(cluster: Cluster) -> None:
        if any(client.done_at is not None for client in cluster.clients.values()):
            return
        lose(cluster)
        if 1 in cluster.clients:
            cluster.kill(1)
            cluster.network.at(cluster.network.now + again_s, lambda: cluster.replace(1))

    end_at_each_packet(job_of(), "server 0", lose_both, REBUILT)


@pytest.mark.parametrize("after_s", [0.088, 0.092, 0.094, 0.096, 0.0985, 0.1005, 0.105])
def test_the_next_one_may_die_while_it_is_told(after_s: float) -> None:
    def lose_twice(cluster: Cluster) -> None:
        lose(cluster)
        cluster.network.at(cluster.network.now + AGAIN_S + after_s, lambda: lose(cluster))

    end_at_each_packet(job_of(1), "server 0", lose_twice, REBUILT, lambda count: range(40, count + 1, 8))


def test_a_server_that_was_only_silent_is_not_heard_any_more() -> None:
    def hang(cluster: Cluster) -> None:
        cluster.network.pause(cluster.servers[0], 40)
        cluster.network.at(cluster.network.now + 20, lambda: cluster.start_server(0))

    end_at_each_packet(job_of(), "server 0", hang, REBUILT)


@each_fate
def test_anything_may_befall_any_one_packet_meanwhile(fate: Sequence[float]) -> None:
    def prepare(cluster: Cluster) -> None:
        cluster.network.at(MIDDLE_S, lambda: lose(cluster))

    befall_each_packet(job_of(), fate, REBUILT, prepare=prepare)


# --- what does not ----------------------------------------------------------------------------------


def blind(job: Job, rank: int) -> Script:
    kv = job.store
    yield from kv.open()
    yield from kv.init(job.initial())
    yield from kv.push(job.gradients(rank, 0), wait=True)
    yield 10.0
    yield from kv.pull(job.initial())


def optimized(job: Job, rank: int) -> Script:
    kv = job.store
    yield from kv.open()
    yield from kv.init(job.initial())
    yield from kv.set_optimizer("sgd", lr=1.0)
    yield 10.0
    yield from kv.pull(job.initial())


def relayed(job: Job, rank: int) -> Script:
    kv = job.store
    yield from kv.open()
    if rank:
        yield 10.0
    yield from kv.broadcast(job.initial())


@pytest.mark.spec("R491", "R492")
@pytest.mark.parametrize(
    ("script", "why"),
    [
        (blind, "has pushed key 'w', and does not hold what came of it"),
        (optimized, "its servers have an optimizer"),
        (relayed, r"worker 0 was in broadcast\(\)"),
    ],
)
def test_a_store_that_cannot_be_made_again_is_lost_to_all(
    script: Callable[[Job, int], Script], why: str
) -> None:
    job = job_of(1)
    cluster = Cluster(2, 1, lambda rank: script(job, rank), 0, job.faults)
    cluster.network.at(2.0, lambda: lose(cluster))
    cluster.run(400)
    for client in cluster.clients.values():
        with pytest.raises(ServerLost, match=why):
            raise client.error or AssertionError("it ended well")


def test_stores_beside_it_are_lost() -> None:
    """A store that keeps nothing ends its calls as ever; one that rebuilds goes on."""

    def both(rank: int) -> Script:
        sums, other = Store(rebuilds=True), Store("other")
        yield from sums.open()
        yield from other.open()
        yield from sums.init({"w": torch.zeros(3)})
        yield from other.init({"w": torch.zeros(3)})
        yield 10.0
        total = yield from sums.pushpull({"w": torch.tensor([1.0, 2.0, 3.0])})
        with pytest.raises(ServerLost, match="Its part of every key is lost"):
            yield from other.pull({"w": torch.zeros(3)})
        return total["w"].tolist()

    cluster = Cluster(2, 1, both, 0, Faults(in_order=True))
    cluster.network.at(2.0, lambda: lose(cluster))
    cluster.run(400)
    assert [client.result for client in cluster.clients.values()] == [[2.0, 4.0, 6.0]] * 2


def test_without_another_server_calls_end_when_the_grace_is_over() -> None:
    job = job_of(1)
    job.store.worker_grace_s = 30.0
    cluster = Cluster(2, 1, lambda rank: train(job, rank), 0, job.faults)
    cluster.network.at(MIDDLE_S, lambda: cluster.network.kill(cluster.servers[0]))
    cluster.run(60)
    for client in cluster.clients.values():
        assert isinstance(client.error, ServerLost)
