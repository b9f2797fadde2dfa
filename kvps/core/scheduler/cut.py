"""How the scheduler has all servers take their images at one moment: a cut.

Theory of operation
-------------------
A cut is of use only if every part of every key is in it at one version, and, where workers train in
rounds, if it lies between two of their steps. So the workers make the moment: each halts where it
begins a step, those who are behind go on to where the others are (one who is in the middle of a step says so, as
it may wait for them), and the servers take their images
when all stand and nothing is under way. Taking one is instant (no value is copied), so the workers
go on at once, while the servers write::

    halting ──────► imaging ──────► writing ──────────────────► committing ──► complete
    all workers     all servers     all images are on disks,    all manifests
    stand           have taken      all workers say that they   are on disks
                                    had stood all the time

A step that takes too long, a member that comes or goes, a disk that is full: the cut is given up, and
tried again later. Nothing depends on it but how far a lost server sets the job back.

What has not been answered is asked again every second; every message may come twice.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvps.messages import (
    Commit,
    Committed,
    GiveUp,
    Halt,
    Halted,
    ImageKept,
    ImageSum,
    ImageTaken,
    Message,
    Node,
    Proceed,
    Proceeding,
    Role,
    StoreSum,
    TakeImage,
)

HALT_MAX_S = 30.0
"""How long workers stand, at most, until all images are taken."""
AGAIN_S = 1.0
"""How often a question is asked again."""

Letter = tuple[Node, Message]


class Stage(enum.Enum):
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
    """It was given up for something that workers did: the next one may succeed."""
    least: dict[str, int] = field(default_factory=dict)
    """By synchronous store, where the workers meet."""
    halted: dict[int, dict[str, int]] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    proceeding: set[int] = field(default_factory=set)
    kept: dict[int, ImageKept] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)

    @property
    def stage(self) -> Stage:
        """How far it has come."""
        if self.reason:
            return Stage.GIVEN_UP
        if not self._standing >= self.workers:
            return Stage.HALTING
        if not self.taken >= self.servers:
            return Stage.IMAGING
        if not (self.kept.keys() >= self.servers and self.proceeding >= self.workers):
            return Stage.WRITING
        return Stage.COMPLETE if self.committed >= self.servers else Stage.COMMITTING

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be said of it any more."""
        if self.stage is Stage.GIVEN_UP:
            return self.proceeding >= self.workers
        return self.stage is Stage.COMPLETE

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
        """The workers that have halted where not all can meet: somebody may wait for them."""
        return frozenset(self.halted.keys() - self._standing)

    # --- what is heard ------------------------------------------------------------------------

    def hear(self, node: Node, message: Message) -> None:
        """Take in what a member says of this cut."""
        rank = node.rank
        match message:
            case Halted() if rank in self.workers:
                for store, number in message.numbers.items():
                    self.least[store] = max(number, self.least.get(store, 0))
                if message.stands:
                    self.halted[rank] = message.numbers
            case Proceeding() if rank in self.workers:
                self.proceeding.add(rank)
                if not message.stood:
                    self.give_up(f"worker {rank} could not wait any longer", by_worker=True)
            case ImageTaken() if rank in self.servers:
                self.taken.add(rank)
            case ImageKept() if rank in self.servers:
                self.taken.add(rank)
                self.kept[rank] = message
                if message.error:
                    self.give_up(f"server {rank}: {message.error}")
            case Committed() if rank in self.servers:
                if message.error:
                    self.give_up(f"server {rank}: {message.error}")
                self.committed.add(rank)
            case _:
                pass

    def give_up(self, reason: str, by_worker: bool = False) -> None:
        """There will be no such cut."""
        if self.stage not in (Stage.COMPLETE, Stage.GIVEN_UP):
            self.reason, self.by_worker = reason, by_worker

    def meet(self, workers: frozenset[int], servers: frozenset[int]) -> None:
        """These are the members now, each in its present life."""
        if servers != self.servers:
            self.give_up("a server came or went")
        elif workers != self.workers and not self.proceeding >= self.workers:
            self.give_up("a worker came or went", by_worker=True)
        self.workers &= workers

    def on_time(self, now: float) -> None:
        """Give it up if the workers have stood for too long."""
        if self.stage in (Stage.HALTING, Stage.IMAGING) and now >= self.begun_at + HALT_MAX_S:
            self.give_up(self._late(), by_worker=self.stage is Stage.HALTING)

    def _late(self) -> str:
        if self.stage is Stage.IMAGING:
            missing = sorted(self.servers - self.taken)
            return f"servers {missing} still had something to apply after {HALT_MAX_S:.0f} s"
        missing = sorted(self.workers - self._standing)
        return f"workers {missing!s:.60} were in the middle of a step for {HALT_MAX_S:.0f} s"

    # --- what is said -------------------------------------------------------------------------

    def letters(self) -> Iterator[Letter]:
        """Yield what is to be said, or said again, to those who have not answered."""
        stage = self.stage
        if stage is Stage.HALTING:
            for rank in sorted(self.workers - self._standing):
                yield Node(Role.WORKER, rank), Halt(self.number, self.least)
        if stage in (Stage.IMAGING, Stage.WRITING):
            for rank in sorted(self.servers - self.kept.keys()):
                yield Node(Role.SERVER, rank), TakeImage(self.number)
        if stage in (Stage.WRITING, Stage.GIVEN_UP):
            for rank in sorted(self.workers - self.proceeding):
                yield Node(Role.WORKER, rank), Proceed(self.number)
        if stage is Stage.COMMITTING:
            commit = self.commit()
            for rank in sorted(self.servers - self.committed):
                yield Node(Role.SERVER, rank), commit
        if stage is Stage.GIVEN_UP:
            for rank in sorted(self.servers):
                yield Node(Role.SERVER, rank), GiveUp(self.number)

    def commit(self) -> Commit:
        """Return what the manifest has to say."""
        images = tuple(
            ImageSum(self.kept[rank].size, self.kept[rank].sha256) for rank in sorted(self.servers)
        )
        stores: dict[str, StoreSum] = {}
        for kept in self.kept.values():
            for one in kept.stores:
                known = stores.get(one.store)
                stores[one.store] = one if known is None else _together(known, one)
        return Commit(self.number, self.tag, self.epoch, images, tuple(stores.values()), self.last)


def _together(one: StoreSum, other: StoreSum) -> StoreSum:
    return StoreSum(
        one.store,
        one.begins + other.begins,
        min(one.lowest, other.lowest),
        max(one.highest, other.highest),
    )
