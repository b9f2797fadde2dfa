"""When which step of a collective is made."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvps.errors import ConfigError, Mismatch, WorkerLost
from kvps.runtime.ticket import Ticket
from kvps.torch.distributed.ordered_executor import OrderedExecutor, Steps
from kvps.torch.distributed.process_group import ProcessGroup
from kvps.torch.distributed.work import Work


@pytest.fixture
def tracks() -> Iterator[OrderedExecutor]:
    ordered_executor = OrderedExecutor()
    yield ordered_executor
    ordered_executor.close()
    ordered_executor._thread.join(30.0)
    assert not ordered_executor._thread.is_alive()


def steps(log: list[str], name: str, *tickets: list[Ticket]) -> Steps:
    log.append(f"{name} begins")
    for some in tickets:
        yield some
        log.append(f"{name} goes on")


def test_a_collective_goes_on_when_all_its_calls_are_over(tracks: OrderedExecutor) -> None:
    log: list[str] = []
    first, second, third = Ticket(), Ticket(), Ticket()
    work = Work("one", [])
    tracks.begin("a", steps(log, "one", [first, second], [third]), work)
    assert log == ["one begins"], "at once, in the caller's thread"
    first.end(None, None)
    assert log == ["one begins"]
    third.end(None, None)
    second.end(None, None)
    work.wait()
    assert log == ["one begins", "one goes on", "one goes on"]


def test_steps_without_a_wait_run_at_once(tracks: OrderedExecutor) -> None:
    log: list[str] = []
    over = Ticket()
    over.end(None, None)
    work = Work("one", [])
    tracks.begin("a", steps(log, "one", [], [over], []), work)
    assert work.is_completed()
    assert log == ["one begins", *["one goes on"] * 3]


def test_steps_of_a_track_follow_each_other_and_others_pass(tracks: OrderedExecutor) -> None:
    log: list[str] = []
    tickets = [Ticket() for _ in range(3)]
    works = [Work(name, []) for name in "abc"]
    tracks.begin("x", steps(log, "a", [tickets[0]]), works[0])
    tracks.begin("x", steps(log, "b", [tickets[1]]), works[1])
    tracks.begin("y", steps(log, "c", [tickets[2]]), works[2])
    assert log == ["a begins", "c begins"]
    tickets[1].end(None, None)
    tickets[2].end(None, None)
    works[2].wait()
    assert not works[1].is_completed()
    tickets[0].end(None, None)
    works[1].wait()
    assert log[-4:] == ["c goes on", "a goes on", "b begins", "b goes on"]


def test_a_failure_ends_all_that_follows_on_its_track_and_nothing_else(tracks: OrderedExecutor) -> None:
    log: list[str] = []
    ticket, other = Ticket(), Ticket()
    works = [Work(name, []) for name in "abcd"]
    tracks.begin("x", steps(log, "a", [ticket, other]), works[0])
    tracks.begin("x", steps(log, "b"), works[1])
    ticket.end(None, WorkerLost("worker 2"))
    other.end(None, None)
    for work in works[:2]:
        with pytest.raises(WorkerLost, match="worker 2"):
            work.wait()
    tracks.begin("x", steps(log, "c"), works[2])
    with pytest.raises(WorkerLost, match="worker 2"):
        works[2].wait()
    tracks.begin("y", steps(log, "d"), works[3])
    assert works[3].wait()
    assert log == ["a begins", "d begins"]


def test_error_of_a_step_is_the_error_of_the_work(tracks: OrderedExecutor) -> None:
    def refused() -> Steps:
        yield []
        raise ConfigError("no")

    work = Work("one", [])
    tracks.begin("x", refused(), work)
    with pytest.raises(ConfigError, match="no"):
        work.wait()


def test_steps_are_made_where_parameters_may_be_written_to(tracks: OrderedExecutor) -> None:
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))

    def write() -> Steps:
        yield []
        parameter.copy_(torch.ones(1))

    work = Work("one", [])
    tracks.begin("x", write(), work)
    assert work.wait()


def test_a_work_ends_with_what_its_steps_returned_and_its_track_does_not_wait(
    tracks: OrderedExecutor,
) -> None:
    ticket, over = Ticket(), Ticket()
    over.end(None, None)

    def told(*tickets: Ticket) -> Steps:
        yield []
        return tickets

    first, second, third = Work("one", []), Work("two", []), Work("three", [])
    tracks.begin("x", told(ticket, over), first, "g")
    tracks.begin("x", told(over), second, "g")
    assert second.is_completed()
    assert tracks.waiting() == {"x", "g"}
    assert not first.is_completed()
    ticket.end(None, None)
    assert first.is_success()
    assert tracks.waiting() == set()
    lost = Ticket()
    tracks.begin("x", told(lost), third)
    lost.end(None, WorkerLost("worker 2"))
    assert isinstance(third.exception(), WorkerLost)


def test_a_group_that_fails_ends_all_its_works_and_no_others(tracks: OrderedExecutor) -> None:
    log: list[str] = []
    tickets = [Ticket() for _ in range(4)]

    def told(*tickets: Ticket) -> Steps:
        yield []
        return tickets

    waits, queued, beside, other = (Work(name, []) for name in "abcd")
    tracks.begin("x", steps(log, "a", [tickets[0]]), waits, "g")
    tracks.begin("x", steps(log, "b", [tickets[1]]), queued, "g")
    tracks.begin("y", told(tickets[2]), beside, "g")
    tracks.begin("z", steps(log, "d", [tickets[3]]), other, "h")
    error = Mismatch("they differ")
    tracks.fail("g", error)
    tracks.fail("g", Mismatch("told twice"))
    for work in (waits, queued, beside):
        with pytest.raises(Mismatch, match="they differ"):
            work.wait()
    assert tracks.waiting() == {"z", "h"}
    for ticket in tickets:
        ticket.end(None, None)
    other.wait()
    assert log == ["a begins", "d begins", "d goes on"], "b was never begun"
    late = Work("late", [])
    tracks.begin("w", steps(log, "late"), late, "g")
    assert late.exception() is error


def test_aborted_group_ends_its_calls_before_its_stores_do(tracks: OrderedExecutor) -> None:
    ticket, work = Ticket(), Work("one", [])
    group = ProcessGroup("g", 0, 2, lambda: ticket.end(None, ConfigError("the store was closed")))
    members: Any = SimpleNamespace(ranks=(0, 1), name="g", rank=0)
    checker: Any = SimpleNamespace(calls=lambda *_: None)
    group.enter(members, tracks, checker)
    tracks.begin("x", steps([], "a", [ticket]), work, "g")
    group.abort()
    with pytest.raises(ConfigError, match="process group 'g' was destroyed"):
        work.wait()


def test_steps_under_way_fail_at_the_end_and_none_begin_after_it() -> None:
    tracks = OrderedExecutor()
    log: list[str] = []
    first, second, beside = Work("one", []), Work("two", []), Work("three", [])

    def told() -> Steps:
        yield []
        return [Ticket()]

    tracks.begin("x", steps(log, "a", [Ticket()]), first, "g")
    tracks.begin("x", steps(log, "b"), second, "g")
    tracks.begin("y", told(), beside, "g")
    tracks.close()
    for work in (first, second, beside):
        with pytest.raises(ConfigError, match="process group 'g' was destroyed"):
            work.wait()
    with pytest.raises(ConfigError, match="use the new group"):
        tracks.begin("z", steps(log, "c"), Work("four", []), "g")
    assert log == ["a begins"]
