"""The one try whether a server whose connection broke still listens: a port that refuses tells that its
process has ended, long before its silence does.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from kvps import config
from kvps.core.scheduler.job import Suspect
from kvps.core.scheduler.scheduler import Scheduler
from kvps.net.driver import Inbox

TRY_MAX_S = 1.0
"""How long an answer is waited for; longer than that, silence tells."""
PAUSE_S = 0.01
"""Between two tries: a process that is being killed closes its connections before it closes its port."""


def look_into(suspect: Suspect, inbox: Inbox[Any]) -> None:
    """Tell the scheduler, at once, if nobody listens any more where this server did."""

    def run() -> None:
        if has_ended(suspect.endpoint):
            inbox.put(Scheduler.on_ended, suspect.rank, suspect.incarnation)

    threading.Thread(target=run, name="kvps suspicion", daemon=True).start()


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
