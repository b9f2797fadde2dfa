"""The steps of a front end whose optimizer runs on the servers, and the place of a lost worker among them.

A step is made, or, where this worker replaces a lost worker, passed over until the step of the others
(:mod:`kvps.store.catch_up`). Which of the two is chosen at the beginning, and again when the
replay is over: a worker that replaces nobody asks nothing in its steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvps.store.base import Store
from kvps.store.kvstore import KVStore
from kvps.store.server_store import DistStore

log = logging.getLogger("kvps")

Make = Callable[..., object]
"""Makes a step; called with the front end, and what its ``step()`` was given."""
Drop = Callable[..., float | None]
"""Drops what the script has computed for a step that is passed over; returns the script's learning
rate, if servers have it."""


class Steps:
    """The steps of one front end.

    Args:
        stores: one, or several that take turns: the k-th step pushes the keys of store ``k % len(stores)``.
        keys: returns the keys of each store that a step pushes.
    """

    def __init__(self, stores: Sequence[Store | None], keys: Callable[[], Sequence[Sequence[str]]]) -> None:
        self._stores = stores
        self._keys = keys
        self._unit = "steps"
        self.made = 0
        """The number of completed steps of this rank, the steps of a lost worker among them."""

    def begin(self, unit: str = "steps") -> None:
        """Find where this process begins; a replacement replays, unless :meth:`resume` follows.

        Args:
            unit: what the front end calls its steps.
        """
        self._unit = told = unit
        owed = 0
        for kv, keys in zip(self._stores, self._keys(), strict=True):
            if isinstance(kv, DistStore):
                owed += kv.take_place(keys, told).owed
                told = ""  # one store tells of it
            elif isinstance(kv, KVStore):
                owed += kv.resume(list(keys))
        self.made = 0 if self.is_behind else owed

    def choose(self, make: Make, drop: Drop, arrive: Callable[..., object]) -> None:
        """Choose how steps are made.

        Args:
            make: makes a step.
            drop: makes none.
            arrive: called with the front end behind the last step that is passed over: takes the
                newest weights.
        """
        self._make, self._drop, self._arrive = make, drop, arrive
        self._run: Make = self._pass_over if self.is_behind else make

    @property
    def is_behind(self) -> bool:
        """Whether this worker replaces a lost worker, and its script runs again towards the step
        of the others."""
        return any(isinstance(kv, KVStore) and kv.catch_up is not None for kv in self._stores)

    def run(self, front: object, *given: object) -> None:
        """Make the next step of ``front``, or pass over it."""
        self._run(front, *given)
        self.made += 1

    def owed(self) -> list[int]:
        """Return for each store the number of the push that this rank owes next, and begin with it."""
        owed = [
            kv.resume(list(keys)) if isinstance(kv, KVStore) else 0
            for kv, keys in zip(self._stores, self._keys(), strict=True)
        ]
        self.made = sum(owed)
        return owed

    def resume(self) -> int:
        """Return the number of steps that this rank has made, and begin with the next."""
        return sum(self.owed())

    def _pass_over(self, front: object, *given: object) -> None:
        """Make no step: the lost worker, which this one replaces, has made it."""
        if self.is_behind:
            rate = self._drop(front, *given)
            kv = self._stores[self.made % len(self._stores)]
            assert isinstance(kv, DistStore)
            kv.pass_over()
            self._catch_up(front, rate)
        else:  # the script has called resume()
            self._make(front, *given)
        if not self.is_behind:
            self._run = self._make

    def _catch_up(self, front: object, rate: float | None) -> None:
        """End the replay behind its last step."""
        waiting = {
            kv: kv.catch_up for kv in self._stores if isinstance(kv, DistStore) and kv.catch_up is not None
        }
        if not all(catch_up.is_over for catch_up in waiting.values()):
            return
        for kv, catch_up in waiting.items():
            # What the others want of the optimizer does not count.
            if kv.rank == 0 and rate is not None:
                catch_up.check_rate(rate)
            kv.end_replay()
        self._arrive(front)
        log.warning("this worker has reached the others after %d %s", self.made + 1, self._unit)


class Resumable:
    """A front end whose optimizer may run on servers, so that a replacement of a lost worker goes
    on where it was."""

    _steps: Steps

    def resume(self) -> int:
        """Return the number of steps that this worker has made: where a replacement of a lost worker begins.

        It is 0 in a new job. A script that begins at this step spares a replacement the earlier
        steps, which are otherwise computed again and passed over. Call it once, before the first step.

        Example:
            >>> start = trainer.resume()  # doctest: +SKIP
            >>> for step in range(start, steps): ...  # doctest: +SKIP
        """
        return self._steps.resume()
