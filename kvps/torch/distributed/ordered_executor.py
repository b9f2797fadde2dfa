"""Ordered execution: collectives of one ordering key run one after another.

A collective is a generator that yields the tickets of calls and is resumed when all of them are over.
No key may be in two rounds at once, as the answer to the first might come with the values of the
second; so collectives that use the same keys are on one *track*, and the next begins when the one before
it has ended. Collectives on different tracks pass each other.

A collective may have calls that its track need not wait for, such as the news that a value was
read. Its generator returns their tickets, and the work ends with them.

Why no rank waits for ever: all ranks call collectives in one order, so a track holds the same ones in the
same order everywhere. The first on a track is under way on every rank that has called it, and waits for
nothing but the ranks that have not.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DisableTorchFunction

from kvps.errors import ConfigError
from kvps.runtime.threads import WAITS
from kvps.runtime.ticket import Ticket
from kvps.torch.distributed.work import Work

Steps = Generator[Sequence[Ticket], None, Any]
"""Each list of tickets is waited for on the track. A list that is returned is waited for beside it."""
END_MAX_S = 1.0
"""Seconds that the thread may take to end."""


@dataclass(slots=True, eq=False)
class _Run:
    """One collective on its track."""

    group: str
    track: str
    steps: Steps
    work: Work
    tickets: Sequence[Ticket] = ()
    waiting: int = 0
    failure: BaseException | None = None
    """Why it does not wait any more for its tickets."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class OrderedExecutor:
    """Carries the collectives of one process out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, deque[_Run]] = {}
        self._broken: dict[str, BaseException] = {}
        """Why nothing can be begun on a track: its keys were left in the middle of something."""
        self._failed: dict[str, BaseException] = {}
        """Why nothing can be begun in a group."""
        self._confirmed: set[_Run] = set()
        """Collectives that have left their tracks, and wait for the tickets that their steps returned."""
        self._is_closed = False
        self._ready: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvps collectives", daemon=True)
        self._thread.start()

    def begin(self, track: str, steps: Steps, work: Work, group: str = "") -> None:
        """Carry ``steps`` out when all before it on ``track`` are done, and end ``work`` then.

        Raises:
            ConfigError: after :meth:`close`.
        """
        if self._is_closed:
            steps.close()
            raise _destroyed(group)
        run = _Run(group, track, steps, work)
        with self._lock:
            runs = self._runs.setdefault(track, deque())
            runs.append(run)
            is_first = len(runs) == 1
        if is_first:
            self._go_on(run)

    def waiting(self) -> set[str]:
        """Return the groups, and the tracks, that have collectives under way."""
        runs = self._under_way()
        return {run.group for run in runs} | {run.track for run in runs}

    def tickets(self) -> list[Ticket]:
        """Return the tickets of calls that collectives wait for."""
        return [ticket for run in self._under_way() for ticket in run.tickets]

    def _under_way(self) -> list[_Run]:
        with self._lock:
            return [runs[0] for runs in self._runs.values()] + list(self._confirmed)

    def fail(self, group: str, error: BaseException) -> None:
        """End the collectives that wait in a group, and refuse later ones."""
        error = self._failed.setdefault(group, error)
        with self._lock:
            firsts = [runs[0] for runs in self._runs.values() if runs[0].group == group]
            beside = [run for run in self._confirmed if run.group == group]
        for run in firsts:
            with run.lock:
                is_waiting, run.failure = run.waiting > 0, error
                run.waiting = 0
            if is_waiting:
                self._ready.put(run)
        for run in beside:
            run.failure = error
            self._end_confirmed(run)

    def abort(self, group: str) -> None:
        """End the collectives of a group, as if it were destroyed."""
        self.fail(group, _destroyed(group))

    def close(self) -> None:
        """End the thread after its present step; fail collectives in flight, and refuse later ones."""
        self._is_closed = True
        self._ready.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(END_MAX_S)
        with self._lock:
            runs = [run for runs in self._runs.values() for run in runs] + list(self._confirmed)
        for run in runs:
            if not run.work.is_completed():
                run.work.end(_destroyed(run.group))

    def _run(self) -> None:
        while (run := self._next()) is not None:
            self._go_on(run)

    def _next(self) -> _Run | None:
        """Wait until a collective can go on; return it."""
        return self._ready.get()

    def _go_on(self, run: _Run | None) -> None:
        """Make steps until one has to wait; then the steps of the next collective on the track."""
        while run is not None:
            if not self._step(run):
                return
            with self._lock:
                runs = self._runs[run.track]
                runs.popleft()
                if not runs:
                    del self._runs[run.track]
                run = runs[0] if runs else None

    def _step(self, run: _Run) -> bool:
        """Go on as far as can be; return whether the collective is over."""
        error: BaseException | None = self._failed.get(run.group) or self._broken.get(run.track)
        while error is None:
            error = run.failure or _error_of(run.tickets)
            if error is not None:
                break
            try:
                with torch.no_grad(), DisableTorchFunction():  # results may be parameters
                    run.tickets = next(run.steps)
            except StopIteration as stop:
                self._confirm(run, stop.value or ())
                return True
            except BaseException as raised:  # it must reach the thread that waits
                error = raised
                break
            if self._must_wait(run):
                return False
        self._broken.setdefault(run.track, error)
        run.steps.close()
        run.work.end(error)
        return True

    def _must_wait(self, run: _Run) -> bool:
        """Have ``run`` go on when its tickets are over; return False if they are already."""
        if all(ticket.is_over for ticket in run.tickets):
            return False
        run.waiting = len(run.tickets)
        self._when_over(run, lambda: self._ready.put(run))
        return True

    def _confirm(self, run: _Run, tickets: Sequence[Ticket]) -> None:
        """End the work of ``run``, whose steps are done, when ``tickets`` are over."""
        run.tickets = tickets
        if all(ticket.is_over for ticket in tickets):
            run.work.end(_error_of(tickets))
            return
        run.waiting = len(tickets)
        with self._lock:
            self._confirmed.add(run)
        self._when_over(run, lambda: self._end_confirmed(run))

    def _end_confirmed(self, run: _Run) -> None:
        with self._lock:
            if run not in self._confirmed:
                return
            self._confirmed.discard(run)
        run.work.end(run.failure or _error_of(run.tickets))

    def _when_over(self, run: _Run, then: Callable[[], None]) -> None:
        """Call ``then`` when the last ticket of ``run`` is over, unless it is failed before."""

        def over() -> None:
            with run.lock:
                run.waiting -= 1
                is_last = run.waiting == 0
            if is_last:
                then()

        for ticket in run.tickets:
            ticket.when_over(over)


WAITS[OrderedExecutor._next.__code__] = OrderedExecutor.tickets


def _destroyed(group: str) -> ConfigError:
    return ConfigError(
        f"process group {group!r} was destroyed, and takes no more calls. If it was created again, use the "
        "new group: a default argument such as group=dist.group.WORLD keeps the old one"
    )


def _error_of(tickets: Sequence[Ticket]) -> BaseException | None:
    return next((ticket.error for ticket in tickets if ticket.error is not None), None)
