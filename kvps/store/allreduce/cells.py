"""The newest value of each key of an allreduce store, and the collective that makes it.

A pull takes the newest turn of its keys when it is called, and waits for that one, whatever is pushed
later. If a turn fails, its keys fall back to the value that they had.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvps.errors import KeyNotFound
from kvps.phrases import never_initialised
from kvps.runtime.ticket import Ticket
from kvps.store.allreduce.queue import Collective, CollectiveQueue


class Cells:
    """The values of all keys, made or being made."""

    def __init__(self, turns: CollectiveQueue) -> None:
        self._turns = turns
        self._newest: dict[str, Collective] = {}
        self._made: dict[str, Collective] = {}
        self._mutex = threading.Lock()
        """Held to change these two."""
        self._order = threading.Lock()
        """Held while a turn is added, so that the newest is the last one."""

    def __contains__(self, name: str) -> bool:
        return name in self._newest

    def of(self, names: Sequence[str]) -> list[Collective]:
        """Return the turn that makes the newest value of each key.

        Raises:
            KeyNotFound: if there is none.
        """
        found = [self._newest.get(name) for name in names]
        known = [turn for turn in found if turn is not None]
        if len(known) < len(found):
            raise KeyNotFound(never_initialised(names[found.index(None)]))
        return known

    def begin(
        self, turn: Collective, names: Sequence[str], step: int, limit_s: float
    ) -> Collective:
        """Begin a turn that makes the next value of ``names``, in this order.

        Args:
            turn: which has not been begun.
            names: of the keys.
            step: how many pushes it adds to their versions.
            limit_s: how long it may take until it can be begun.

        Raises:
            Timeout: if too many wait already.
        """

        def end() -> None:
            with self._mutex:
                if turn.error is not None:
                    self._fall_back(turn, names)
                    return
                old = [self._made.get(name) for name in names]
                turn.versions = [
                    step if one is None else step + one.version(name)
                    for name, one in zip(names, old, strict=True)
                ]
                self._made.update(dict.fromkeys(names, turn))

        turn.places = {name: index for index, name in enumerate(names)}
        turn.on_end = end
        with self._order:
            self._turns.add(turn, limit_s)
            with self._mutex:
                if turn.error is None:
                    self._newest.update(dict.fromkeys(names, turn))
        return turn

    def _fall_back(self, turn: Collective, names: Sequence[str]) -> None:
        for name in names:
            if self._newest.get(name) is turn:
                del self._newest[name]
                if name in self._made:
                    self._newest[name] = self._made[name]


class CollectiveTicket(Ticket):
    """A call that waits for turns that were begun before."""

    def __init__(
        self,
        names: Sequence[str],
        turns: Sequence[Collective],
        limit_s: float,
        wait: Callable[[Collective, float, float], None],
    ) -> None:
        """Wait for the values of some keys.

        Args:
            names: of the keys.
            turns: of each key the one that makes its value.
            limit_s: how long it may take.
            wait: called with a turn, the seconds left and ``limit_s``; raises what the turn failed with.
        """
        super().__init__()
        self._names = names
        self._turns = turns
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._wait = wait
        self.copied()

    @property
    def is_over(self) -> bool:
        """Whether all turns are over, or its time is."""
        return time.monotonic() > self._deadline or all(turn.is_over for turn in self._turns)

    def wait(self) -> object:
        """Wait; return the keys' values, which never change.

        Raises:
            KvpsError: if a turn failed; Timeout, naming who is missing.
        """
        if self.value is None:
            for turn in dict.fromkeys(self._turns):
                self._wait(turn, self._deadline - time.monotonic(), self._limit_s)
            pairs = zip(self._names, self._turns, strict=True)
            self.value = [turn.row(name) for name, turn in pairs]
        return self.value
