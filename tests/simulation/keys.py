"""The keys of simulated processes: which connections are made, and how the doorman of each end names them.

The policy is the real one (:mod:`kvps.core.key_roles`), and so is the doorman that enforces it
(:mod:`kvps.net.doorman`). Only what libzmq does is played: the handshake, and the name that it gives to every
frame of a connection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvps.core.key_roles import KEY_CHARACTERS, Allow, Keyring, Refusal, RoleKey, name_of_user
from kvps.net.doorman import Doorman
from kvps.protocol.envelope import Role

USER = 1000
ROLES = {role: f"role-{role}".ljust(KEY_CHARACTERS, ".") for role in ("server", "worker", "look")}
"""The public keys of roles."""


@dataclass
class ProcessKeys:
    """The keys with which a process speaks and listens.

    Args:
        ring: the public keys that it knows.
        session: its session key; that of its role at a scheduler.
        role: the key of its role; empty if it has none.
    """

    ring: Keyring
    session: str
    role: str = ""

    def name(self, key: str) -> str | Refusal:
        """Return the name of a connection to this process by a public key; empty for a near link."""
        if not key:
            return name_of_user(USER)
        answer = self.ring.decide(key, 0.0)
        return answer.name if isinstance(answer, Allow) else answer


def keys_of(role: Role, life: str) -> ProcessKeys:
    """Return the keys of one life of a process."""
    if role is Role.SCHEDULER:
        roles = {key: RoleKey(name) for name, key in ROLES.items()}
        return ProcessKeys(Keyring(roles), "scheduler".ljust(KEY_CHARACTERS, "."))
    ring = Keyring(learns=role is Role.SERVER)
    return ProcessKeys(ring, f"{role}-{life}".ljust(KEY_CHARACTERS, "."), ROLES[str(role)])


@dataclass(frozen=True, slots=True)
class Origin:
    """A connection, as the doorman asks a frame of pyzmq for it."""

    name: str

    def get(self, option: str) -> str:
        """Return what libzmq says of the connection that it came along."""
        return self.name if option == "User-Id" else "a simulated host"


def doorman_of(role: Role, clock: Callable[[], float], keys: ProcessKeys | None) -> Doorman:
    """Return the doorman of a process."""
    doorman = Doorman(role, clock)
    if keys is not None:
        doorman.checks_names = True
    return doorman
