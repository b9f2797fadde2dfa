"""The gates of a worker: they stop a call before it begins, with an error or until they open.

Only gates that are shut are asked. A job in which nobody is lost, no cut is taken and no server has rolled
back has none. The third gate is :class:`~kvps.core.worker.quiesce.Quiesce`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvps.core.effects import Finish, Outbox
from kvps.core.membership_client import MembershipClient
from kvps.core.worker.calls.base import Call, PushCall
from kvps.core.worker.calls.collective import Flush, JoinStore
from kvps.core.worker.calls.keys import OpenStore
from kvps.core.worker.calls.resume import TakePlace
from kvps.core.worker.connection import Connection
from kvps.core.worker.failure_policy import FailurePolicy
from kvps.core.worker.store import WorkerStore
from kvps.errors import ConfigError, EpochChanged, KvpsError
from kvps.phrases import some_of

ENTERING = (PushCall, JoinStore, TakePlace)
"""The calls with which an added worker begins to take part."""
NAMED_MAX = 3
"""Most keys that the text names."""


@dataclass(frozen=True, slots=True)
class DeferredCall:
    """A call that is held back."""

    ticket: int
    call: Call
    deadline: float


class Gate(Protocol):
    """A reason for which calls may not begin."""

    @property
    def is_shut(self) -> bool:
        """Whether it may stop a call."""

    def stops(self, deferred: DeferredCall, now: float) -> bool:
        """Whether a call does not begin now: the gate has ended it, or holds it."""


class Gates:
    """All gates of a worker, in the order in which a call passes them."""

    def __init__(self, *gates: Gate) -> None:
        self._all = gates
        self.shut: tuple[Gate, ...] = ()

    def look(self) -> None:
        """Take in that a gate may have been opened or shut."""
        self.shut = tuple([gate for gate in self._all if gate.is_shut])

    def stop(self, deferred: DeferredCall, now: float) -> bool:
        """Have the gates that are shut stop a call; return whether one does."""
        is_stopped = any(gate.stops(deferred, now) for gate in self.shut)
        self.look()
        return is_stopped

    def check(self) -> None:
        """Assert the invariant."""
        assert [gate for gate in self._all if gate.is_shut] == list(self.shut)


class Lost:
    """The gate of a worker that is no member, or whose servers or other workers are lost."""

    def __init__(
        self,
        member: MembershipClient,
        links: Sequence[Connection],
        losses: FailurePolicy,
        stores: Mapping[str, WorkerStore],
        outbox: Outbox,
    ) -> None:
        self._member, self._links, self._losses = member, links, losses
        self._stores, self._outbox = stores, outbox

    @property
    def is_shut(self) -> bool:
        """Whether it may stop a call."""
        is_any = self._losses.is_any or any(store.lost is not None for store in self._stores.values())
        return self._member.error is not None or not self._links or is_any

    def stops(self, deferred: DeferredCall, now: float) -> bool:
        """Whether a call cannot even begin; then it has ended."""
        error = self._error_of(deferred.call, now)
        if error is not None:
            self._outbox.append(Finish(deferred.ticket, error=error))
        return error is not None

    def _error_of(self, call: Call, now: float) -> KvpsError | None:
        if self._member.error is not None:
            return self._member.error
        if self._links:
            rebuilds = isinstance(call, OpenStore) and call.opened.rebuilds
            return self._losses.error(self._stores.get(call.store), now, rebuilds=rebuilds)
        welcome = self._member.welcome
        if welcome is not None and welcome.servers == 0:
            return ConfigError(
                f"{call.title}: this job has no servers. Start kvps-launch with -s 1 or more "
                "(kvps-scheduler with --servers), or use the store 'allreduce', which needs none"
            )
        return ConfigError(f"{call.title}: no server has joined yet. Wait until the cluster is complete")


@dataclass(slots=True)
class StoreResync:
    """One store on its way into a new epoch."""

    before: dict[str, int]
    """Key -> the version that this rank had seen."""
    optimize_calls: int
    """Number of times that the optimizer was set, as far as this rank could know."""
    pushed: dict[str, float] = field(default_factory=dict)
    """Key -> the version that holds all pushes of this rank."""
    held: list[DeferredCall] = field(default_factory=list)
    """Calls that were under way, and calls that came since."""
    after: dict[str, int] = field(default_factory=dict)
    """Key -> the version that the servers have now."""

    def ends(self, call: Call) -> bool:
        """Whether a call is to be told: each but a flush of pushes that the servers hold."""
        is_lost = any(self.after.get(name, 0) < version for name, version in self.pushed.items())
        return is_lost or not isinstance(call, Flush)


class Resyncing:
    """The gate of stores that have not found their way into the epoch, or whose user was not told of it.

    All requests under way are void after a rollback, and so is all that was counted: the keys lie elsewhere
    now, at earlier versions. So a store *rejoins*: it opens itself anew, finds its keys, and numbers its
    pushes by what the servers say this rank owes. Calls that come meanwhile wait. Then the user is told,
    once: calls that were under way end with :class:`~kvps.errors.EpochChanged`; without any, the next call
    does. A store that knew no key has nothing to tell, and its calls are made again.
    """

    def __init__(self, stores: Mapping[str, WorkerStore], outbox: Outbox) -> None:
        self.rejoins: dict[str, StoreResync] = {}
        """The stores that do not know yet where their keys are in this epoch."""
        self.untold: dict[str, StoreResync] = {}
        """Store -> the rejoin that its next call is to be told of."""
        self.epoch = 0
        """The epoch of the view by which this worker goes."""
        self._stores, self._outbox = stores, outbox

    @property
    def is_shut(self) -> bool:
        """Whether it may stop a call."""
        return bool(self.rejoins or self.untold)

    def stops(self, deferred: DeferredCall, now: float) -> bool:
        """Whether a call waits for its store, or was told of the epoch."""
        name = deferred.call.store
        if name in self.rejoins:
            self.rejoins[name].held.append(deferred)
            return True
        if name in self.untold and self.untold[name].ends(deferred.call):
            error = epoch_changed(self._stores[name], self.epoch, self.untold.pop(name))
            self._outbox.append(Finish(deferred.ticket, error=error))
            return True
        return False

    def begin(self, store: WorkerStore) -> StoreResync:
        """Have a store rejoin; return the resync."""
        if store.name not in self.rejoins:  # else this is the second loss in a row
            new = StoreResync(store.versions(), store.optimizer_calls, store.pushed_versions())
            self.rejoins[store.name] = self.untold.pop(store.name, new)
        return self.rejoins[store.name]

    def forget(self, name: str) -> None:
        """Note that a store is closed."""
        self.rejoins.pop(name, None)
        self.untold.pop(name, None)

    def held(self) -> Iterator[list[DeferredCall]]:
        """Yield the lists of calls that wait."""
        return (resync.held for resync in self.rejoins.values())


class Entering:
    """The gate of stores in which an added worker takes no part yet: some calls wait for its entry.

    Until then no round waits for this worker. Calls that come while it enters wait behind the first.

    Args:
        resyncing: holds the calls that wait.
        enter: has a store entered.
    """

    def __init__(self, resyncing: Resyncing, enter: Callable[[str, float], None]) -> None:
        self._resyncing, self._enter = resyncing, enter
        self._outside: set[str] = set()

    def look(self, stores: Mapping[str, WorkerStore]) -> None:
        """Take in which stores there are, and whether this worker takes part in each."""
        self._outside = {name for name, store in stores.items() if not store.has_entered}

    @property
    def is_shut(self) -> bool:
        """Whether it may stop a call."""
        return bool(self._outside)

    def stops(self, deferred: DeferredCall, now: float) -> bool:
        """Whether a call waits for the entry into its store."""
        name = deferred.call.store
        if name not in self._outside or not isinstance(deferred.call, ENTERING):
            return False
        self._resyncing.rejoins[name] = StoreResync({}, 0, held=[deferred])
        self._enter(name, now)
        return True


def epoch_changed(store: WorkerStore, epoch: int, resync: StoreResync) -> EpochChanged:
    """Return the error by which the user is told."""
    moved = [
        f"{name!r} {version} -> {resync.after.get(name, 'absent')}" for name, version in resync.before.items()
    ]
    return EpochChanged(
        f"a server was lost, and all servers rolled back to the last checkpoint (epoch {epoch}): "
        f"keys of store {store.name!r} changed ({some_of(moved, NAMED_MAX)}). Pushes since "
        "then are lost, and calls in flight were not carried out. Pull the weights and continue "
        "from there; front ends (Trainer, DistributedOptimizer, LocalSGD, DiLoCo) do so by themselves",
        resync.before,
        resync.after,
        has_optimizer=store.optimized.number >= resync.optimize_calls,
    )
