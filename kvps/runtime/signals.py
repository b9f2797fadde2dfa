"""Signals as exceptions, raised wherever the command is, so that it cleans up.

Python drops what is raised in some places: a destructor, a callback of the garbage collector, an import
lock. An exception that came there is raised again a moment later.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TypeAlias

AGAIN_S = 0.05
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None


def handle(number: int, handler: Handler) -> Handler:
    """Install a handler, unless the process was started with the signal ignored; return the one before.

    nohup, and ``trap '' INT`` in a shell, start a process so: the signal is not meant for it.
    """
    before = signal.getsignal(number)
    if before is not signal.SIG_IGN:
        signal.signal(number, handler)
    return before


class Stopped(SystemExit):
    """A signal came; the exit code is 128 and its number."""


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Within the block, the first signal of ``NUMBERS`` raises :class:`Stopped`, and later ones nothing.

    One that was ignored before stays so.

    Call it in the main thread.
    """
    was_dropped = sys.unraisablehook

    def on_dropped(dropped: sys.UnraisableHookArgs) -> None:
        if not isinstance(dropped.exc_value, Stopped):
            was_dropped(dropped)
            return
        code = dropped.exc_value.code
        signal.signal(signal.SIGALRM, lambda *_: _stop(code))
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)  # not here: it would be dropped again

    def on_signal(number: int, frame: object) -> NoReturn:
        for stop_signal in NUMBERS:
            signal.signal(stop_signal, signal.SIG_IGN)
        _stop(128 + number)

    before = {number: handle(number, on_signal) for number in NUMBERS}
    sys.unraisablehook = on_dropped
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        sys.unraisablehook = was_dropped
        for to_handle, handler in before.items():
            signal.signal(to_handle, handler)


def _stop(code: object) -> NoReturn:
    raise Stopped(code)
