"""Halts of a worker: quiescence, so that a cut falls between two of its steps.

In a synchronous store a *step* lies between two rounds: when it ends, all keys that move together have been
pushed equally often. Nobody tells the core where that is, so it is read off the push numbers. A worker stands
when no key is one push behind the leading one, when a push begins that would take the lead further, or when
its script waits for the cut itself. A worker that does not stand reports its number: it may wait for the
pushes of a worker that stands, which then continues to that number. Where each push is applied by itself
there are no steps, and a worker may stand at any time.

Some other calls change values, too: they create, replace or optimize, and are made by rank 0 or by the
creator that the call names. They are held as pushes are. Calls that only read go on, unless an earlier call
of their store is held: calls keep their order.

Nobody waits for a cut for long. A worker goes on by itself when it has stood for
:data:`STAND_MAX_S`, when a held call comes close to its deadline, or when the scheduler is silent.
It also does so when it opens a synchronous store: it stood without it, and other ranks may wait in
a step of that store for its pushes. It says so, and that cut is given up.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvps.core.worker.calls.base import Call, PushCall
from kvps.core.worker.gate import DeferredCall
from kvps.core.worker.store import WorkerStore
from kvps.protocol.checkpoint import Halt, Proceed

STAND_MAX_S = 35.0
"""Longest halt, in seconds, where all stores are synchronous: their ranks wait for each other
anyway. Longer than the scheduler waits."""
FREE_STAND_MAX_S = 3.0
"""Longest halt, in seconds, where some store has no rounds."""
SILENCE_MAX_S = 3.0
"""Longest silence of the scheduler, in seconds, during a halt: it answers a beat every second."""
PATIENCE_S = 1.0
"""Seconds before its deadline at which a held call goes on."""


class Quiesce:
    """The halt of this worker, and the calls that it holds back: a gate of calls."""

    def __init__(self, stores: Mapping[str, WorkerStore]) -> None:
        self._stores = stores
        self.cut = 0
        """The cut for which it halts, or halted last."""
        self.is_on = False
        """It halts."""
        self.is_asked = False
        """The scheduler waits to hear that it stands."""
        self.stood = True
        """It did not go on by itself."""
        self.held: list[DeferredCall] = []
        self._limits: dict[str, int] = {}
        """Synchronous store -> how many pushes of a key may be begun."""
        self._until = 0.0

    def halt(self, order: Halt, now: float) -> list[DeferredCall]:
        """Halt, or halt later than was said before; an order of a cut that is over is none.

        Returns:
            The calls that were held until now; they are to be made again, and may be held again.
        """
        if order.cut < self.cut or (order.cut == self.cut and not self.is_on):
            return []
        if order.cut > self.cut:
            self.cut, self.is_on, self.stood, self._limits = order.cut, True, True, {}
            free = any(not store.ordered for store in self._stores.values())
            self._until = now + (FREE_STAND_MAX_S if free else STAND_MAX_S)
        self.is_asked = True
        for name, store in self._stores.items():
            if store.ordered:
                least = max(order.least.get(name, 0), self._limits.get(name, 0))
                self._limits[name] = max(least, store.pushes)
        held, self.held = self.held, []
        return held

    @property
    def is_shut(self) -> bool:
        """Whether it halts, and may stop a call."""
        return self.is_on

    def stops(self, deferred: DeferredCall, now: float) -> bool:
        """Whether a call has to wait; then it is held."""
        store = self._stores.get(deferred.call.store)
        is_held = store is not None and self.holds(store, deferred.call)
        if is_held:
            self.held.append(deferred)
        return is_held

    def holds(self, store: WorkerStore, call: Call) -> bool:
        """Whether a call has to wait during the halt."""
        if any(deferred.call.store == call.store for deferred in self.held):
            return True
        if isinstance(call, PushCall):
            limit = self._limits.get(call.store, 0) if store.ordered else 0
            return any(store.keys[name].number >= limit for name in call.keys if name in store.keys)
        is_creating = call.is_creating(store.rank) and not call.is_redundant(store)
        return is_creating and (not store.ordered or self._stands(call.store, store))

    def numbers(self) -> dict[str, int]:
        """Return how many pushes of the leading key were made, by synchronous store.

        A store that has joined is left out: the others' rounds close without this rank.
        """
        ordered = [(name, store) for name, store in self._stores.items() if store.ordered]
        return {name: store.pushes for name, store in ordered if not store.is_away}

    def stands(self, is_at_rest: bool) -> bool:
        """Whether it is in no step; a script that waits for a cut itself ``is_at_rest``."""
        ordered = [(name, store) for name, store in self._stores.items() if store.ordered]
        return all(self._stands(name, store, is_at_rest) for name, store in ordered)

    def _stands(self, name: str, store: WorkerStore, is_at_rest: bool = False) -> bool:
        limit = self._limits.get(name, 0)
        if store.is_away:
            return True
        if store.pushes < limit:
            return False
        waits = is_at_rest or any(deferred.call.store == name for deferred in self.held)
        return waits or not any(key.number == limit - 1 for key in store.keys.values())

    def deadline(self, heard_at: float) -> float:
        """When it goes on by itself, if the scheduler was last heard at ``heard_at``."""
        soonest = min(self._until, heard_at + SILENCE_MAX_S)
        return min([soonest, *(deferred.deadline - PATIENCE_S for deferred in self.held)])

    def is_impatient(self, heard_at: float, now: float) -> bool:
        """Whether it is to :meth:`break_off` now."""
        return self.is_on and now >= self.deadline(heard_at)

    def break_off(self) -> list[DeferredCall]:
        """Go on by itself, so that the cut will be given up; return the calls that were held."""
        self.stood = False
        return self.go_on()

    def proceed(self, order: Proceed) -> tuple[bool, list[DeferredCall]]:
        """The cut is taken, or given up: return whether this worker stood, and the calls that were held."""
        if order.cut > self.cut:
            self.cut, self.stood = order.cut, False
        return self.stood and order.cut == self.cut, self.go_on()

    def go_on(self) -> list[DeferredCall]:
        """Stand no more; return the calls that were held."""
        self.is_on = self.is_asked = False
        held, self.held = self.held, []
        return held
