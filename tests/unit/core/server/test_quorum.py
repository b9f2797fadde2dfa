"""Rounds that close at a quorum: after its grace, once for each rank, and late pushes by the store's policy."""

import pytest
import torch

from kvps.core.server.chunks.rounds import GRACE_SHARE
from kvps.protocol.values import Ack, Pulled, PushRows
from tests.support.server_cluster import Cluster, gradient
from tests.support.server_harness import ServerStage, heard, opening, refusal


def stage(
    workers: int = 3, quorum: int = 2, grace_s: float = 5.0, late: str = "drop", **options: object
) -> ServerStage:
    server = ServerStage(workers)
    policy = {"quorum": quorum, "grace_s": grace_s, "late": late, "bundles": False}
    server.open("sync", **policy, **options)
    server.init("w", torch.zeros(2))
    server.optimizer("test", rescale_grad=1.0)
    return server


def push(server: ServerStage, rank: int, number: int, worth: float = 1.0, **more: object) -> list:  # type: ignore[type-arg]
    return server.push(rank, "w", [worth, worth], number, **more)  # type: ignore[arg-type]


def wait(server: ServerStage, seconds: float) -> list:  # type: ignore[type-arg]
    """Let time pass, and the server's timer with it."""
    server.now += seconds
    return server.take(server.server.on_timer(server.now))


# --- when a round closes --------------------------------------------------------------------------------


@pytest.mark.spec("R354")
def test_a_round_closes_at_its_quorum_after_the_grace() -> None:
    server = stage()
    push(server, 0, 0)
    wait(server, 100.0)
    assert server.span("w").version == 0, "one rank is no quorum"
    push(server, 1, 0, 10.0)
    deadline = server.server.deadline()
    assert deadline is not None
    assert deadline <= server.now + 5.0
    wait(server, 4.9)
    assert server.span("w").version == 0
    wait(server, 0.1)
    assert server.span("w").version == 1
    assert server.values("w") == [11.0, 11.0]


@pytest.mark.spec("R354")
def test_without_grace_a_round_closes_at_the_push_that_makes_its_quorum() -> None:
    server = stage(grace_s=0.0)
    push(server, 0, 0)
    said = push(server, 2, 0, pull=True)
    assert server.span("w").version == 1
    assert [message.runs[0].version for message in heard(said, Pulled)] == [1]


@pytest.mark.spec("R355")
def test_the_grace_of_its_own_is_a_quarter_of_the_time_of_the_quorum() -> None:
    server = stage(grace_s=-1.0)
    push(server, 0, 0)
    wait(server, 8.0)
    push(server, 1, 0)  # 8 seconds after the round was opened
    wait(server, 8.0 * GRACE_SHARE - 0.1)
    assert server.span("w").version == 0
    wait(server, 0.1)
    assert server.span("w").version == 1
    wait(server, 30.0)
    push(server, 0, 1)
    wait(server, 10.0)
    push(server, 1, 1)  # 40 seconds after the last round closed
    wait(server, 40.0 * GRACE_SHARE - 0.1)
    assert server.span("w").version == 1
    wait(server, 0.1)
    assert server.span("w").version == 2


def test_the_grace_begins_when_a_round_is_the_oldest() -> None:
    """Two fast ranks are a round ahead: it closes a grace after the one before it."""
    server = stage()
    for number in (0, 1):
        push(server, 0, number)
        push(server, 1, number)
    wait(server, 5.0)
    assert server.span("w").version == 1
    wait(server, 4.9)
    assert server.span("w").version == 1
    wait(server, 0.1)
    assert server.span("w").version == 2


def test_grace_of_a_key_that_was_replaced_ends_without_a_round() -> None:
    server = stage(grace_s=2.0)
    push(server, 0, 0)
    push(server, 1, 0)
    server.declare("w", torch.ones(2, dtype=torch.float64), call=1)
    assert list(server.server.context.chunks.by_number) == [2]
    assert server.server.deadline() is not None
    wait(server, 2.0)
    assert not server.server.rules.is_torn
    server.load("w", torch.ones(2, dtype=torch.float64), call=1)
    assert server.values("w") == [1.0, 1.0]


@pytest.mark.parametrize("rule", ["lars", None])
def test_a_tensor_on_two_servers_closes_by_parts(rule: str | None) -> None:
    """Each part closes by itself, and the norms of the whole tensor are those of its parts."""
    cluster = Cluster(2, rule=rule, quorum=1, grace_s=0.0)
    for server in range(2):
        cluster.push(server, 0, 0, gradient(0, 0))
    cluster.deliver_all()
    assert cluster.versions() == [1, 1]


