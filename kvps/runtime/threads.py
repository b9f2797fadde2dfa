"""The threads of this process beside a call: shorter turns while calls are in flight, and which
threads wait for calls."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

from kvps.runtime.ticket import Ticket


class ShortTurns:
    """The interpreter's switch interval while calls are in flight, shorter than usual.

    A thread that waits for the interpreter lock may ask for it only after this interval, 5 ms in
    CPython. The loop waits for it after each system call: so a script that computes in Python
    meanwhile would delay every packet. ``benchmarks/gil.py`` measures that.

    Args:
        interval_s: in seconds; 0 leaves the interval as it is.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._lock = threading.Lock()
        self._open = 0
        self._usual_s = 0.0

    def begin(self) -> None:
        """A call begins; the interval of the script is kept for later, unless it is shorter still."""
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._usual_s = sys.getswitchinterval()
                if 0 < self.interval_s < self._usual_s:
                    sys.setswitchinterval(self.interval_s)

    def end(self) -> None:
        """A call ends; after the last one the script has its own interval again, unless it has set
        another."""
        with self._lock:
            self._open -= 1
            if self._open == 0 and math.isclose(sys.getswitchinterval(), self.interval_s):
                sys.setswitchinterval(self._usual_s)

    def forget(self) -> None:
        """Restore the interval in a child of a fork, where no call is in flight."""
        self._lock = threading.Lock()
        if self._open:
            self._open = 1
            self.end()


TURNS = ShortTurns(0.0)
"""The short turns of this process; sessions set their length."""
os.register_at_fork(after_in_child=TURNS.forget)


WITHOUT_CALLS = {
    ("kvps.runtime.worker_session", "_run"),
    ("kvps.runtime.local_cluster", "run"),
    ("kvps.net.memory_watch", "_run"),
    ("kvps.torch.distributed.call_checker", "_run"),
    ("multiprocessing.queues", "_feed"),
    ("torch.utils.data._utils.pin_memory", "_pin_memory_loop"),
}
"""Functions, by module and name: a thread inside them makes no call by itself."""
POOL = ("concurrent.futures.thread", "_worker")
"""The function in which a thread of a pool waits for work, and from which it calls that work."""


WAITS: dict[CodeType, Callable[[Any], Sequence[Ticket] | None]] = {
    Ticket._await.__code__: lambda ticket: [ticket]
}
"""Methods in which a thread does nothing but wait. The function returns the tickets that the method's
object waits for; None if it waits no more."""


def waited_tickets() -> list[Ticket]:
    """Return the tickets that the threads of this process wait for; none if some thread may do
    something else.

    Nothing is counted while calls are made.
    """
    found: list[Ticket] = []
    for innermost in sys._current_frames().values():
        tickets = _waited_in(innermost)
        if tickets is None:
            return []
        found += tickets
    return found


def _waited_in(innermost: FrameType) -> Sequence[Ticket] | None:
    """Return the tickets that a thread waits for; None if it may do something else."""
    if _name_of(innermost) == POOL:
        return []
    frame: FrameType | None = innermost
    while frame is not None:
        if (tickets := WAITS.get(frame.f_code)) is not None:
            return tickets(frame.f_locals["self"])
        if _name_of(frame) in WITHOUT_CALLS:
            return []
        frame = frame.f_back
    return None


def _name_of(frame: FrameType) -> tuple[str, str]:
    return frame.f_globals.get("__name__", ""), frame.f_code.co_name
