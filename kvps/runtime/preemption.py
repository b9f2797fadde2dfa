"""Preemption: a worker that gets SIGTERM leaves after the round it is in.

SIGTERM ends a process wherever it is; its part of a round is then missing, and the others wait for a
replacement. A process for which :func:`leave_at_sigterm` was called continues instead until it would begin
another round. There its script ends with ``SystemExit(0)``: its pushes are applied, it leaves, and later
rounds close without it. A second SIGTERM ends it wherever it is.

A store begins a round with the first push of a key that has been pushed in the round before; this process
knows that by itself.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable
from types import FrameType

from kvps.errors import ConfigError

log = logging.getLogger("kvps")


class PreemptionFlag:
    """Whether this process was asked to leave."""

    def __init__(self) -> None:
        self.is_handled = False
        """SIGTERM is a request to leave, and does not end the process."""
        self.is_asked = False

    def listen(self) -> None:
        """Take SIGTERM as a request to leave."""
        signal.signal(signal.SIGTERM, self._on_signal)
        self.is_handled = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # who sends it again wants an end at once
        self.is_asked = True


asked = PreemptionFlag()


class RoundTracker:
    """The keys that a store has pushed in its present round; kept where SIGTERM is a request to leave."""

    def __init__(self, store: str, flag: PreemptionFlag) -> None:
        self._store = store
        self._flag = flag
        self._pushed: set[str] = set()

    def push(self, keys: Iterable[str]) -> None:
        """The user is about to push these keys.

        Raises:
            SystemExit: with 0, if this begins a round, and this process was asked to leave.
        """
        if not self._pushed.isdisjoint(keys):
            self._pushed.clear()
        begins = not self._pushed
        is_main = threading.current_thread() is threading.main_thread()  # no other ends the process
        if begins and self._flag.is_asked and is_main:
            log.warning("store %r: got SIGTERM, leaving after the last round", self._store)
            raise SystemExit(0)
        self._pushed.update(keys)


def leave_at_sigterm() -> None:
    """Let this process leave after its present round when it gets SIGTERM; the others continue.

    The script then ends with ``SystemExit(0)`` from the push that would begin the next round, so that
    ``finally`` blocks and exit handlers run. A script that makes no more pushes runs to its end. A second
    SIGTERM ends it at once, as the first would without this call.

    Under kvps-worker and kvps-launch, ``--grace SECONDS`` does this for the command;
    ``KVPS_LEAVE_AT_SIGTERM=1`` does it for a script without a launcher.

    Raises:
        ConfigError: outside the main thread, where Python cannot set signal handlers.

    Example:
        >>> import kvps
        >>> kvps.leave_at_sigterm()  # doctest: +SKIP
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "leave_at_sigterm() was called outside the main thread, where Python cannot set signal "
            "handlers; call it in the main thread, before the first store is created"
        )
    asked.listen()


def leave_if_asked(is_asked: bool) -> None:
    """Follow the environment, unless the script has its own handler of SIGTERM."""
    is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_asked and is_free and threading.current_thread() is threading.main_thread():
        asked.listen()
