"""One store, as a worker knows it: its keys, their placement, its counters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvps.compression.policy import CompressionPolicy
from kvps.core.effects import CoreOutbox, Outbox
from kvps.core.membership_client import BeatFigures
from kvps.core.placement import EMBEDDING, Part, parts
from kvps.core.refusals import Attempts
from kvps.core.worker.closed_stores import label_of
from kvps.core.worker.connection import Request, Traffic
from kvps.core.worker.error_feedback import ErrorFeedback
from kvps.core.worker.kept_values import KeptValues
from kvps.core.worker.plan import ChunkSlice, Key, PieceLocation, TransferPlan, make
from kvps.dtypes import Spec
from kvps.errors import KeyNotFound, ServerLost
from kvps.phrases import never_initialised
from kvps.protocol.envelope import Message
from kvps.protocol.stores import Open
from kvps.tensors import PRIVATE, Memory


class Made(NamedTuple):
    """The last call of its kind, where the k-th call of one rank meets the k-th of another."""

    number: int
    after: int = 0
    """Number of rounds that this rank had pushed for before it."""
    is_inherited: bool = False
    """A predecessor made it, or this rank before a rollback."""


@dataclass(slots=True)
class Beginning:
    """The step at which the script of a replacement begins; one for all stores of a worker."""

    outbox: Outbox = field(default_factory=CoreOutbox)
    step: int = 0
    """The step that a resume() has told the script; 0 for a script that begins with its first."""
    asks: bool = False
    """Whether a first push asks which one is owed, unless :attr:`WorkerStore.placed` has its keys."""
    is_told: bool = False
    """The log says that servers drop pushes of this process."""

    def number(self, owed: int) -> int:
        """Return the number of a table's next push: the first of the step at which the script begins.

        A table that is pushed equally often in each step may have been pushed by the predecessor in the step
        that the script makes again. Of another table, each push that is owed is new.
        """
        pushes, begun = divmod(owed, self.step)
        return owed - begun if begun <= pushes else owed


NONE = Made(0)
CALLS_PER_JOIN = 1 << 20
"""After the k-th join, calls of a kind are numbered from k times this: a rank that was away made fewer."""


@dataclass(slots=True)
class WorkerStore:
    """One store, as this worker knows it."""

    opened: Open
    rank: int
    servers: int
    worker_grace_s: float
    timeout_s: float = math.inf
    """The limit of its calls, if the user gives none."""
    memory: Memory = PRIVATE
    """Memory in which values are gathered for the servers to read."""
    is_short: bool = False
    """A worker of the job is lost."""
    keys: dict[str, Key] = field(default_factory=dict)
    optimized: Made = NONE
    rated: Made = NONE
    """The last calls of set_optimizer and set_learning_rate."""
    broadcasts: int = 0
    """Number of broadcasts made here; all ranks make the same ones."""
    rate: float = 0.0
    """The learning rate that the servers had when this rank took another's place, if ``rated``
    says that it was set."""
    is_replaying: bool = False
    """A script that took another's place runs again from its beginning, and is not yet where its
    predecessor was."""
    replayed: int = 0
    """The number of steps that it has passed over since then."""
    is_resumed: bool = False
    """This rank took another's place, and does not know which calls and barriers its predecessor has made."""
    restored: int = 0
    """The checkpoint from which the store was restored last; 0 for none."""
    checkpointed: int = 0
    """The last checkpoint that this rank has asked for; 0 for none."""
    was_pushed_to: bool = False
    """The servers have taken a push of this rank in."""
    joins: int = 0
    """Number of joins that are over, as far as this rank knows."""
    joins_told: int = -1
    """The number that the threads of the script have been told."""
    restoring: str = ""
    """The restore() that is under way, as the script calls it; calls that push, read or replace values are
    refused meanwhile. Empty for none."""
    is_away: bool = False
    """This rank has joined, and not all others have; or it was added, and takes no part yet."""
    is_added: bool = False
    """This rank came to a job that ran."""
    has_entered: bool = True
    """It takes part; of a rank that was added, no round waits for it before."""
    barriers: dict[str, int] = field(default_factory=dict)
    """Name -> number of the next barrier; without names at which a resumed rank did not stand yet."""
    attempts: Attempts = field(default_factory=Attempts)
    """Counts of refusals of calls that all ranks make: of keys, the optimizer, its rate, barriers."""
    feedback: ErrorFeedback = field(default_factory=ErrorFeedback)
    traffic: Traffic = field(default_factory=Traffic)
    begun: set[str] = field(default_factory=set)
    """The keys that this rank has begun to push, if it was added."""
    name: str = field(init=False)
    """The store's name, the same on every rank."""
    ordered: bool = field(init=False)
    """Whether push numbers are round numbers."""
    skips_rounds: bool = field(init=False)
    """Whether rounds close without ranks that are late."""
    plans: dict[tuple[str, ...], TransferPlan] = field(default_factory=dict)
    """Names of keys -> their plan, as long as it is so."""
    kept: KeptValues | None = None
    """The values that this worker was told last; None for a store that does not rebuild."""
    beginning: Beginning = field(default_factory=Beginning)
    placed: set[str] = field(default_factory=set)
    """The keys whose pushes are known to begin where this rank's predecessor stopped, or are meant not to."""
    tracker: Callable[..., Any] | None = None
    """Makes the trackers of reads whose values are kept; None for a store that does not rebuild."""
    lost: ServerLost | None = None
    """The loss of a server that has taken a part of the store with it; None if none has."""

    def __post_init__(self) -> None:
        self.name, self.ordered = self.opened.store, self.opened.mode == "sync"
        self.skips_rounds = self.opened.quorum > 0
        self.is_away, self.has_entered = self.is_added, not self.is_added

    @property
    def begins_alike(self) -> bool:
        """Whether this rank was added, and begins with one round on all parts of its keys."""
        return self.is_added and self.has_entered and self.ordered and not self.skips_rounds

    @property
    def label(self) -> str:
        """The name by which the scheduler knows this life of the store."""
        return label_of(self.name, self.opened.life)

    @property
    def pushed(self) -> int:
        """Number of rounds that this rank has pushed for; 0 where there are no rounds."""
        return max([key.number for key in self.keys.values()], default=0) if self.ordered else 0

    @property
    def pushes(self) -> int:
        """Number of pushes of the key that this rank has pushed most often, in a store of any kind."""
        return max([key.number for key in self.keys.values()], default=0)

    def figures(self) -> dict[str, float]:
        """Return the numbers of this store for :meth:`kvps.KVStore.metrics`."""
        ours = self.traffic
        return {
            "rounds": self.pushes,
            "push_age": max([key.age for key in self.keys.values()], default=0),
            "keys": len(self.keys),
            "sent_bytes": ours.sent_bytes,
            "received_bytes": ours.received_bytes,
            "compression_ratio": ours.compression_ratio,
            "resent_requests": ours.resent,
        }

    @property
    def waits_for_lost(self) -> bool:
        """Whether a lost worker matters to the others: they wait for it, or are to fail."""
        policy = self.opened.on_worker_lost
        return policy == "fail" or (self.ordered and policy == "wait")

    @property
    def takes_pushes(self) -> bool:
        """Whether the servers are known to have what a push needs.

        Where each push is applied by itself, that is an optimizer. Another rank may have set it.
        """
        return self.ordered or self.optimized.number > 0 or self.was_pushed_to

    @property
    def optimizer_calls(self) -> int:
        """Number of times that the optimizer was set, as far as this rank can know.

        A rank that took another's place sets it again as it begins, which no other rank does: its own count
        may be ahead of theirs. It knows only that there is an optimizer.
        """
        number = self.optimized.number
        return min(number, 1) if self.is_resumed and self.rank != 0 else number

    def everywhere(self, message: Message) -> list[Request]:
        """Return the requests that send ``message`` to every server, in the order of their ranks."""
        return [Request(server, message) for server in range(self.servers)]

    def next_call(self, last: Made) -> Made:
        """Return the next call of a kind whose ``last`` was this.

        A rank that took another's place makes its predecessor's last call again if it comes after
        as many rounds: some servers may not have heard of it. Where there are no rounds that is
        unknown, so it counts as another call; its ``after`` then says that it need not agree.
        """
        base = self.joins * CALLS_PER_JOIN
        number = max(last.number, base) + 1
        if not self.ordered:
            return Made(number, int(self.is_resumed and self.rank == 0))
        is_again = last.is_inherited and last.number > base and last.after == self.pushed
        return Made(last.number if is_again else number, self.pushed)

    def plan(self, names: tuple[str, ...]) -> TransferPlan:
        """Return the plan of ``names``, made once.

        Raises:
            KeyNotFound: if one of them is unknown here.
        """
        plan = self.plans.get(names)
        if plan is None:
            plan = make([self.key(name) for name in names], self.rank, self.feedback.rules)
            if len(self.plans) >= 4 * len(self.keys) + 16:
                self.plans.clear()
            self.plans[names] = plan
        return plan

    def compress(self, rules: CompressionPolicy) -> None:
        """Compress by ``rules`` from the next push on."""
        self.feedback.use(rules)
        self.plans.clear()

    def pushed_shares(self, plan: TransferPlan) -> list[ChunkSlice]:
        """Return the shares of ``plan`` that is to be pushed, some of which are encoded.

        A push that may be refused is not compressed: what was encoded of it would be gone from the
        residual.
        """
        is_safe = self.takes_pushes or any(key.applied for key in plan.keys)
        return plan.shares if is_safe else make(plan.keys, self.rank).shares

    def key(self, name: str) -> Key:
        """Return one key.

        Raises:
            KeyNotFound: if it is unknown here.
        """
        key = self.keys.get(name)
        if key is None and name.startswith(EMBEDDING):
            title = name.removeprefix(EMBEDDING)
            raise KeyNotFound(
                f"the servers have no table {title!r} of store {self.name!r}; call "
                f"embedding({title!r}, ...) on every worker"
            )
        if key is None:
            raise KeyNotFound(never_initialised(name, self.name))
        return key

    def versions(self) -> dict[str, int]:
        """Return the highest version of each key that this rank knows of."""
        return {key.name: key.applied if self.ordered else key.version for key in self.keys.values()}

    def pushed_versions(self) -> dict[str, float]:
        """Return the version of each key that holds all pushes of this rank; infinity where none
        is known to."""
        return {
            key.name: key.number if self.ordered else math.inf for key in self.keys.values() if key.number
        }

    def forget(self) -> None:
        """Forget all that was counted here, after a rollback."""
        self.feedback.begin_anew()
        if self.kept is not None:
            self.kept.clear()
        self.keys.clear()
        self.barriers.clear()
        self.attempts.clear()
        self.plans.clear()
        self.optimized = self.rated = NONE
        self.broadcasts = self.joins = 0
        self.joins_told = -1
        self.begun.clear()
        self.is_resumed = self.is_replaying = self.was_pushed_to = False
        self.is_away, self.has_entered = self.is_added, not self.is_added

    def parts(self, key: str, spec: Spec) -> tuple[Part, ...]:
        """Return which elements of a key belong on which server."""
        return parts(key, spec.count, self.servers, self.opened.bigarray_bound, spec.width)

    def place(self, placed: Iterable[tuple[str, Spec, Iterable[PieceLocation]]]) -> None:
        """Remember where keys lie. The counters of a key stay, unless its spec is another now."""
        for name, spec, pieces in placed:
            key = self.keys.get(name)
            if key is None or key.spec != spec:
                # While a rank was away, the others may have pushed what it sees for the first time;
                # and what comes from a checkpoint was pushed to before.
                is_old = self.restored > 0 or (self.ordered and self.joins > 0) or self.is_added
                self.keys[name] = key = Key(name, spec, is_refused=is_old)
            key.pieces = tuple(pieces)
            self.feedback.forget([name])
        self.plans.clear()


def of_beat(stores: Mapping[str, WorkerStore]) -> BeatFigures:
    """Return the numbers of a worker for its next BEAT."""
    return BeatFigures(
        rounds=max([store.pushes for store in stores.values()], default=0),
        in_bytes=sum([store.traffic.received_bytes for store in stores.values()]),
        out_bytes=sum([store.traffic.sent_bytes for store in stores.values()]),
        goes_on=any(store.opened.on_worker_lost == "shrink" for store in stores.values()),
        replayed=sum([store.replayed for store in stores.values() if store.is_replaying]),
        rebuilds=bool(stores) and all(store.kept is not None for store in stores.values()),
    )
