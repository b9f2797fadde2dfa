"""Ordered execution: collectives of one ordering key run one after another.

A collective is a generator that yields the tickets of calls and is resumed when all of them are over.
No key may be in two rounds at once, as the answer to the first might come with the values of the
second; so collectives that use the same keys are on one *track*, and the next begins when the one before
it has ended. Collectives on different tracks pass each other.

Why no rank waits for ever: all ranks call collectives in one order, so a track holds the same ones in the
same order everywhere. The first on a track is under way on every rank that has called it, and waits for
nothing but the ranks that have not.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch

from kvps.runtime.ticket import Ticket
from kvps.torch.distributed.work import Work

Steps = Generator[Sequence[Ticket], None, None]
END_MAX_S = 1.0
"""Seconds that the thread may take to end."""


@dataclass(slots=True, eq=False)
class _Run:
    """One collective on its track."""

    track: str
    steps: Steps
    work: Work
    tickets: Sequence[Ticket] = ()
    waiting: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class OrderedExecutor:
    """Carries the collectives of one process out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, deque[_Run]] = {}
        self._broken: dict[str, BaseException] = {}
        """Why nothing can be begun on a track: its keys were left in the middle of something."""
        self._ready: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvps collectives", daemon=True)
        self._thread.start()

    def begin(self, track: str, steps: Steps, work: Work) -> None:
        """Carry ``steps`` out when all before it on ``track`` are done, and end ``work`` then."""
        run = _Run(track, steps, work)
        with self._lock:
            runs = self._runs.setdefault(track, deque())
            runs.append(run)
            is_first = len(runs) == 1
        if is_first:
            self._go_on(run)

    def close(self) -> None:
        """End the thread after its present step; what is under way stays as it is."""
        self._ready.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(END_MAX_S)

    def _run(self) -> None:
        while (run := self._ready.get()) is not None:
            self._go_on(run)

    def _go_on(self, run: _Run | None) -> None:
        """Make steps until one has to wait; then those of the next collective on the track."""
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
        error: BaseException | None = self._broken.get(run.track)
        while error is None:
            error = next((ticket.error for ticket in run.tickets if ticket.error is not None), None)
            if error is not None:
                break
            try:
                with torch.no_grad():  # results may be parameters
                    run.tickets = next(run.steps)
            except StopIteration:
                run.work.end()
                return True
            except BaseException as raised:  # it must reach whoever waits
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

        def over() -> None:
            with run.lock:
                run.waiting -= 1
                is_last = run.waiting == 0
            if is_last:
                self._ready.put(run)

        for one in run.tickets:
            one.when_over(over)
        return True
