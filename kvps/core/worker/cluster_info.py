"""The cluster as the threads of the script see it: a snapshot that a worker replaces as a whole.

The state of a core belongs to the thread of its loop. What other threads may know of it without making a call
is here, and never changes: they read one snapshot, and later another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvps.protocol.envelope import Role
from kvps.protocol.membership import Member

RESIZED = -(1 << 40)
"""The ticket that tells how many workers there are, each time that changes in a job of N:MAX workers."""


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """One worker's knowledge of its cluster at one moment."""

    rank: int
    """The rank of this worker."""
    workers: int = 0
    """Number of workers in the job, now where they come and go; 0 until this worker has joined."""
    servers: int = 0
    """Number of servers in the job; 0 until this worker has joined."""
    members: tuple[Member, ...] = ()
    """The seats of the newest view."""
    joins: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Store -> number of joins that are over, as far as this worker knows."""
    most: int = 0
    """The most workers that the job may come to have; 0 where no worker comes or goes."""
    is_added: bool = False
    """This worker came to a job that ran."""

    def incarnation(self, rank: int) -> int:
        """Return the incarnation of the present or last holder of a worker's seat; 0 if it had none."""
        seats = [seat for seat in self.members if seat.role == Role.WORKER and seat.rank == rank]
        return seats[0].incarnation if seats else 0

    def workers_in(self, state: str) -> list[int]:
        """Return the ranks of workers whose seats are in this state, ascending."""
        return sorted(
            [seat.rank for seat in self.members if seat.role == Role.WORKER and seat.state == state]
        )
