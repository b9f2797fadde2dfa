"""The question whether a server that the scheduler has reason to suspect is still there.

Its connection broke: a port that refuses tells that its process has ended, long before its silence does. It
is silent: the kernel of a living host completes connections whatever the process does. So a host that
answered before, and answers none of three, is gone, or is cut off. A process that was stopped is not told
from that until the limit of silence.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any

from kvps import config
from kvps.core.scheduler.handover import Suspect
from kvps.core.scheduler.scheduler import Scheduler
from kvps.net.driver import Inbox

TRY_MAX_S = 1.0
"""How long an answer is waited for; longer than that, silence tells."""
TRIES, TRY_AGAIN_S, LAST_TRY_S = 3, 0.15, 0.3
"""Connections that a silent host may answer, seconds from one to the next, seconds for the last."""
PAUSE_S = 0.01
"""Between two tries: a process that is being killed closes its connections before it closes its port."""


class Suspicions:
    """Looks into suspects, each in a thread of its own, and tells the scheduler of those that are gone."""

    def __init__(self) -> None:
        self._answered: set[str] = set()
        """Endpoints that were reached from here, so that it tells something when they are not."""

    def look_into(self, suspect: Suspect, inbox: Inbox[Any]) -> None:
        """Tell the scheduler, at once, if nobody listens any more where this server did."""

        def run() -> None:
            gone = self.is_gone(suspect.endpoint) if suspect.is_silent else has_ended(suspect.endpoint)
            if gone:
                inbox.put(Scheduler.on_ended, suspect.rank, suspect.incarnation)

        threading.Thread(target=run, name="kvps suspicion", daemon=True).start()

    def is_gone(self, endpoint: str) -> bool:
        """Return whether ``endpoint`` does not answer, though it did before."""
        if answers(endpoint):
            self._answered.add(endpoint)
            return False
        return endpoint in self._answered


def answers(endpoint: str) -> bool:
    """Return whether one of several connections to ``endpoint`` is completed in time."""
    place = config.host_of(endpoint), config.port_of("", endpoint)
    answered = threading.Event()

    def attempt() -> None:
        with suppress(OSError), socket.create_connection(place, TRY_MAX_S):
            answered.set()

    for _ in range(TRIES):  # the packet of one may be lost
        threading.Thread(target=attempt, name="kvps suspicion", daemon=True).start()
        if answered.wait(TRY_AGAIN_S):
            return True
    return answered.wait(LAST_TRY_S)


def has_ended(endpoint: str) -> bool:
    """Return whether connections to ``endpoint`` are refused; False where that is not known."""
    place = config.host_of(endpoint), config.port_of("", endpoint)
    until = time.monotonic() + TRY_MAX_S
    while (left_s := until - time.monotonic()) > 0:
        try:
            with socket.create_connection(place, left_s) as connection:
                if connection.recv(1):  # a living ZeroMQ greets
                    return False
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:
            pass
        except OSError:
            return False
        time.sleep(PAUSE_S)
    return False
