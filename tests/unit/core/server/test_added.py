"""Workers that are added, on a server: from when on rounds, clocks and joins wait for them."""

from dataclasses import replace

import pytest

from kvps.protocol.membership import Done, Return
from kvps.protocol.stores import Close, StoreLife
from tests.support.server_harness import Seat, ServerStage, heard, opening, pulled


def staged(mode: str = "sync", policy: str = "wait", **options: object) -> ServerStage:
    """Return a server of a job of 2:3 workers, of which two are there; the third rank is free."""
    stage = ServerStage(3, most=3, greeted=False)
    stage.show(w2="vacant")
    for rank in (0, 1):
        stage.hello(rank)
    stage.open(mode, on_worker_lost=policy, **options)
    stage.optimizer("test")
    stage.init("w", [0.0])
    return stage


def add(stage: ServerStage, rank: int = 2, incarnation: int = 50) -> None:
    stage.seats[rank] = Seat("added", incarnation)
    stage.show()
    stage.hello(rank)


def enter(stage: ServerStage, rank: int = 2) -> None:
    assert heard(stage.say(rank, Return("kv", 0)), Done)


def push(stage: ServerStage, number: int, *ranks: int) -> int:
    """Push a one for each rank; return the version."""
    for rank in ranks:
        stage.push(rank, "w", [1.0], number)
    return stage.span("w").version


@pytest.mark.spec("R572")
def test_rounds_wait_for_an_added_worker_once_it_has_entered() -> None:
    stage = staged()
    assert push(stage, 0, 0, 1) == 1
    add(stage)
    assert push(stage, 1, 0, 1) == 2, "it has not entered"
    push(stage, 2, 0)
    enter(stage)
    assert push(stage, 2, 1) == 2
    assert push(stage, 2, 2) == 3
    assert stage.values("w") == [7.0]
    enter(stage)
    assert push(stage, 3, 0, 1, 2) == 4


@pytest.mark.spec("R572")
def test_worker_of_the_beginning_enters_nothing() -> None:
    stage = staged()
    enter(stage, 1)
    assert stage.server.context.stores["kv"].entered == {}
    assert push(stage, 0, 0, 1) == 1


@pytest.mark.spec("R572")
@pytest.mark.parametrize("state", ["left", "vacant"])
def test_worker_that_left_is_not_missed_and_its_successor_has_to_enter(state: str) -> None:
    stage = staged()
    add(stage)
    enter(stage)
    assert push(stage, 0, 0, 1) == 0
    stage.show(w2=state)
    assert stage.span("w").version == 1
    add(stage, incarnation=60)
    assert push(stage, 1, 0, 1) == 2
    enter(stage)
    assert push(stage, 2, 0, 1) == 2


@pytest.mark.spec("R572")
@pytest.mark.parametrize(("policy", "version"), [("wait", 0), ("fail", 0), ("shrink", 1)])
@pytest.mark.parametrize("rank", [1, 2], ids=["first", "added"])
def test_round_waits_for_a_lost_worker_and_its_successor_as_the_store_says(
    policy: str, version: int, rank: int
) -> None:
    stage = staged(policy=policy)
    add(stage)
    enter(stage)
    here = [other for other in range(3) if other != rank]
    push(stage, 0, *here)
    stage.show(**{f"w{rank}": "lost"})
    assert stage.span("w").version == version
    add(stage, rank, 60)
    assert push(stage, version, *here) == 2 * version, "with shrink, once it has entered"
    enter(stage, rank)
    assert push(stage, 2 * version, rank) == 2 * version + (policy != "shrink")


@pytest.mark.spec("R572")
def test_worker_that_was_lost_before_it_entered_is_not_missed() -> None:
    stage = staged()
    add(stage)
    stage.show(w2="lost")
    assert push(stage, 0, 0, 1) == 1


@pytest.mark.spec("R576")
def test_clocks_begin_at_the_slowest() -> None:
    stage = staged("ssp", staleness=2)
    for rank, pushes in ((0, 6), (1, 5)):
        for number in range(pushes):
            stage.push(rank, "w", [1.0], number)
    add(stage)
    enter(stage)
    stage.push(2, "w", [1.0], 0)
    assert pulled(stage.pull(0, "w", seq=70)) == {70: [12.0]}
    for number in (1, 2):
        stage.push(2, "w", [1.0], number)
    assert stage.pull(2, "w", seq=71) == [], "3 ahead of rank 1, which is at 0"
    assert pulled(stage.push(1, "w", [1.0], 5)) == {71: [15.0]}


@pytest.mark.spec("R576")
def test_without_rounds_pushes_of_an_added_worker_are_counted_anew() -> None:
    stage = staged("async", policy="shrink")
    stage.push(1, "w", [1.0], 0)
    stage.show(w1="left")
    add(stage, 1, 50)
    enter(stage, 1)
    for _ in range(2):
        stage.push(1, "w", [1.0], 0)
        enter(stage, 1)
    assert stage.values("w") == [2.0]


@pytest.mark.spec("R572")
def test_store_ends_without_an_added_worker_that_has_not_entered() -> None:
    stage = staged()
    add(stage)
    for rank in (0, 1):
        stage.say(rank, Close((StoreLife("kv", 0),)))
    said = stage.say(0, replace(opening(), life=1))
    assert heard(said, Done), "its next life begins"
