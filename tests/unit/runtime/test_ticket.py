"""The end of a call, and the switch interval of the interpreter while calls are in flight."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from kvps.errors import KvpsError, Timeout
from kvps.runtime.threads import waited_tickets
from kvps.runtime.ticket import Handle, ShortTurns, Ticket
from kvps.torch.distributed.ordered_executor import OrderedExecutor
from kvps.torch.distributed.work import Work


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
            threading.Thread(target=lambda: results.append(ticket.wait()), daemon=True) for _ in range(3)
        ]
        for thread in waiting:
            thread.start()
        ticket.end("values", None)
        for thread in waiting:
            thread.join(10.0)
        assert results == ["values"] * 3

    def test_late_waiter_does_not_wait(self) -> None:
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


FRAMES = sys._current_frames


def shown(monkeypatch: pytest.MonkeyPatch, *threads: threading.Thread) -> None:
    """Let this process have no other threads than these."""
    idents = {thread.ident for thread in threads}
    monkeypatch.setattr(
        sys, "_current_frames", lambda: {at: item for at, item in FRAMES().items() if at in idents}
    )


def waited(some: bool) -> list[Ticket]:
    """Return what is waited for, once that is something, or nothing."""
    deadline = time.monotonic() + 30.0
    while bool(found := waited_tickets()) != some and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


class Threads:
    """Threads that end with the test."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.tickets = [Ticket(), Ticket()]
        self.calling = [self.begin(ticket.wait) for ticket in self.tickets]

    def begin(self, work: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        self.gate.set()
        for ticket in self.tickets:
            ticket.end(None, None)


@pytest.fixture
def threads() -> Iterator[Threads]:
    begun = Threads()
    yield begun
    begun.end()


def test_a_script_waits_where_all_its_threads_wait_for_calls(
    monkeypatch: pytest.MonkeyPatch, threads: Threads
) -> None:
    shown(monkeypatch, *threads.calling)
    assert {id(item) for item in waited(some=True)} == {id(ticket) for ticket in threads.tickets}
    busy = threads.begin(threads.gate.wait)
    shown(monkeypatch, *threads.calling, busy)
    assert waited(some=False) == []


def test_a_thread_of_a_pool_that_has_no_work_makes_no_call(
    monkeypatch: pytest.MonkeyPatch, threads: Threads
) -> None:
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    shown(monkeypatch, *threads.calling, *pool._threads)
    assert len(waited(some=True)) == 2
    pool.submit(threads.gate.wait)
    assert waited(some=False) == []
    threads.end()
    pool.shutdown()


def test_a_thread_that_hands_data_on_makes_no_call(monkeypatch: pytest.MonkeyPatch, threads: Threads) -> None:
    def feed() -> None:
        threads.gate.wait()

    monkeypatch.setattr("kvps.runtime.threads.WITHOUT_CALLS", {(__name__, "feed")})
    shown(monkeypatch, *threads.calling, threads.begin(feed))
    assert len(waited(some=True)) == 2


def test_a_thread_that_waits_for_a_collective_waits_for_its_calls(
    monkeypatch: pytest.MonkeyPatch, threads: Threads
) -> None:
    """The first of a track has calls under way; a thread waits for the second."""

    def steps(*tickets: Ticket) -> Iterator[list[Ticket]]:
        yield list(tickets)
        threads.gate.wait()

    executor = OrderedExecutor()
    calls, works = [Ticket(), Ticket()], [Work("first", []), Work("second", [])]
    executor.begin("a", steps(*calls), works[0])
    executor.begin("a", steps(), works[1])
    shown(monkeypatch, threads.begin(works[1].wait), executor._thread)
    assert waited(some=True) == calls
    shown(monkeypatch, threads.begin(lambda: works[1].wait(timedelta(seconds=60))), executor._thread)
    assert waited(some=False) == [], "it goes on by itself"
    shown(monkeypatch, *threads.calling, executor._thread)
    for call in calls:
        call.end(None, None)
    assert waited(some=False) == [], "the next step is made"
    threads.gate.set()
    works[1].wait()
    executor.close()
