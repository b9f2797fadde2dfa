"""The transports of a server and a worker, which a test lets take turns in one thread."""

from __future__ import annotations

import os
from typing import Any

from kvps.core.effects import Connect
from kvps.net.zap import Keys
from kvps.net.zeromq import ZmqTransport
from kvps.protocol.envelope import Envelope, Packet, Role
from kvps.protocol.membership import Probe
from kvps.protocol.values import Pulled, Stand
from tests.integration.processes import until

JOB = bytes(range(16))
WORKER = Envelope(JOB, 0, Role.WORKER, 1, 7, 1)
SERVER = Envelope(JOB, 0, Role.SERVER, 0, 2, 0)
NAME = "server 0"


class Hold:
    """Counts how often it is released."""

    count = 0

    def release(self) -> None:
        self.count += 1


class TransportPair:
    """A server and a worker, who know each other's keys. A subclass makes both."""

    server: ZmqTransport
    worker: ZmqTransport

    def introduce(self, keys: Keys, session: str, *, is_near: bool) -> None:
        """Have the server trust the worker's session key, and know how the worker connects."""
        self.server.trust({session: "worker:1:7"})
        self.to = Connect(NAME, self.server.endpoint, is_near, keys.session.public, True)
        self.at_server: list[tuple[Any, Any]] = []
        self.at_worker: list[tuple[Any, Any]] = []

    def poll(self) -> None:
        """Let both do what there is to do."""
        self.at_worker += list(self.worker.poll(0.001))
        self.at_server += list(self.server.poll(0.001))

    def until(self, is_so: Any, what: str) -> None:
        """Poll both until something is so."""

        def look() -> bool:
            self.poll()
            return bool(is_so())

        until(look, what)

    def ask(self, number: int = 1) -> Any:
        """Send a packet to the server; return its route when it has come."""
        self.worker.send(NAME, probe(number), None)
        self.until(lambda: self.at_server and self.at_server[-1][1] == probe(number), "a packet")
        return self.at_server[-1][0]

    def close(self) -> None:
        """Close both."""
        self.worker.close(0.0)
        self.server.close(0.0)


def probe(number: int) -> Packet:
    """Return a packet of the worker."""
    return Packet(WORKER, Probe((number,)))


def values(size: int) -> Packet:
    """Return an answer of the server with payload."""
    message = Pulled(1, 1, 1, True, (Stand(0, size // 4, 1, 1),))
    return Packet(SERVER, message, (memoryview(bytearray(os.urandom(size))),))
