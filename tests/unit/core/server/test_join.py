"""Who is away, and until when: the joins of a store, and what a server does with them."""

import pytest
import torch

from kvps.core.server.participation import JoinTracker
from kvps.dtypes import BY_NAME
from kvps.protocol.membership import (
    Done,
    History,
    HistoryIs,
    Join,
    Joined,
    Probe,
    Probed,
    Return,
)
from kvps.protocol.stores import Optimize, Rate
from kvps.protocol.values import Push, Run
from tests.support.server_harness import ServerStage, heard, optimizing, pulled, refusal

FLOAT = BY_NAME["float32"].id


def test_a_join_that_comes_late_or_twice_does_nothing() -> None:
    joins = JoinTracker()
    joins.join(1, 1)
    joins.end(1)
    joins.join(0, 1)
    joins.join(1, 1)
    assert joins.away == frozenset()
    assert joins.last == {1: 1}


# --- on a server ----------------------------------------------------------------------------------


def staged(workers: int = 2, rank: int = 0, mode: str = "sync", **options: object) -> ServerStage:
    stage = ServerStage(workers, servers=2, rank=rank)
    stage.open(mode, **options)
    if mode != "sync":
        stage.optimizer("test")
    stage.init("w", [0.0])
    return stage


@pytest.mark.spec("R102", "R120")
def test_nonfinite_pushes_are_dropped_from_rounds_that_a_join_closes() -> None:
    stage = ServerStage(2, servers=2, rank=1)
    stage.open("sync", on_nonfinite="skip")
    for key in ("a", "b", "c"):
        stage.init(key, [0.0])
    stage.optimizer("test")
    for rank in (0, 1):
        stage.say(rank, Join("kv", 1, False))
    place = stage.pieces["a"][0]
    for number, row in enumerate(([1.0, float("nan"), 1.0], [1.0, 1.0, 1.0])):
        runs = (Run(place.start, 3, number),)  # the keys lie side by side, in one span
        stage.say(0, Push(place.chunk, FLOAT, (0,), 1.0, False, runs), torch.tensor(row))
    stage.say(1, Return("kv", 1))
    assert [stage.span(key).version for key in ("a", "b", "c")] == [2, 2, 2]
    assert [stage.values(key) for key in ("a", "b", "c")] == [[2.0], [1.0], [2.0]]


@pytest.mark.spec("R121")
def test_a_view_may_end_a_join() -> None:
    stage = staged(3)
    stage.say(1, Join("kv", 1, True))
    stage.say(0, Join("kv", 1, True))
    assert heard(stage.show(w2="lost"), Joined) == []
    (answer,) = heard(stage.say(1, Probe((1,))), Probed)
    assert answer.pending[0].reason == "rank 2 (lost) has not joined"
    assert len(heard(stage.show(w2="left"), Joined)) == 2


@pytest.mark.spec("R433")
@pytest.mark.parametrize("server", [0, 1], ids=["judge", "other"])
def test_clocks_start_anew_where_a_join_ends(server: int) -> None:
    stage = staged(mode="ssp", staleness=1, rank=server)
    stage.push(1, "w", [1.0], 0)
    for number in range(6):
        stage.push(0, "w", [1.0], number)
    assert stage.pull(0, "w", seq=50) == []
    stage.say(1, Join("kv", 1, server == 0))
    stage.say(0, Join("kv", 1, server == 0))
    for rank in (0, 1):
        stage.say(rank, Return("kv", 1))
    assert pulled(stage.pull(0, "w", seq=51)) == {51: [7.0]}, "rank 1 owes no push of the last epoch"
    for number in (1, 2):
        stage.push(1, "w", [1.0], number)
    assert stage.pull(1, "w", seq=52) == [], "2 ahead, though it has pushed less in all"
    assert pulled(stage.push(0, "w", [1.0], 6)) == {52: [10.0]}
    stage.say(0, Join("kv", 1, True))
    for number in (3, 4):
        stage.push(1, "w", [1.0], number)
    assert stage.pull(1, "w", seq=53) == [], "a JOIN that is over starts no clock"


# --- who resumes ----------------------------------------------------------------------------------


@pytest.mark.spec("R125")
def test_a_server_tells_what_it_heard() -> None:
    stage = staged()
    empty = heard(stage.say(1, History("kv")), HistoryIs)
    assert empty == [HistoryIs(stage.seqs[1], 0, 0, 0, 0, 0.0, 0, False)]
    stage.optimizer("sgd", call=2, lr=1.0)
    stage.say(0, Rate("kv", 3, True, 0.5, 7))
    for rank in (0, 1):
        stage.say(rank, Join("kv", 1, True))
    stage.say(1, Join("kv", 2, True))
    (full,) = heard(stage.say(1, History("kv")), HistoryIs)
    assert full == HistoryIs(stage.seqs[1], 2, 0, 3, 7, 0.5, 1, True)
    assert not heard(stage.say(0, History("kv")), HistoryIs)[0].joined


@pytest.mark.spec("R126")
def test_so_with_the_optimizer() -> None:
    stage = staged()

    def say(rank: int, lr: float, after: int, call: int = 1) -> list[object]:
        made = optimizing("sgd", call, rank == 0, lr=lr)
        fields = (made.numbers, made.lr_mult, made.wd_mult, after, rank == 1)
        said = stage.say(rank, Optimize("kv", call, rank == 0, "sgd", *fields))
        return list(heard(said, Done))

    assert not say(1, 0.5, 3), "there is none"
    assert len(say(0, 0.5, 3)) == 2
    assert say(1, 0.25, 4)
    assert len(say(0, 0.125, 4, call=2)) == 1


@pytest.mark.spec("R251")
class TestSetter:
    """The rank whose optimizer and learning rate count."""

    def test_rate_that_rank_0_had_set_before_counts(self) -> None:
        stage = staged(3)
        stage.optimizer("sgd", lr=0.5)
        stage.say(0, Rate("kv", 1, True, 0.4))
        stage.say(0, Join("kv", 1, True))
        assert "rank 1 set 0.4" in refusal(stage.say(1, Rate("kv", 1, False, 0.3)))

    def test_where_rank_0_has_left_another_sets(self) -> None:
        stage = staged(3)
        stage.optimizer("sgd", lr=0.5)
        assert stage.say(1, Rate("kv", 1, False, 0.4)) == []
        assert heard(stage.show(w0="left"), Done)
        assert stage.server.context.stores["kv"].sent_rate.value == 0.4
