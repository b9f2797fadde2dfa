"""Named limits of a process: the default of each, its unit, and the processes to which it applies.

An operator sets them by ``--limit NAME=NUMBER`` or KVPS_LIMITS (:func:`kvps.config.limits`). The
memory limit has a flag of its own. Limits that both ends of a connection rely on, such as the
bytes of a frame, are constants of the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

SCHEDULER, SERVER = "scheduler", "server"


def _limit(default: int, what: str, *roles: str, is_bytes: bool = False) -> Any:
    return field(default=default, metadata={"of": (what, roles, is_bytes)})


@dataclass(frozen=True, slots=True)
class Limits:
    """The named limits of one process; each is 1 or more.

    Example:
        >>> Limits(stores=8).stores, Limits().stores
        (8, 4096)
    """

    keys: int = _limit(1_000_000, "keys on a server", SERVER)
    stores: int = _limit(4096, "stores on a server", SERVER)
    pending: int = _limit(65_536, "requests of one worker that wait for an answer", SERVER)
    unread: int = _limit(
        256 << 20, "bytes of rows and states for a peer that reads nothing", SERVER, is_bytes=True
    )
    used_memory: int = _limit(95, "percent of the memory in use from which on new work is refused", SERVER)
    tagged_checkpoints: int = _limit(100, "checkpoints with a tag in one directory", SERVER)
    checkpoints: int = _limit(6, "checkpoints that workers request, in 60 s", SCHEDULER)
    barrier_names: int = _limit(1024, "names of barriers in a job", SCHEDULER)
    looks: int = _limit(20, "status queries in 1 s", SCHEDULER)
    refused: int = _limit(
        100, "refused packets in 10 s, then a connection is ignored for 10 s", SCHEDULER, SERVER
    )
    idle: int = _limit(256, "connections along which no packet came for 5 s", SCHEDULER, SERVER)


class Limit(NamedTuple):
    """The name, default and meaning of one limit."""

    name: str
    default: int
    what: str
    roles: tuple[str, ...]
    is_bytes: bool


TABLE = {
    field.name: Limit(field.name, getattr(Limits(), field.name), *field.metadata["of"])
    for field in fields(Limits)
}
"""All limits, by name."""


ALONE = Limits(checkpoints=2**31, tagged_checkpoints=2**31)
"""The limits of a cluster inside its only worker, which has nobody to guard against."""


def limits_of_role(role: str) -> dict[str, Limit]:
    """Return the limits of a process of ``role``, by name."""
    return {name: limit for name, limit in TABLE.items() if role in limit.roles}


def remedy(name: str) -> str:
    """Return how an operator raises a limit, for the text of an error.

    Example:
        >>> remedy("stores")
        'raise the limit with kvps-server --limit stores=NUMBER (KVPS_LIMITS)'
    """
    return f"raise the limit with kvps-{TABLE[name].roles[0]} --limit {name}=NUMBER (KVPS_LIMITS)"
