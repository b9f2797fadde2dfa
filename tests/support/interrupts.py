"""Waits of a thread that are cut off: by the limit of its stores, or as by Ctrl-C, which only main threads hear."""

import threading
from typing import Any

import pytest

from kvps.errors import Timeout
from kvps.runtime.ticket import Ticket

WAIT_S = 0.2


class Hurry(threading.local):
    """What cuts off the waits of this thread."""

    kind: type[BaseException] | None = None
    stores: tuple[Any, ...] = ()

    def begin(self, kind: type[BaseException], *stores: Any) -> None:
        """Let each wait of this thread, for one of these stores, end soon by ``kind``."""
        self.kind, self.stores = kind, stores
        for kv in stores if kind is Timeout else ():
            kv._timeout_s = WAIT_S

    def end(self) -> None:
        """Let this thread wait."""
        self.kind = None
        for kv in self.stores:
            kv._timeout_s = 30.0


HURRY = Hurry()


def make_interruptible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let :data:`HURRY` raise KeyboardInterrupt where this thread waits for a call."""
    wait = Ticket._await

    def interrupted(ticket: Ticket, gate: threading.Lock) -> None:
        if HURRY.kind is not KeyboardInterrupt:
            wait(ticket, gate)
        elif gate.acquire(timeout=WAIT_S):
            gate.release()
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(Ticket, "_await", interrupted)
