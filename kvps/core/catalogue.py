"""What a worker knows of one store: its keys, where they lie, and what it has counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvps.core.placement import Part, parts
from kvps.core.plan import Held, Key, Plan, make
from kvps.errors import KeyNotFound
from kvps.messages import Open
from kvps.specs import Spec
from kvps.tensors import PRIVATE, Memory


@dataclass(slots=True)
class Catalogue:
    """One store, as this worker knows it."""

    opened: Open
    rank: int
    servers: int
    worker_grace_s: float
    memory: Memory = PRIVATE
    """Where values are put together that the servers are to read."""
    is_short: bool = False
    """A worker of the job is lost."""
    keys: dict[str, Key] = field(default_factory=dict)
    optimize_calls: int = 0
    rate_calls: int = 0
    broadcasts: int = 0
    """How many were made here; all ranks make the same ones."""
    joins: int = 0
    """How many are over, as this rank knows."""
    is_away: bool = False
    """This rank has joined, and not all others have."""
    barriers: dict[str, int] = field(default_factory=dict)
    """By name, the number of the next."""
    _plans: dict[tuple[str, ...], Plan] = field(default_factory=dict)

    @property
    def ordered(self) -> bool:
        """Whether push numbers are round numbers."""
        return self.opened.mode == "sync"

    @property
    def waits_for_lost(self) -> bool:
        """Whether the others have to wait for the replacement of a lost worker."""
        return self.ordered and self.opened.on_worker_lost != "shrink"

    def plan(self, names: tuple[str, ...]) -> Plan:
        """Return the plan of ``names``, made once.

        Raises:
            KeyNotFound: if one of them is unknown here.
        """
        plan = self._plans.get(names)
        if plan is None:
            plan = make([self.key(name) for name in names], self.rank)
            if len(self._plans) >= 4 * len(self.keys) + 16:
                self._plans.clear()
            self._plans[names] = plan
        return plan

    def key(self, name: str) -> Key:
        """Return one key.

        Raises:
            KeyNotFound: if it is unknown here.
        """
        key = self.keys.get(name)
        if key is None:
            raise KeyNotFound(
                f"key {name!r} of store {self.opened.store!r} was never initialised; call "
                "init(key, value) on every worker first"
            )
        return key

    def parts(self, key: str, spec: Spec) -> tuple[Part, ...]:
        """Return which elements of a key belong on which server."""
        return parts(key, spec.count, self.servers, self.opened.bigarray_bound)

    def place(self, placed: Iterable[tuple[str, Spec, Iterable[Held]]]) -> None:
        """Remember where keys lie. What was counted of a key stays, unless it is another now."""
        for name, spec, pieces in placed:
            key = self.keys.get(name)
            if key is None or key.spec != spec:
                # While a rank was away, the others may have pushed what it sees for the first time.
                self.keys[name] = key = Key(name, spec, is_refused=self.ordered and self.joins > 0)
            key.pieces = tuple(pieces)
        self._plans.clear()
