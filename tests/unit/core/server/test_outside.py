"""A replacement, on a server that goes on without lost workers: from when on rounds and clocks wait for it."""

from collections.abc import Callable

import pytest
import torch

from kvps.protocol.membership import Done, History, HistoryIs, Return
from kvps.protocol.stores import Close, Closed, StoreLife
from kvps.protocol.values import PushRows
from tests.support.server_harness import ServerStage, heard, opening, pulled


def staged(mode: str = "sync", policy: str = "shrink", **options: object) -> ServerStage:
    stage = ServerStage(2)
    stage.open(mode, on_worker_lost=policy, **options)
    stage.optimizer("test")
    stage.init("w", [0.0])
    stage.init("v", [0.0])
    return stage


def push(stage: ServerStage, number: int, *ranks: int) -> int:
    """Push a one for each rank; return the version."""
    for rank in ranks:
        stage.push(rank, "w", [1.0], number)
    return stage.span("w").version


ENTRIES: dict[str, Callable[[ServerStage], object]] = {
    "a question": lambda stage: stage.pull(1, "w", values=False),
    "a push that was counted before": lambda stage: stage.push(1, "w", [1.0], 0),
    "a push of another key": lambda stage: stage.push(1, "v", [1.0], 0),
    "a push of rows": lambda stage: stage.say(
        1, PushRows("kv", "w", 1, (1,), 0, 1, 1), torch.zeros(1, dtype=torch.int64), torch.ones(1)
    ),
    "its predecessor's history": lambda stage: heard(stage.say(1, History("kv")), HistoryIs),
    "a return": lambda stage: heard(stage.say(1, Return("kv", 0)), Done),
}


@pytest.mark.spec("R578")
@pytest.mark.parametrize("entry", ENTRIES)
def test_rounds_wait_for_a_replacement_once_it_has_entered(entry: str) -> None:
    stage = staged()
    assert push(stage, 0, 0, 1) == 1
    push(stage, 1, 0)
    stage.replace(1)
    assert stage.span("w").version == 2, "the replacement has not entered"
    assert pulled(stage.pull(1, "w", seq=60)) == {60: [3.0]}
    assert push(stage, 2, 0) == 3, "it has read only"
    ENTRIES[entry](stage)
    assert push(stage, 3, 0) == 3
    assert push(stage, 3, 1) == 4
    assert stage.values("w") == [6.0]


@pytest.mark.spec("R578")
def test_replacement_is_outside_again_if_it_dies_and_from_a_store_that_was_made_meanwhile() -> None:
    stage = staged()
    push(stage, 0, 0, 1)
    stage.show(w1="lost")
    stage.say(0, opening(store="new", on_worker_lost="shrink"))
    stage.replace(1)
    assert stage.server.context.outside == {"kv": {1}, "new": {1}}
    push(stage, 1, 1)
    assert stage.server.context.outside == {"new": {1}}
    assert push(stage, 1, 0) == 2
    stage.replace(1)
    assert push(stage, 2, 0) == 3
    stage.replace(0)
    assert stage.server.context.outside["kv"] == {0, 1}
    assert push(stage, 3, 1) == 4, "the first that comes goes on alone"


@pytest.mark.spec("R578")
def test_pushes_of_its_predecessor_stand() -> None:
    stage = staged()
    push(stage, 0, 1)
    stage.replace(1)
    assert stage.span("w").version == 0
    assert push(stage, 0, 0) == 1
    assert stage.values("w") == [2.0]
    assert push(stage, 1, 0) == 2


@pytest.mark.spec("R578")
@pytest.mark.parametrize("policy", ["wait", "fail"])
def test_stores_that_wait_for_lost_workers_wait_for_replacements(policy: str) -> None:
    stage = staged(policy=policy)
    stage.replace(1)
    assert stage.server.context.outside == {}
    assert push(stage, 0, 0) == 0


@pytest.mark.spec("R578")
def test_process_that_was_replaced_before_it_had_come_is_waited_for() -> None:
    """The job was forming: nobody has trained."""
    stage = ServerStage(2, greeted=False)
    stage.hello(0)
    stage.open(on_worker_lost="shrink")
    stage.optimizer("test")
    stage.init("w", [0.0])
    stage.replace(1)
    assert stage.server.context.outside == {}
    assert push(stage, 0, 0) == 0
    assert push(stage, 0, 1) == 1


@pytest.mark.spec("R578")
def test_clock_of_a_replacement_begins_as_it_enters() -> None:
    stage = staged("ssp", staleness=1)
    for number in range(2):
        push(stage, number, 0, 1)
    stage.replace(1)
    for number in range(2, 6):
        push(stage, number, 0)
        assert pulled(stage.pull(0, "w", seq=70 + number)), "no clock waits for the replacement"
    push(stage, 2, 1)
    push(stage, 6, 0)
    assert pulled(stage.pull(0, "w", seq=80)) == {80: [10.0]}
    push(stage, 7, 0)
    push(stage, 8, 0)
    assert pulled(stage.pull(0, "w", seq=81)) == {}
    assert pulled(stage.push(1, "w", [1.0], 3)) == {81: [13.0]}


@pytest.mark.spec("R578")
def test_store_that_ends_is_forgotten() -> None:
    stage = staged()
    stage.replace(1)
    assert stage.server.context.outside == {"kv": {1}}
    for rank in (0, 1):
        assert heard(stage.say(rank, Close((StoreLife("kv", 0),))), Closed)
    stage.say(0, opening(store="kv", on_worker_lost="shrink", life=1))
    assert stage.server.context.outside == {}