# --- late pushes --------------------------------------------------------------------------------------


@pytest.mark.spec("R356")
def test_a_late_push_is_dropped() -> None:
    server = stage(grace_s=0.0)
    push(server, 0, 0)
    push(server, 1, 0)
    said = push(server, 2, 0, 100.0, pull=True)
    assert [(stand.version, stand.owed) for stand in heard(said, Pulled)[0].runs] == [(1, 1)]
    assert server.values("w") == [2.0, 2.0]
    assert not server.span("w").rounds


@pytest.mark.spec("R357")
def test_a_late_push_that_is_sent_again_counts_once() -> None:
    server = stage(workers=4, quorum=3, grace_s=0.0, late="next")
    for rank in range(3):
        push(server, rank, 0)
    for _ in range(3):
        assert heard(push(server, 3, 0, 100.0), Ack), "it is acknowledged each time"
    push(server, 0, 1)
    push(server, 1, 1)
    assert server.values("w") == [105.0, 105.0]
    assert server.span("w").version == 2
    push(server, 3, 0, 100.0)
    assert server.values("w") == [105.0, 105.0], "nor later"


@pytest.mark.spec("R357")
def test_a_rank_counts_once_in_a_round_also_if_two_of_its_pushes_are_late() -> None:
    server = stage(grace_s=0.0, late="next")
    for number in range(2):
        push(server, 0, number)
        push(server, 1, number)
    push(server, 2, 0, 10.0)
    push(server, 2, 1, 100.0)
    rounds = server.span("w").rounds
    assert [round_.ranks for round_ in rounds] == [{2}, {2}]
    push(server, 2, 2, 1000.0)  # its number is that of the oldest open round, in which it is
    assert [round_.ranks for round_ in rounds] == [{2}, {2}, {2}]
    assert heard(push(server, 2, 2, 1000.0), Ack)
    for number in range(2, 5):
        push(server, 0, number)
    assert server.span("w").version == 5
    assert server.values("w") == [1117.0, 1117.0]


@pytest.mark.spec("R359")
def test_a_late_push_on_its_way_is_not_overtaken() -> None:
    """Push 1 is lost, and its round closes without it; push 2 waits until push 1 is in."""
    server = stage(grace_s=0.0, late="next")
    push(server, 2, 0, 10.0)
    push(server, 0, 0)
    for number in (1, 2):
        push(server, 0, number)
        push(server, 1, number - 1)
    assert server.span("w").version == 3
    assert not push(server, 2, 2, 1000.0), "not taken in: push 1 is on its way"
    assert heard(push(server, 2, 1, 100.0), Ack)
    assert heard(push(server, 2, 2, 1000.0), Ack)
    push(server, 0, 3)
    push(server, 1, 2)
    assert server.span("w").version == 5
    assert server.values("w") == [1117.0, 1117.0], "four, three and three pushes, each once"


@pytest.mark.spec("R359")
def test_numbers_before_a_push_are_as_many_as_its_runs() -> None:
    server = stage(grace_s=0.0, late="next")
    server.counts_late = False
    said = refusal(push(server, 0, 0))
    assert "ProtocolError: a push of 1 runs with 0 numbers before them" in said


def test_rows_are_refused_where_late_pushes_count() -> None:
    server = stage(grace_s=0.0, late="next")
    server.declare("t", torch.zeros(8), shape=(4, 2))
    server.load("t", torch.zeros(8))
    message = PushRows("kv", "t", 1, (0,), 0, 2, 1)
    said = refusal(server.say(0, message, torch.tensor([1]), torch.ones(2)))
    assert "ConfigError: store 'kv' counts late pushes, which pushes of rows cannot be" in said


# --- options ------------------------------------------------------------------------------------------


@pytest.mark.spec("R358")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"quorum": 4}, "quorum 4 is more than the 3 workers of this job"),
        ({"quorum": 1, "mode": "async"}, "quorum needs a sync store; a store of mode async has no"),
        ({"quorum": 1, "bundles": True}, "bundles wait for all workers of a machine"),
        ({"quorum": 1, "late": "never"}, "late 'never' must be one of drop, next"),
    ],
)
def test_options_that_cannot_be(options: dict[str, object], match: str) -> None:
    server = ServerStage(3)
    said = refusal(server.say(0, opening(**{"mode": "sync", "bundles": False, **options})))  # type: ignore[arg-type]
    assert "ConfigError" in said
    assert match in said
    assert not server.server.context.stores
