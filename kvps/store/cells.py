"""Which turn makes the newest value of each key of an allreduce store, and which made the last one.

A pull takes the newest turn of its keys when it is called, and waits for that one, whatever is pushed
later. If a turn fails, its keys fall back to the value that they had.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvps.errors import KeyNotFound
from kvps.store.handle import Ticket
from kvps.store.turns import Turn, Turns

Cell: TypeAlias = tuple[Turn, int]
"""A turn, and the place of a key among those it makes values for."""


class Cells:
    """The values of all keys, made or being made."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._newest: dict[str, Cell] = {}
        self._made: dict[str, Cell] = {}
        self._mutex = threading.Lock()
        """Held to change these two."""
        self._order = threading.Lock()
        """Held while a turn is added, so that the newest cell is of the last one."""

    def __contains__(self, name: str) -> bool:
        return name in self._newest

    def of(self, names: Sequence[str]) -> list[Cell]:
        """Return the newest cell of each key.

        Raises:
            KeyNotFound: if there is none.
        """
        found = []
        for name in names:
            cell = self._newest.get(name)
            if cell is None:
                raise KeyNotFound(
                    f"key {name!r} was never initialised here; call init({name!r}, value) on every "
                    "rank"
                )
            found.append(cell)
        return found

    def begin(self, turn: Turn, names: Sequence[str], step: int, limit_s: float) -> Turn:
        """Begin a turn that makes the next value of ``names``, in this order.

        Args:
            turn: which has not been begun.
            names: of the keys.
            step: how many pushes it adds to their versions.
            limit_s: how long it may take until it can be begun.

        Raises:
            Timeout: if too many wait already.
        """
        cells = {name: (turn, index) for index, name in enumerate(names)}

        def end() -> None:
            with self._mutex:
                if turn.error is not None:
                    self._fall_back(turn, names)
                    return
                old = [self._made.get(name) for name in names]
                turn.versions = tuple(
                    step + one[0].versions[one[1]] if one is not None else step for one in old
                )
                self._made.update(cells)

        turn.on_end = end
        with self._order:
            self._turns.add(turn, limit_s)
            with self._mutex:
                if turn.error is None:
                    self._newest.update(cells)
        return turn

    def _fall_back(self, turn: Turn, names: Sequence[str]) -> None:
        for name in names:
            if name in self._newest and self._newest[name][0] is turn:
                del self._newest[name]
                if name in self._made:
                    self._newest[name] = self._made[name]


class Awaited(Ticket):
    """A call that waits for turns that were begun before."""

    def __init__(
        self,
        cells: Sequence[Cell],
        limit_s: float,
        wait: Callable[[Turn, float, float], None],
    ) -> None:
        """Wait by ``wait(turn, seconds left, limit_s)``, which raises what the turn failed with."""
        super().__init__()
        self._cells = cells
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._wait = wait
        self.copied()

    @property
    def is_over(self) -> bool:
        """Whether all turns are over, or its time is."""
        return time.monotonic() > self._deadline or all(turn.is_over for turn, _ in self._cells)

    def wait(self) -> object:
        """Wait; return the keys' values, which never change.

        Raises:
            KvpsError: if a turn failed; Timeout, naming who is missing.
        """
        if self.value is None:
            for turn in {id(turn): turn for turn, _ in self._cells}.values():
                self._wait(turn, self._deadline - time.monotonic(), self._limit_s)
            self.value = [turn.rows[index] for turn, index in self._cells]
        return self.value
