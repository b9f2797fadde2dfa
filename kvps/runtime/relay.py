"""The door of a subscription: a thread that gives other readers what this one has read."""

from __future__ import annotations

import logging
import threading

from kvps import config
from kvps import protocol as p
from kvps.core.relay import Relay
from kvps.errors import KvpsError
from kvps.net.driver import Inbox, drive
from kvps.net.zap import Keys
from kvps.net.zeromq import ZmqTransport
from kvps.protocol.envelope import Envelope, Role

log = logging.getLogger("kvps")
BEGIN_MAX_S = 0.5
"""Seconds for which a reader waits until its relay knows of a version."""
RANGES_PER_WAKE = 32


class Door:
    """A relay that runs.

    Args:
        host: the address at which other readers reach this process.
        keys: by which it speaks and accepts connections; None to accept any.
        envelope: of its answers.

    Raises:
        ConfigError: if it cannot listen there.
    """

    def __init__(self, host: str, keys: Keys | None, envelope: Envelope) -> None:
        self._transport = ZmqTransport(
            f"tcp://{host}:0", checksums=config.checksums(), role=Role.READER, keys=keys
        )
        self.endpoint = self._transport.endpoint
        self._inbox: Inbox[Relay] = Inbox(self._transport)
        self._relay = Relay(envelope)
        self._thread = threading.Thread(target=self._run, name="kvps-relay", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            drive(self._relay, self._transport, self._inbox)
        except KvpsError as error:
            log.warning("this reader passes nothing on any more: %s", error)
        finally:
            self._transport.close(0.2)

    def begin(self, publication: str, number: int) -> None:
        """A version is about to be read; none if ``number`` is 0.

        The relay knows it when this returns, before anybody can be sent there for it.
        """
        is_known = threading.Event()

        def take(relay: Relay, now: float) -> None:
            relay.on_version(publication, number, now)
            is_known.set()

        if self._thread.is_alive():
            self._inbox.put(take)
            is_known.wait(BEGIN_MAX_S if number else 0.0)

    def add(self, place: p.Read, octets: memoryview) -> None:
        """A range was read. The thread is woken if somebody waits for one, or there are many."""
        if self._thread.is_alive():  # else nobody would take the bytes
            self._inbox.requests.append((Relay.on_range, (place, octets)))
            if self._relay.is_awaited or len(self._inbox.requests) >= RANGES_PER_WAKE:
                self._transport.wake()

    def close(self) -> None:
        """End the thread."""
        if self._thread.is_alive():  # it is not in a process that was forked
            self._inbox.put(Relay.on_end)
            if threading.current_thread() is not self._thread:  # else a finalizer was called there
                self._thread.join(1.0)
