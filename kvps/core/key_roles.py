"""Keys: the process that a connection's public key identifies, and whether the connection is allowed.

Two kinds of keys open connections. *Role keys* come from files, and open the door: with one, a process may
ask the scheduler for a seat of that role, or look. *Session keys* are made in memory, one for each life of a
seat; with one, a process speaks as that member and as nobody else. The scheduler learns them by ENROL, and
tells all servers by VIEW. Processes of one host and one user connect without keys, by a *near link*, and
are identified by their user, which could read their memory anyway.

A name of a connection is what libzmq calls its User-Id: ``role:worker``, ``worker:3:17`` (role, rank and
incarnation), or ``user:1000``. :mod:`kvps.protocol.permissions` says what may come along it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

ROLES = ("scheduler", "server", "worker", "admin", "look", "reader")
"""The roles that have key files."""
KEY_CHARACTERS = 40
"""Length of a public or secret key, in Z85."""


@dataclass(frozen=True, slots=True)
class Allow:
    """The connection may be made, and has this name."""

    name: str


class Refusal(enum.Enum):
    """The connection may not be made."""

    NOT_YET = 300
    """By a key that may become known soon; its opener tries again."""
    NEVER = 400
    """Its opener gives up."""


@dataclass(frozen=True, slots=True)
class RoleKey:
    """The role that a public key opens."""

    role: str
    until: float | None = None
    """When it ends, in seconds since 1970; None for never."""


def near_endpoint(public_key: str) -> str:
    """Return where the holder of a session key listens to processes of its own user on its own host.

    It is a name in the kernel and no file. No process without the key can take it first, and only members
    know the key.

    Example:
        >>> near_endpoint("k" * 40)
        'ipc://@kvps-bbd45a27d36740c1b28aea126e641a68'
    """
    return f"ipc://@kvps-{blake2b(public_key.encode(), digest_size=16).hexdigest()}"


def name_of_user(user: int) -> str:
    """Return the name of connections between processes of one host and this user."""
    return f"user:{user}"


@dataclass(slots=True)
class Keyring:
    """The public keys that a listening process knows.

    Args:
        roles: public key -> the roles that its holder may have here.
        learns: a session key may become known after its process connects.
    """

    roles: Mapping[str, RoleKey] = field(default_factory=dict)
    learns: bool = False
    sessions: Mapping[str, str] = field(default_factory=dict)
    """By public key, the name of its connections."""

    def decide(self, key: str, now: float) -> Allow | Refusal:
        """Decide whether a connection may be made.

        Args:
            key: its public key, in Z85; empty if it has none.
            now: seconds since 1970.
        """
        if not key:
            return Refusal.NEVER
        if key in self.sessions:
            return Allow(self.sessions[key])
        opens = self.roles.get(key)
        if opens is not None and (opens.until is None or now < opens.until):
            return Allow(f"role:{opens.role}")
        return Refusal.NOT_YET if self.learns else Refusal.NEVER


def is_key(text: str) -> bool:
    """Whether ``text`` is a key in Z85, by its look."""
    return len(text) == KEY_CHARACTERS and text.isascii() and text.isprintable() and " " not in text
