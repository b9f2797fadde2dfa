"""A key on several servers, a NaN on one of them: all drop the update, or none, whatever the post does."""

import random

import pytest
import torch

from kvps.core.effects import Note
from kvps.protocol.membership import Probe, Probed
from kvps.protocol.stores import Norms
from kvps.protocol.values import Pulled
from tests.support.server_cluster import COUNT, Cluster, gradient
from tests.support.server_harness import heard, optimizing, refusal

NAN, INF = float("nan"), float("inf")
RULES = ["sgd", "lars", "lamb", None]


def spoiled(rank: int, number: int, *places: int, value: float = NAN) -> torch.Tensor:
    row = gradient(rank, number)
    row[list(places)] = value
    return row


def lines(cluster: Cluster) -> list[str]:
    notes = [note for stage in cluster.stages for note in stage.notes if isinstance(note, Note)]
    return [note.text for note in notes if note.level == "warning"]


def push_everywhere(cluster: Cluster, rank: int, number: int, row: torch.Tensor) -> None:
    for server in range(cluster.servers):
        cluster.push(server, rank, number, row)


# --- equal to one that never got it ---------------------------------------------------------------


@pytest.mark.spec("R102", "R103", "R104")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("at", [0, COUNT // 2, COUNT - 1])
def test_a_round_with_a_nan_on_one_server_changes_none(rule: str | None, at: int) -> None:
    cluster = Cluster(3, rule=rule, on_nonfinite="error")
    other = Cluster(3, rule=rule, on_nonfinite="error")
    for number in range(4):
        for rank in (0, 1):
            is_bad = (number, rank) == (1, 1)
            row = spoiled(rank, number, at) if is_bad else gradient(rank, number)
            push_everywhere(cluster, rank, number, row)
            if number != 1:
                push_everywhere(other, rank, number - (number > 1), gradient(rank, number))
        cluster.deliver_all()
        other.deliver_all()
    assert cluster.versions() == [4, 4, 4]
    assert torch.equal(cluster.values(), other.values())
    assert [stage.span("w").step for stage in cluster.stages] == [0 if rule is None else 3] * 3
    text = "store 'kv': round 1 dropped: 1 value of key 'w' is not finite (from rank 1)"
    assert lines(cluster) == [text] * 3  # also those that have not got it know whose it is


@pytest.mark.spec("R104", "R105")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(10))
def test_drops_agree_whatever_the_network_does(rule: str | None, seed: int) -> None:
    """Letters are lost, doubled and shuffled, and pushes reach the servers in any order."""
    chance = random.Random(seed)
    rounds, bad = 6, {}
    for _ in range(3):
        bad[chance.randrange(6), chance.randrange(2)] = chance.randrange(COUNT)
    quiet = Cluster(3, rule=rule)
    wild = Cluster(3, rule=rule, on_nonfinite="error")
    good = [number for number in range(rounds) if not {(number, 0), (number, 1)} & bad.keys()]
    for index, number in enumerate(good):
        for rank in (0, 1):
            push_everywhere(quiet, rank, index, gradient(rank, number))
        quiet.deliver_all()

    def row(rank: int, number: int) -> torch.Tensor:
        at = bad.get((number, rank))
        return gradient(rank, number) if at is None else spoiled(rank, number, at)

    wild.push_in_any_order(chance, rounds, row)
    assert wild.versions() == [rounds] * 3
    assert torch.equal(wild.values(), quiet.values())
    for stage in wild.stages:
        assert not stage.server.rules.norms.open
        assert stage.server.context.stores["kv"].drops.counts == {"w": rounds - len(good)}


@pytest.mark.spec("R102", "R104", "R105")
@pytest.mark.parametrize("seed", range(10))
def test_pushes_that_are_applied_one_by_one(seed: int) -> None:
    """With sgd without momentum their order means nothing, and there is one result."""
    chance = random.Random(seed)
    cluster = Cluster(3, "async", workers=3, rule=None, on_nonfinite="skip")
    for stage in cluster.stages:
        stage.optimizer("test", rescale_grad=1)
    bad = {(chance.randrange(3), chance.randrange(4)): chance.randrange(COUNT) for _ in range(4)}
    expected = cluster.values().double()
    for server in range(3):
        queues = {rank: list(range(4)) for rank in range(3)}
        while queues:
            rank = chance.choice(list(queues))
            number = queues[rank].pop(0)
            at = bad.get((rank, number))
            row = gradient(rank, number) if at is None else spoiled(rank, number, at)
            cluster.push(server, rank, number, row)
            queues = {rank: left for rank, left in queues.items() if left}
        if chance.random() < 0.5:
            cluster.post.clear()  # all is lost
    for rank in range(3):
        for number in range(4):
            if (rank, number) not in bad:
                expected += gradient(rank, number)
    chance.shuffle(cluster.post)
    cluster.deliver_all()
    for _ in range(3):
        cluster.tick()
        cluster.deliver_all()
    assert cluster.versions() == [12 - len(bad)] * 3
    torch.testing.assert_close(cluster.values().double(), expected, rtol=1e-5, atol=1e-5)


# --- one step at a time -----------------------------------------------------------------------------


@pytest.mark.spec("R104")
def test_a_round_waits_for_word_of_the_others_and_says_so() -> None:
    cluster = Cluster(2, workers=1, rule="sgd", on_nonfinite="skip")
    first = cluster.stages[0]
    before = cluster.values()
    cluster.push(0, 0, 0)
    assert first.pull(0, "w", after=1, seq=50) == []
    (answer,) = heard(first.say(0, Probe((50,))), Probed)
    reason = "key 'w': round 0 waits for word, if it is finite, of other servers"
    assert answer.pending[0].reason == reason
    cluster.push(1, 0, 0)
    assert torch.equal(cluster.values(), before)
    ((_, told), _) = cluster.post
    assert told.message.sums == (0.0,)
    assert len(heard(cluster.deliver_all(), Pulled)) == 1
    assert cluster.versions() == [1, 1]


@pytest.mark.spec("R105")
def test_64_pushes_of_a_rank_may_wait_and_what_was_told_of_them_can_be_had_again() -> None:
    """One server is 64 pushes ahead, and all that it told was lost: it still knows."""
    cluster = Cluster(2, "async", rule="sgd", on_nonfinite="skip")
    rows = [spoiled(0, number, 0) if number % 3 == 0 else gradient(0, number) for number in range(64)]
    for number, row in enumerate(rows):
        cluster.push(1, 0, number, row)
    (piece,) = cluster.stages[1].pieces["w"]
    assert cluster.stages[1].push(0, "w", torch.ones(piece.size), 64) == []  # not one more
    for number, row in enumerate(rows):
        cluster.push(0, 0, number, row)
    for sender, letter in cluster.post:  # only what server 1 said arrives
        if sender == 1:
            cluster.stages[0].other(1, letter.message)
    cluster.post.clear()
    assert cluster.versions() == [64 - 22, 0]
    cluster.tick()
    cluster.deliver_all()
    assert cluster.versions() == [64 - 22] * 2
    assert bool(cluster.values().isfinite().all())


@pytest.mark.parametrize(("first", "then"), [("sgd", "lars"), ("lars", "sgd"), ("lars", "lamb")])
def test_a_rule_that_comes_between_two_servers_measures_changes_nothing_of_that(
    first: str, then: str
) -> None:
    """One server has measured under the old rule, the other will under the new one."""
    for bad in (False, True):
        cluster = Cluster(2, workers=1, rule=first, on_nonfinite="skip")
        before = cluster.values()
        row = spoiled(0, 0, 0) if bad else gradient(0, 0)
        cluster.push(0, 0, 0, row)
        for stage in cluster.stages:
            stage.say(0, optimizing(then, call=2))
        assert cluster.versions() == [0, 0]
        cluster.push(1, 0, 0, row)
        cluster.deliver_all()
        assert cluster.versions() == [1, 1]
        assert torch.equal(cluster.values(), before) is bad
        assert bool(cluster.values().isfinite().all())


@pytest.mark.spec("R108")
def test_norms_of_another_key_of_that_name_are_not_for_this_one() -> None:
    cluster = Cluster(2, workers=1, rule="sgd", on_nonfinite="skip")
    stage = cluster.stages[0]
    cluster.push(1, 0, 0, spoiled(0, 0, COUNT - 1))
    ((_, old),) = cluster.post
    row = torch.zeros(7)
    stage.declare("w", row, call=1, shape=(14,))
    stage.load("w", row, call=1)
    assert stage.other(1, old.message) == []
    assert not stage.server.rules.norms.open
    assert stage.push(0, "w", torch.ones(7), 0)
    assert stage.other(1, old.message) == []
    assert stage.span("w").version == 0
    assert stage.other(1, Norms("kv", "w", None, 0, (0.0,), False, (), 1)) == []
    assert (stage.span("w").version, stage.span("w").step) == (1, 1)


@pytest.mark.spec("R108")
def test_a_key_that_is_replaced_takes_along_what_waits_of_it() -> None:
    cluster = Cluster(2, workers=1, rule="sgd", on_nonfinite="error")
    stage = cluster.stages[0]
    cluster.push(0, 0, 0, spoiled(0, 0, 0))
    assert stage.server.rules.norms.open
    stage.declare("w", torch.zeros(7), call=1, shape=(14,))
    stage.load("w", torch.zeros(7), call=1)
    assert not stage.server.rules.norms.open
    cluster.post.clear()
    cluster.tick()
    assert cluster.post == []


def test_server_without_a_view_sends_norms_later() -> None:
    """There is no way to servers that no view has named."""
    cluster = Cluster(2, workers=1, rule="sgd", on_nonfinite="skip")
    member = cluster.stages[0].server.member
    view, member.view = member.view, None
    server = cluster.stages[0].server
    number = ("kv", "w", None, 0)
    told = server.rules.norms.told(server.context.stores["kv"], number, 1)
    server.rules.norms._say(number, told, 1, reply=True)
    assert server._outbox == []
    member.view = view
    server.rules.norms._say(number, told, 1, reply=True)
    assert len(server._outbox) == 1


def test_a_store_that_drops_takes_counts_of_any_width() -> None:
    cluster = Cluster(2, workers=1, rule="sgd", on_nonfinite="skip")
    stage = cluster.stages[0]
    cluster.push(0, 0, 0)
    assert stage.other(1, Norms("kv", "w", None, 0, (0.0, 1.0, -1.0), False)) == []
    assert stage.span("w").version == 1
    cluster = Cluster(2, workers=1, rule="lars")
    cluster.push(0, 0, 0)
    said = cluster.stages[0].other(1, Norms("kv", "w", None, 0, (0.0, 1.0, 1.0), False))
    assert "Mismatch" in refusal(said)
