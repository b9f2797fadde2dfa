"""The connections that others open to this process: where it listens, and what libzmq's monitor
tells of them.

What libzmq knows first is that a connection broke. With ``watch`` the events of the ROUTER's
monitor are turned into drops, told apart by the file descriptor that libzmq names on every message.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import zmq

from kvps.core.effects import Route
from kvps.core.key_roles import Keyring, near_endpoint
from kvps.errors import ConfigError
from kvps.net import descriptors
from kvps.net.doorman import Doorman
from kvps.net.inflow import Inflow
from kvps.net.links.links import NEAR, Links
from kvps.net.sockets import Sockets
from kvps.net.tcp_watch import events_of
from kvps.net.transport import DROPPED, Disconnected
from kvps.net.zap import DOMAIN, Keys
from kvps.protocol.envelope import Role

_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""The watched events of connections that others open. A key that is refused is counted where it is judged."""
_FAILURES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "no_key",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "wrong_server_key",
}
"""Why a handshake failed, by libzmq's number."""


class IncomingConnections:
    """The connections that others open to this process.

    Args:
        sockets: of this process.
        links: of this process.
        role: what the process is.
        keys: by which it accepts connections; None to accept any, in clear text.
        doorman: checks packets by the names of their connections, where there are keys.
        inflow: counts the unread bytes of each connection.
        queue_max: messages that wait to leave along one connection; a peer that does not read gets no more.
    """

    def __init__(
        self,
        sockets: Sockets,
        links: Links,
        role: Role,
        keys: Keys | None,
        doorman: Doorman,
        inflow: Inflow,
        queue_max: int,
    ) -> None:
        self._sockets, self._links, self._role, self._keys = sockets, links, role, keys
        self._doorman, self._inflow, self._queue_max = doorman, inflow, queue_max
        self.router: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        self.endpoint = ""
        """Where this process can be reached, if it listens."""
        self.failures: Counter[str] = Counter()
        """How many handshakes of others failed, by why."""
        self.routes: dict[int, Route] = {}
        """The route of each connection that has carried a message, by its file descriptor."""
        self.tells_drops = False
        """Whether connections that break are watched."""
        self._shortage = descriptors.Shortage()

    def listen(self, endpoint: str, watch: bool) -> None:
        """Take connections at ``endpoint``; ``watch`` those that break. Once for each transport.

        Raises:
            ConfigError: if that cannot be.
        """
        assert not self.endpoint, "one place to listen is enough"
        if endpoint.startswith(NEAR):
            if not self._links.listen_near(endpoint):
                raise ConfigError(
                    f"cannot listen for processes of this host at {endpoint}: the name is taken"
                )
            self.endpoint = endpoint
            return
        router = self._sockets.new(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.SNDHWM, self._queue_max)
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        keys = self._keys
        if keys is not None:
            ring = Keyring(keys.opens, learns=self._role is Role.SERVER)
            router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self._sockets.ask(ring)
            self._doorman.checks_names = True
            if self._role is Role.SERVER:  # or its neighbours come by TCP, too
                self._links.listen_near(near_endpoint(keys.session.public))
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, keys.listening(self._role).secret.encode())
        self.tells_drops = watch
        monitor = router.get_monitor_socket(_EVENTS)
        self._sockets.watch(monitor)
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            router.disable_monitor()
            raise ConfigError(
                f"cannot listen on {endpoint}: {os.strerror(error.errno or 0)}. Is another kvps process "
                "running there? Choose another port with --bind, or port 0 for a free one"
            ) from error
        self.endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._inflow.port = int(self.endpoint.rpartition(":")[2])
        self.router, self.monitor = router, monitor
        self._sockets.watch(router)

    def events(self) -> Iterator[tuple[Route, Disconnected]]:
        """Take in which connections were made and which broke; yield these, if they are watched."""
        assert self.monitor is not None
        for event, fd in events_of(self.monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._inflow.opened(fd)
                continue
            if event != zmq.EVENT_DISCONNECTED:  # the value is no descriptor, but a reason
                self.failures[_FAILURES.get(fd, "no_handshake")] += 1
                continue
            self._inflow.closed(fd)
            route = self.routes.pop(fd, None)
            if route is not None and self.tells_drops:
                yield route, DROPPED

    def look(self, now: float) -> None:
        """Count the seconds in which no file descriptor was left for another connection."""
        if self.router is not None and self._shortage.look(now):
            self.failures["no_descriptor"] += 1

    def close(self) -> None:
        """Watch no longer."""
        if self.monitor is not None and self.router is not None:
            self.router.disable_monitor()
            self.monitor = None
