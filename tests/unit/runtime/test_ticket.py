"""The end of a call, and the switch interval of the interpreter while calls are in flight."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from kvps.errors import KvpsError, Timeout
from kvps.runtime.ticket import Handle, ShortTurns, Ticket


@pytest.fixture(autouse=True)
def usual() -> Iterator[float]:
    """Begin with CPython's own interval, whatever a test leaves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield 0.005
    sys.setswitchinterval(before)


def test_turns_are_short_while_any_call_is_in_flight(usual: float) -> None:
    turns = ShortTurns(0.0001)
    turns.begin()
    turns.begin()
    assert sys.getswitchinterval() == pytest.approx(0.0001)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(0.0001)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(usual)


@pytest.mark.parametrize("interval_s", [0.0, 0.01])
def test_turns_are_never_made_longer(usual: float, interval_s: float) -> None:
    turns = ShortTurns(interval_s)
    turns.begin()
    assert sys.getswitchinterval() == pytest.approx(usual)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_an_interval_that_the_script_sets_meanwhile_stays() -> None:
    turns = ShortTurns(0.0001)
    turns.begin()
    sys.setswitchinterval(0.001)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(0.001)


def test_a_fork_has_no_call_in_flight(usual: float) -> None:
    turns = ShortTurns(0.0001)
    turns.begin()
    turns.begin()
    turns.forget()
    assert sys.getswitchinterval() == pytest.approx(usual)
    turns.forget()
    turns.begin()
    assert sys.getswitchinterval() == pytest.approx(0.0001)


class TestTicket:
    def test_all_who_wait_go_on_at_the_end(self) -> None:
        ticket, results = Ticket(), list[object]()
        waiting = [
            threading.Thread(target=lambda: results.append(ticket.wait()), daemon=True)
            for _ in range(3)
        ]
        for thread in waiting:
            thread.start()
        ticket.end("values", None)
        for thread in waiting:
            thread.join(10.0)
        assert results == ["values"] * 3

    def test_who_comes_later_does_not_wait(self) -> None:
        ticket = Ticket()
        ticket.copied()
        assert not ticket.is_over
        ticket.wait_copied()
        ticket.end("values", None)
        assert ticket.is_over
        assert [ticket.wait(), ticket.wait()] == ["values", "values"]

    def test_an_end_is_also_that_of_the_copy(self) -> None:
        ticket = Ticket()
        ticket.end(None, Timeout("too late"))
        with pytest.raises(Timeout, match="too late"):
            ticket.wait_copied()
        with pytest.raises(Timeout, match="too late"):
            ticket.wait()

    def test_an_error_after_the_copy_is_told_and_not_raised_by_it(self) -> None:
        ticket, told = Ticket(), list[KvpsError]()
        ticket.on_error(told.append)
        ticket.copied()
        error = Timeout("too late")
        ticket.end(None, error)
        ticket.wait_copied()
        assert told == [error]

    def test_a_second_end_finds_nobody_waiting(self) -> None:
        ticket = Ticket()
        ticket.copied()
        ticket.copied()
        ticket.end(1, None)
        ticket.end(2, None)
        assert ticket.wait() == 2


def test_a_call_of_several_tickets_is_over_with_the_last_of_them() -> None:
    tickets = [Ticket() for _ in range(3)]
    handle, told = Handle(tickets[0], lambda: None, tickets[1:]), list[bool]()
    handle.when_over(lambda: told.append(handle.done()))
    for ticket in tickets:
        assert told == []
        ticket.end(None, None)
    assert told == [True]
