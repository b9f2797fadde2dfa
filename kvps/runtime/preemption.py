"""Preemption: a worker that gets SIGTERM leaves after the round it is in.

SIGTERM ends a process wherever it is; its part of a round is then missing, and the others wait for a
replacement. A process for which :func:`leave_at_sigterm` was called goes on instead until it would
begin another round. There its script ends by ``SystemExit(0)``: what it pushed is taken in, it leaves,
and rounds close without it from then on. The second SIGTERM ends it wherever it is.

A store begins a round with the first push of a key that has been pushed in the round before; that is
known here, without a question to anybody.
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
        self.is_heeded = False
        """SIGTERM asks, and does not end."""
        self.is_asked = False

    def listen(self) -> None:
        """Take SIGTERM for the wish that this process leaves."""
        signal.signal(signal.SIGTERM, self._on_signal)
        self.is_heeded = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # who sends it again wants an end at once
        self.is_asked = True


asked = PreemptionFlag()


class RoundTracker:
    """Which keys a store has pushed in the round that its user is in."""

    def __init__(self, store: str, wish: PreemptionFlag = asked) -> None:
        self._store = store
        self._wish = wish
        self._pushed: set[str] = set()

    def push(self, keys: Iterable[str]) -> None:
        """The user is about to push these keys.

        Raises:
            SystemExit: with 0, if that begins a round, and this process was asked to leave.
        """
        if not self._wish.is_heeded:
            return
        if not self._pushed.isdisjoint(keys):
            self._pushed.clear()
        begins = not self._pushed
        is_main = threading.current_thread() is threading.main_thread()  # no other ends the process
        if begins and self._wish.is_asked and is_main:
            log.warning("store %r: got SIGTERM, leaving after the last round", self._store)
            raise SystemExit(0)
        self._pushed.update(keys)


def leave_at_sigterm() -> None:
    """Have this process leave at SIGTERM behind the round that it is in, and the others go on.

    The script then ends with ``SystemExit(0)`` from the push that would begin the next round, so that
    ``finally`` blocks and exit handlers run. A script that pushes no more goes on to its end. A second
    SIGTERM ends it at once, as the first would have without this.

    Under kvps-worker and kvps-launch, ``--grace SECONDS`` does this for the command;
    ``KVPS_LEAVE_AT_SIGTERM=1`` does it for a script that runs by itself.

    Raises:
        ConfigError: in another thread than the main one, where Python sets no signal handlers.

    Example:
        >>> import kvps
        >>> kvps.leave_at_sigterm()  # doctest: +SKIP
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "leave_at_sigterm() was called outside the main thread, where Python cannot set "
            "signal handlers; call "
            "it in the main thread, before the first store is created"
        )
    asked.listen()


def leave_if_wished(wished: bool) -> None:
    """Do as the environment has it, unless the script has its own way with SIGTERM."""
    is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if wished and is_free and threading.current_thread() is threading.main_thread():
        asked.listen()
