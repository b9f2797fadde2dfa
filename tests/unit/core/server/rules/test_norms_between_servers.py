"""LARS and LAMB over several servers: three cores and a post office that may lose what it likes."""

import random

import pytest
import torch

from kvps.protocol.membership import Probe, Probed
from kvps.protocol.stores import Norms
from kvps.protocol.values import Pulled
from tests.support.server_cluster import Cluster
from tests.support.server_harness import heard, optimizing, refusal

RULES = ("lars", "lamb")


def trained_alone(rule: str, mode: str, order: list[tuple[int, int]], workers: int = 2):
    cluster = Cluster(1, mode, workers, rule)
    for rank, number in order:
        cluster.push(0, rank, number)
    return cluster.values()


# --- equal to one server ----------------------------------------------------------------------------


@pytest.mark.spec("R66")
@pytest.mark.parametrize("servers", [2, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_tensor_on_several_servers_is_updated_as_on_one(mode: str, rule: str, servers: int) -> None:
    cluster = Cluster(servers, mode, rule=rule)
    order = [(rank, number) for number in range(4) for rank in (0, 1)]
    for rank, number in order:
        for server in range(servers):
            cluster.push(server, rank, number)
        cluster.deliver_all()
    alone = trained_alone(rule, mode, order)
    torch.testing.assert_close(cluster.values(), alone, rtol=1e-6, atol=1e-7)
    assert len(set(cluster.versions())) == 1


@pytest.mark.spec("R66")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(10))
def test_norms_agree_whatever_the_network_does(rule: str, seed: int) -> None:
    """Pushes reach the servers in any order, some early."""
    quiet, wild = Cluster(3, rule=rule), Cluster(3, rule=rule)
    for rank, number in [(rank, number) for number in range(5) for rank in (0, 1)]:
        for server in range(3):
            quiet.push(server, rank, number)
        quiet.deliver_all()
    wild.push_in_any_order(random.Random(seed), 5, lambda rank, number: None)
    assert wild.versions() == [5, 5, 5]
    assert torch.equal(wild.values(), quiet.values())
    assert not any(stage.server.rules.norms.open for stage in wild.stages)


@pytest.mark.spec("R66")
@pytest.mark.parametrize("seed", range(10))
def test_servers_that_see_pushes_in_different_orders_never_wait_for_each_other(seed: int) -> None:
    cluster = Cluster(3, "async", workers=3, rule="lars")
    chance = random.Random(seed)
    for server in range(3):
        queues = {rank: list(range(4)) for rank in range(3)}
        while queues:
            rank = chance.choice(list(queues))
            cluster.push(server, rank, queues[rank].pop(0))
            queues = {rank: left for rank, left in queues.items() if left}
        if chance.random() < 0.5:
            cluster.post.clear()  # all is lost
    chance.shuffle(cluster.post)
    cluster.deliver_all()
    for _ in range(3):
        cluster.tick()
        cluster.deliver_all()
    assert cluster.versions() == [12, 12, 12]
    assert bool(cluster.values().isfinite().all())


# --- one step at a time -----------------------------------------------------------------------------


def test_a_round_waits_for_the_norms_of_the_others_and_says_so() -> None:
    cluster = Cluster(2, workers=1)
    first, second = cluster.stages
    cluster.push(0, 0, 0)
    assert first.pull(0, "w", after=1, seq=50) == []
    (answer,) = heard(first.say(0, Probe((50,))), Probed)
    assert answer.pending[0].reason == "key 'w': round 0 waits for the norms of other servers"
    assert answer.for_workers == ()
    cluster.push(1, 0, 0)
    assert second.pull(0, "w", after=1, seq=50) == []
    said = cluster.deliver_all()
    assert len(heard(said, Pulled)) == 2


def test_rounds_that_queue_up_are_applied_one_by_one() -> None:
    """And who waits for a version gets this one, though the next is complete already."""
    cluster = Cluster(2, workers=1)
    first = cluster.stages[0]
    for number in range(3):
        cluster.push(0, 0, number)
        first.pull(0, "w", after=number + 1, seq=50 + number)
    cluster.post.clear()
    for number in range(3):
        cluster.push(1, 0, number)
        said = cluster.deliver_all()
        cluster.tick()
        said += cluster.deliver_all()
        answers = [request for request in heard(said, Pulled) if request.seq >= 50]
        assert [(answer.seq, answer.runs[0].version) for answer in answers] == [(50 + number, number + 1)]


def test_norms_of_what_is_not_there() -> None:
    cluster = Cluster(2)
    stage = cluster.stages[0]
    before = stage.snapshot()
    ask = ("kv", "w", None, 0, (1.0, 2.0), False)
    for index, wrong, says in (
        (0, "other", "ProtocolError: server 0: store 'other' was not opened"),
        (1, "v", "KeyNotFound: server 0 holds no part of 'v'"),
        (2, 1, "ProtocolError: store 'kv' is sync"),
    ):
        fields = [*ask]
        fields[index] = wrong
        assert says in refusal(stage.other(1, Norms(*fields)))  # type: ignore[arg-type]
    for number in (64, 2**62):  # so far ahead that it will have to be told again
        assert stage.other(1, Norms("kv", "w", None, number, (1.0, 2.0), True)) == []
    assert stage.snapshot() == before
    stage.declare("nothing", torch.zeros(0), shape=(0,))
    assert "KeyNotFound" in refusal(stage.other(1, Norms("kv", "nothing", None, 0, (), True)))


def test_sums_that_do_not_fit_change_nothing() -> None:
    cluster = Cluster(2, workers=1)
    cluster.push(0, 0, 0)
    stage = cluster.stages[0]
    before = stage.snapshot()
    said = stage.other(1, Norms("kv", "w", None, 0, (1.0,), False))
    assert "Mismatch: key 'w': server 1 sent 1 sums of squares, expected 2" in refusal(said)
    assert stage.snapshot() == before


def test_forgotten_or_unmeasured_norms_count_as_nothing() -> None:
    """A rank far ahead on one server, and a change of the rule, must not stop the other one."""
    cluster = Cluster(2, "async")
    stage = cluster.stages[0]
    stage.say(0, optimizing("test", call=2))
    cluster.push(0, 0, 0)
    assert cluster.post == []
    cluster.push(1, 0, 0)
    cluster.deliver_all()
    assert cluster.versions() == [1, 1]


# --- changes on the way -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_another_rule_does_not_wait_for_the_norms_of_the_old_one(mode: str) -> None:
    cluster = Cluster(2, mode, workers=1)
    stage = cluster.stages[0]
    for number in (0, 1):
        cluster.push(0, 0, number)
    stage.pull(0, "w", after=1, seq=50)
    stage.pull(0, "w", after=2, seq=51)
    assert cluster.versions() == [0, 0]
    said = stage.say(0, optimizing("sgd", call=2))
    assert [item.runs[0].version for item in heard(said, Pulled)] == [1, 2]
    assert not stage.server.rules.norms.open
    cluster.deliver_all()
    cluster.push(0, 0, 2)
    assert cluster.versions() == [3, 0]


def test_the_memory_of_norms_is_bounded() -> None:
    cluster = Cluster(2, workers=1)
    for number in range(70):
        for server in (0, 1):
            cluster.push(server, 0, number)
        cluster.deliver_all()
    for stage in cluster.stages:
        norms = stage.server.rules.norms
        assert (len(norms.open), len(norms.closed)) == (0, 64)
    assert cluster.versions() == [70, 70]
