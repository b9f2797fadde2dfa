"""The keys of a transport: its own keys, and the check of peers' keys for ZeroMQ (ZAP, RFC 27).

libzmq asks before it serves a connection. The question comes along a socket of the same context, which the
process's own loop reads; :mod:`kvps.core.key_roles` decides. No thread is needed for it, so none can die:
where nothing answers, no connection is made.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq
from zmq.utils import z85

from kvps.core.key_roles import Allow, Keyring, Refusal, RoleKey
from kvps.errors import ConfigError
from kvps.protocol.envelope import Role

log = logging.getLogger("kvps")
ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"kvps"
"""With a domain, libzmq demands its present protocol: it refuses peers that send none."""
WAITING_MAX = 256
WAITS_MAX_S = 0.8
"""How many questions wait for a key to become known, and how long: less than a handshake may take."""
TELL_EVERY_S = 10.0
"""Seconds between two lines of log about refused connections."""
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
    """The key pair of this process's role; None in a command whose supervisor has enrolled its
    session key."""
    session: KeyPair = field(default_factory=lambda: new_pair())
    """Made for this process, by which it speaks as a member."""
    opens: Mapping[str, RoleKey] = field(default_factory=dict)
    """At a scheduler, the public keys of roles."""
    is_enrolled: bool = False
    """The session key was enrolled by a supervisor."""

    def listening(self, role: Role) -> KeyPair:
        """Return the key that others expect where this process listens."""
        own = self.role if role in (Role.SCHEDULER, Role.READER) else self.session
        assert own is not None, "schedulers and readers have the key of their role"
        return own


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
    address: str
    key: str
    until: float


class Porter:
    """Answers libzmq's authentication requests for one context.

    Args:
        context: whose.
        ring: the known public keys.
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
        """How many connections were refused: ``unknown_key`` or ``no_key``."""
        self._clock = clock
        self.waiting: list[_Question] = []
        """Questions about keys that may become known; :meth:`look` is due when the first ends."""
        self._quiet_until, self._unsaid = 0.0, 0
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ENDPOINT)

    def trust(self, keys: dict[str, str]) -> None:
        """Take these session keys from now on; some may have waited for that."""
        self.ring.sessions = dict(keys)
        self.look(is_news=True)

    def answer(self) -> None:
        """Answer what libzmq has asked."""
        while self.socket.poll(0):
            parts = self.socket.recv_multipart()
            if len(parts) < 8 or parts[2] != b"1.0":
                continue
            route, _, _, number, _, address, _, mechanism, *credentials = parts
            is_curve = mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32
            key = z85.encode(credentials[0]).decode() if is_curve else ""
            whence, until = address.decode("ascii", "replace"), self._clock() + WAITS_MAX_S
            question = _Question(route, number, whence, key, until)
            if not self._decide(question, is_last=len(self.waiting) >= WAITING_MAX):
                self.waiting.append(question)

    def look(self, is_news: bool = False) -> None:
        """Answer those that have waited for long enough, or all that the news is for."""
        now = self._clock()
        if is_news or (self.waiting and now >= self.waiting[0].until):
            self.waiting = [
                caller for caller in self.waiting if not self._decide(caller, is_last=now >= caller.until)
            ]

    def _decide(self, question: _Question, is_last: bool) -> bool:
        """Answer a question, unless it is to wait; return whether it was answered."""
        verdict = self.ring.decide(question.key, time.time())
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
        self.refused["unknown_key" if question.key else "no_key"] += 1
        now = self._clock()
        if now < self._quiet_until:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more were refused since the last line of this kind)" if self._unsaid else ""
        self._quiet_until, self._unsaid = now + TELL_EVERY_S, 0
        log.warning(
            "refused a connection from %s: %s%s",
            question.address,
            f"its key {question.key} is not known here" if question.key else "it has no key",
            more,
        )


EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""The events of libzmq for a connection that was opened here."""
OTHER_MECHANISM = 0x11000002
"""Its value of a handshake that failed since one end has keys and the other has none."""
FAILURES_MAX, AT_ONCE_S = 3, 0.5
"""So often in a row, and so soon after it was made, a connection to one of another key is closed."""
DATA_HANDSHAKE_MS = 1000
"""After so long a handshake is begun anew, as the peer may not have known our key yet."""


class Handshakes:
    """The connections that a process opens: their keys, and the meaning of a refused connection.

    Args:
        keys: of the process; None if it has none.
    """

    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys
        self._turn = 0
        """How often another of the scheduler's public keys was tried."""
        self._failures = 0
        """How often in a row the connection to the scheduler was closed as soon as it was made."""

    def seal(self, dealer: zmq.Socket[bytes], key: str, is_member: bool) -> None:
        """Have a connection encrypted, as :class:`~kvps.core.effects.Connect` says by which keys."""
        keys = self._keys
        assert keys is not None, "only who has keys seals"
        own = keys.session if is_member or keys.role is None else keys.role
        peer = key or keys.scheduler[self._turn % len(keys.scheduler)]
        dealer.setsockopt(zmq.CURVE_SERVERKEY, peer.encode())
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
        dealer.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        if key:
            dealer.setsockopt(zmq.HANDSHAKE_IVL, DATA_HANDSHAKE_MS)

    def succeeded(self, name: str) -> None:
        """The connection of this name is served."""
        if name == "scheduler":
            self._failures = 0

    def failed(self, endpoint: str, kind: int, value: int, made_s: float) -> tuple[bool, str]:
        """Judge a connection to the scheduler that was made, and then not served.

        Args:
            endpoint: where to.
            kind: of libzmq's event.
            value: of that.
            made_s: since when it had been made, in seconds.

        Returns:
            Whether to open it again, by another of the scheduler's keys; and why to give up, or "".
        """
        if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == Refusal.NEVER.value:
            return False, (
                f"the scheduler at {endpoint} does not know the key of this process. The key may be retired "
                "or belong to another job, or this member was replaced. Give --keys (KVPS_KEYS) the "
                "directory or file of this job"
            )
        if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == OTHER_MECHANISM:
            return False, self._unlike(endpoint)
        if made_s > AT_ONCE_S:
            return False, ""  # it was slow, or lost
        self._failures += 1
        if self._failures not in (1, FAILURES_MAX):
            return False, ""
        theirs, ours = greeting_of(endpoint), NULL if self._keys is None else CURVE
        if theirs == OTHER_PROTOCOL:
            return False, "" if self._failures < FAILURES_MAX else (
                f"the process at {endpoint} is no scheduler: it speaks another protocol. Check the address "
                "in --scheduler or KVPS_SCHEDULER"
            )
        if theirs and theirs != ours:  # it has hung up before it was heard
            return False, self._unlike(endpoint)
        if self._keys is None or not theirs or self._failures < FAILURES_MAX:
            return False, ""
        self._failures = 0
        self._turn += 1
        if self._turn % len(self._keys.scheduler):  # it may have been given another
            return True, ""
        return False, (
            f"the process at {endpoint} is not the scheduler whose public key is in --keys (KVPS_KEYS). "
            "Check the address, and that both have keys from the same 'kvps keygen'"
        )

    def _unlike(self, endpoint: str) -> str:
        if self._keys is not None:
            return (
                f"this process has keys, and the scheduler at {endpoint} has none: start the scheduler with "
                "--keys DIR, or this process without"
            )
        return (
            f"the scheduler at {endpoint} has keys, and this process has none: give this process --keys DIR "
            "(KVPS_KEYS) with the keys of that cluster"
        )


NULL, CURVE = b"NULL", b"CURVE"
OTHER_PROTOCOL = b"?"
"""In place of a mechanism: the greeting is not ZMTP's."""
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING_BYTES = 64
GREETS_MAX_S = 0.2


def greeting_of(endpoint: str, ours: bytes = CURVE) -> bytes:
    """Return the mechanism in the greeting of the listener; a relay without its target sends none.

    Of a listener that sends something else it is :data:`OTHER_PROTOCOL`.

    Args:
        endpoint: where it listens.
        ours: the mechanism to announce. A listener with another one may hang up without its own.
    """
    greeting = SIGNATURE + b"\x03\x00" + ours.ljust(20, b"\0")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    got = b""
    with (
        suppress(OSError, ValueError),
        socket.create_connection((host.strip("[]"), int(port)), GREETS_MAX_S) as probe,
    ):
        probe.sendall(greeting.ljust(GREETING_BYTES, b"\0"))
        while len(got) < GREETING_BYTES and (more := probe.recv(GREETING_BYTES)):
            got += more
    if got[:1] not in (b"", SIGNATURE[:1]) or got[9:10] not in (b"", SIGNATURE[9:10]):
        return OTHER_PROTOCOL
    return got[12:32].rstrip(b"\0")
