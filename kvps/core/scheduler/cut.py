"""One cut, stage by stage, and its moment: when all workers have halted, all servers take their
snapshots. And the return to one.

Theory of operation
-------------------
A cut is useful only if it has every part of every key at one version, and, if workers train in rounds, if it
lies between two of their steps. So the workers make the moment: each halts where it begins a step, and
workers that are behind continue to the step of the others (a worker in the middle of a step reports this, as
it may wait for them). The servers take their snapshots when all workers have halted and nothing is in flight.
This is instant (no value is copied), so the workers proceed at once, while the servers write::

    halting ──────► imaging ──────► writing ──────────────────► committing ──► complete
    all workers     all servers     all images are on disks,    all manifests
    stand           have taken      all workers say that they   are on disks
                                    had stood all the time

If a step takes too long, a member joins or is lost, or a disk is full, the cut is abandoned and tried again
later. It affects only how far a lost server sets the job back.

Messages without an answer are sent again every second; every message may arrive twice.

Rollback
--------
A server that takes the place of a lost one holds nothing. So a new *epoch* begins: every server says
which cuts of this job it has, the newest that all have is chosen, and each returns to it, those too
that had lost nothing, since values of two moments do not make a model. Workers learn of the epoch when
it begins, and are served when all have returned. A cut that cannot be read somewhere is passed over, for
all. A second loss on the way begins the next epoch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvps import protocol as p
from kvps.core.texts import shown
from kvps.protocol.checkpoint import Recall, Restore, Restored, Shelf
from kvps.protocol.envelope import Message, Node, Role

HALT_MAX_S = 30.0
"""How long workers stand, at most, until all images are taken."""
AGAIN_S = 1.0
"""How often a question is asked again."""


class NodeMessage(NamedTuple):
    """A message to a member, along all of its connections."""

    node: Node
    message: Message


CUT_MAX = 10**15
"""The highest number of a cut: a server passes over a folder that names a higher one."""


class CutStage(enum.Enum):
    """How far a cut has come."""

    HALTING = "halting"
    IMAGING = "imaging"
    WRITING = "writing"
    COMMITTING = "committing"
    COMPLETE = "complete"
    GIVEN_UP = "given up"


@dataclass(slots=True)
class Cut:
    """One cut on its way."""

    number: int
    tag: str
    epoch: int
    workers: frozenset[int]
    servers: frozenset[int]
    begun_at: float
    last: int = 0
    """The newest cut that is complete."""
    reason: str = ""
    """Why it was given up."""
    by_worker: bool = False
    """It was abandoned because of workers: the next cut may succeed."""
    least: dict[str, int] = field(default_factory=dict)
    """By synchronous store, where the workers meet."""
    halted: dict[int, dict[str, int]] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    proceeding: set[int] = field(default_factory=set)
    kept: dict[int, p.ImageKept] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)

    @property
    def stage(self) -> CutStage:
        """How far it has come."""
        if self.reason:
            return CutStage.GIVEN_UP
        if not self._standing >= self.workers:
            return CutStage.HALTING
        if not self.taken >= self.servers:
            return CutStage.IMAGING
        if not (self.kept.keys() >= self.servers and self.proceeding >= self.workers):
            return CutStage.WRITING
        return CutStage.COMPLETE if self.committed >= self.servers else CutStage.COMMITTING

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be said of it any more."""
        if self.stage is CutStage.GIVEN_UP:
            return self.proceeding >= self.workers
        return self.stage is CutStage.COMPLETE

    @property
    def _standing(self) -> set[int]:
        """The workers that have halted where all meet."""
        return {
            rank
            for rank, numbers in self.halted.items()
            if all(self.least.get(store, 0) <= number for store, number in numbers.items())
        }

    @property
    def behind(self) -> frozenset[int]:
        """The workers that have halted where not all can meet: other workers may wait for them."""
        return frozenset(self.halted.keys() - self._standing)

    # --- what is heard ------------------------------------------------------------------------

    def hear(self, node: Node, message: Message) -> None:
        """Take in a member's message about this cut."""
        rank = node.rank
        match message:
            case p.Halted() if rank in self.workers:
                for store, number in message.numbers.items():
                    self.least[store] = max(number, self.least.get(store, 0))
                if message.stands:
                    self.halted[rank] = message.numbers
            case p.Proceeding() if rank in self.workers:
                self.proceeding.add(rank)
                if not message.stood:
                    self.give_up(f"worker {rank} could not wait any longer", by_worker=True)
            case p.ImageTaken() if rank in self.servers:
                self.taken.add(rank)
            case p.ImageKept() if rank in self.servers:
                self.taken.add(rank)
                self.kept[rank] = message
                if message.error:
                    self.give_up(f"server {rank}: {shown(message.error)}")
            case p.Committed() if rank in self.servers:
                if message.error:
                    self.give_up(f"server {rank}: {shown(message.error)}")
                self.committed.add(rank)
            case _:
                pass

    def give_up(self, reason: str, by_worker: bool = False) -> None:
        """There will be no such cut."""
        if self.stage not in (CutStage.COMPLETE, CutStage.GIVEN_UP):
            self.reason, self.by_worker = reason, by_worker

    def meet(self, workers: frozenset[int], servers: frozenset[int]) -> None:
        """These are the members now, each in its present life."""
        if servers != self.servers:
            self.give_up("a server joined or was lost")
        elif workers != self.workers and not self.proceeding >= self.workers:
            self.give_up("a worker joined or left", by_worker=True)
        self.workers &= workers

    def on_time(self, now: float) -> None:
        """Give it up if the workers have stood for too long."""
        if self.stage in (CutStage.HALTING, CutStage.IMAGING) and now >= self.begun_at + HALT_MAX_S:
            self.give_up(self._late(), by_worker=self.stage is CutStage.HALTING)

    def _late(self) -> str:
        if self.stage is CutStage.IMAGING:
            missing = sorted(self.servers - self.taken)
            return f"servers {missing} still had gradients to apply after {HALT_MAX_S:.0f} s"
        missing = sorted(self.workers - self._standing)
        return f"workers {missing!s:.60} were in the middle of a step for {HALT_MAX_S:.0f} s"

    # --- what is said -------------------------------------------------------------------------

    def outgoing(self) -> Iterator[NodeMessage]:
        """Yield the messages to members that have not answered, again if they are due."""
        stage = self.stage
        if stage is CutStage.HALTING:
            for rank in sorted(self.workers - self._standing):
                yield NodeMessage(Node(Role.WORKER, rank), p.Halt(self.number, self.least))
        if stage in (CutStage.IMAGING, CutStage.WRITING):
            for rank in sorted(self.servers - self.kept.keys()):
                yield NodeMessage(Node(Role.SERVER, rank), p.TakeImage(self.number))
        if stage in (CutStage.WRITING, CutStage.GIVEN_UP):
            for rank in sorted(self.workers - self.proceeding):
                yield NodeMessage(Node(Role.WORKER, rank), p.Proceed(self.number))
        if stage is CutStage.COMMITTING:
            commit = self.commit()
            for rank in sorted(self.servers - self.committed):
                yield NodeMessage(Node(Role.SERVER, rank), commit)
        if stage is CutStage.GIVEN_UP:
            for rank in sorted(self.servers):
                yield NodeMessage(Node(Role.SERVER, rank), p.GiveUp(self.number))

    def commit(self) -> p.Commit:
        """Return what the manifest has to say."""
        images = tuple(
            p.ImageSum(self.kept[rank].size, self.kept[rank].sha256) for rank in sorted(self.servers)
        )
        stores: dict[str, p.StoreSum] = {}
        for kept in self.kept.values():
            for store_sum in kept.stores:
                known = stores.get(store_sum.store)
                stores[store_sum.store] = store_sum if known is None else _together(known, store_sum)
        return p.Commit(self.number, self.tag, self.epoch, images, tuple(stores.values()), self.last)


def _together(total: p.StoreSum, other: p.StoreSum) -> p.StoreSum:
    return p.StoreSum(
        total.store,
        total.begins + other.begins,
        min(total.lowest, other.lowest),
        max(total.highest, other.highest),
    )


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
        """Take in a server's message."""
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
