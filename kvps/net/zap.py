"""The keys of a transport: its own, and ZeroMQ's question of whose connections to take (ZAP, RFC 27).

libzmq asks before it serves a connection. The question comes along a socket of the same context, which the
process's own loop reads; :mod:`kvps.core.keys` decides. No thread is needed for it, so none can die: where
nobody answers, no connection is made.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq
from zmq.utils import z85

from kvps.core.keys import Allow, Keyring, Refusal, RoleKey
from kvps.errors import ConfigError

log = logging.getLogger("kvps")
ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"kvps"
"""With a domain, libzmq demands its present protocol: it takes no frames from one who greets it by none."""
WAITING_MAX = 256
WAITS_MAX_S = 0.8
"""How many questions wait for a key to become known, and how long: less than a handshake may take."""
TELL_EVERY_S = 10.0
"""How often the log tells of one who was refused."""
LIBZMQ_LEAST = (4, 3, 4)
"""Before it, peers without a key could overrun libzmq's memory or stop it."""


class KeyPair(NamedTuple):
    """Both halves of a key, in Z85."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair({self.public})"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one process."""

    scheduler: tuple[str, ...] = ()
    """The scheduler's public keys: one, or two while it is given another."""
    role: KeyPair | None = None
    """Of this process's role; None in a command whose guardian has enrolled its session key."""
    session: KeyPair = field(default_factory=lambda: new_pair())
    """Made for this process, by which it speaks as a member."""
    opens: Mapping[str, RoleKey] = field(default_factory=dict)
    """At a scheduler, the public keys of roles."""
    is_enrolled: bool = False
    """The session key was enrolled by a guardian."""


def keys_can_be() -> bool:
    """Whether this system's libzmq has keys, and is fit to be left to strangers."""
    return bool(zmq.has("curve")) and zmq.zmq_version_info() >= LIBZMQ_LEAST


def new_pair() -> KeyPair:
    """Return a new key.

    Raises:
        ConfigError: if libzmq has no CURVE, or is too old to be left to strangers.
    """
    if not keys_can_be():
        least = ".".join(map(str, LIBZMQ_LEAST))
        raise ConfigError(
            f"keys need libzmq {least} or later with CURVE; this is {zmq.zmq_version()}. Install pyzmq from "
            "its wheels, or run on loopback with --insecure"
        )
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


class _Question(NamedTuple):
    route: bytes
    number: bytes
    mechanism: str
    address: str
    key: str
    until: float


class Porter:
    """Who answers libzmq's questions for one context.

    Args:
        context: whose.
        ring: what is known of those who come.
        clock: seconds.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        ring: Keyring,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ring = ring
        self.refused: Counter[str] = Counter()
        """How many connections were refused, by their mechanism."""
        self._clock = clock
        self._waiting: list[_Question] = []
        self._quiet_until, self._unsaid = 0.0, 0
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ENDPOINT)

    def trust(self, keys: dict[str, str]) -> None:
        """Take these session keys from now on; some may have waited for that."""
        self.ring.sessions = dict(keys)
        self.look(is_news=True)

    @property
    def due(self) -> float | None:
        """When :meth:`look` has something to do."""
        return self._waiting[0].until if self._waiting else None

    def answer(self) -> None:
        """Answer what libzmq has asked."""
        while self.socket.poll(0):
            parts = self.socket.recv_multipart()
            if len(parts) < 8 or parts[2] != b"1.0":
                continue
            route, _, _, number, _, address, _, mechanism, *credentials = parts
            is_curve = mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32
            key = z85.encode(credentials[0]).decode() if is_curve else ""
            question = _Question(
                route,
                number,
                mechanism.decode("ascii", "replace"),
                address.decode("ascii", "replace"),
                key,
                self._clock() + WAITS_MAX_S,
            )
            if not self._decide(question, is_last=len(self._waiting) >= WAITING_MAX):
                self._waiting.append(question)

    def look(self, is_news: bool = False) -> None:
        """Answer those that have waited for long enough, or all that the news is for."""
        now = self._clock()
        if is_news or (self._waiting and now >= self._waiting[0].until):
            self._waiting = [
                one for one in self._waiting if not self._decide(one, is_last=now >= one.until)
            ]

    def _decide(self, question: _Question, is_last: bool) -> bool:
        """Answer a question, unless it is to wait; return whether it was answered."""
        verdict = self.ring.decide(question.mechanism, question.address, question.key, time.time())
        if verdict is Refusal.NOT_YET and not is_last:
            return False
        name, status = "", 200
        if isinstance(verdict, Allow):
            name = verdict.name
        else:
            status = verdict.value
            self._refused(question)
        self.socket.send_multipart(
            [question.route, b"", b"1.0", question.number, b"%d" % status, b"", name.encode(), b""]
        )
        return True

    def _refused(self, question: _Question) -> None:
        self.refused[question.mechanism] += 1
        now = self._clock()
        if now < self._quiet_until:
            self._unsaid += 1
            return
        more = (
            f" ({self._unsaid} more were refused since the last such line)" if self._unsaid else ""
        )
        self._quiet_until, self._unsaid = now + TELL_EVERY_S, 0
        log.warning(
            "refused a connection from %s: %s%s",
            question.address,
            f"its key {question.key} is not known here" if question.key else "it has no key",
            more,
        )


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
GREETS_MAX_S = 0.2


def greets_by_keys(endpoint: str) -> bool:
    """Whether who listens there says that it has keys. A relay whose target is away says nothing."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    got = b""
    with (
        suppress(OSError, ValueError),
        socket.create_connection((host.strip("[]"), int(port)), GREETS_MAX_S) as probe,
    ):
        probe.sendall(GREETING)
        while len(got) < len(GREETING) and (more := probe.recv(len(GREETING))):
            got += more
    return got[12:17] == b"CURVE"


def own_user() -> int:
    """Return the number of the user that this process runs as."""
    return os.geteuid()
