"""A rollback: all servers return to one cut after one of them was replaced.

Theory of operation
-------------------
A server that takes the place of a lost one holds nothing. So a new *epoch* begins: every server says
which cuts of this job it has, the newest that all have is chosen, and each returns to it, those too
that had lost nothing, since values of two moments do not make a model. Workers learn of the epoch when
it begins, and are served when all have returned. A cut that cannot be read somewhere is passed over, for
all. A second loss on the way begins the next epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvps.core.scheduler.cut import NodeMessage
from kvps.core.texts import shown
from kvps.protocol.checkpoint import Recall, Restore, Restored, Shelf
from kvps.protocol.envelope import Message, Node, Role


@dataclass(slots=True)
class Rollback:
    """One return to a cut."""

    epoch: int
    servers: int
    shelves: dict[int, frozenset[int]] = field(default_factory=dict)
    """By server, the cuts that it has."""
    restored: set[int] = field(default_factory=set)
    failure: str = ""
    """Why there can be none."""

    @property
    def cut(self) -> int:
        """The newest cut that all have; 0 while that is unknown, or if there is none."""
        if len(self.shelves) < self.servers:
            return 0
        return max(frozenset.intersection(*self.shelves.values()), default=0)

    @property
    def is_over(self) -> bool:
        """Whether all servers have returned."""
        return len(self.restored) == self.servers

    def hear(self, rank: int, message: Message) -> None:
        """Take in what a server says."""
        match message:
            case Shelf() if message.epoch == self.epoch:
                self.shelves[rank] = frozenset(message.cuts)
                if len(self.shelves) == self.servers and not self.cut:
                    self.failure = "no cut is complete on every server"
            case Restored() if (message.epoch, message.cut) == (self.epoch, self.cut) and self.cut:
                if message.error:
                    self.shelves[rank] -= {message.cut}
                    self.restored.clear()  # what they hold is of a cut that not all have
                    self.failure = "" if self.cut else f"server {rank}: {shown(message.error)}"
                else:
                    self.restored.add(rank)
            case _:
                pass

    def outgoing(self) -> Iterator[NodeMessage]:
        """Yield the messages to servers that have not answered, again if they are due."""
        for rank in range(self.servers):
            if rank not in self.shelves:
                yield NodeMessage(Node(Role.SERVER, rank), Recall(self.epoch))
            elif self.cut and rank not in self.restored:
                yield NodeMessage(Node(Role.SERVER, rank), Restore(self.epoch, self.cut))
