"""The threads of this process that wait for calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

from kvps.runtime.ticket import Ticket

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
