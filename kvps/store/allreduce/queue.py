"""The queue of collectives of an allreduce store: one thread makes them in the script's order.

Collectives have no names: the k-th of a rank meets the k-th of every other. So they may not overtake each
other, and one thread makes them. The script goes on meanwhile, and waits for a *turn* when it needs its
result. A turn whose wait timed out is not cancelled, since the others count on it.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from kvps.errors import ConfigError, KvpsError, Timeout, WorkerLost

PENDING_MAX = 64
"""How many turns may wait to be made; the next one waits to be asked for."""


class Collective:
    """One call that all ranks make together, and what came of it."""

    def __init__(self, words: str, make: Callable[[], list[torch.Tensor]]) -> None:
        self.words = words
        """What the script called, for people."""
        self.make = make
        self.rows: list[torch.Tensor] = []
        """One per key; they never change."""
        self.versions: list[int] = []
        self.places: dict[str, int] = {}
        """Of each key its place in these two."""
        self.error: KvpsError | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.on_error: Callable[[KvpsError], None] = lambda _: None
        """Both are called by the thread that makes turns, before anybody who waits goes on."""
        self._ended = threading.Event()

    def row(self, name: str) -> torch.Tensor:
        """Return the value that it made for a key."""
        return self.rows[self.places[name]]

    def version(self, name: str) -> int:
        """Return the version of that value."""
        return self.versions[self.places[name]]

    @property
    def is_over(self) -> bool:
        """Whether it was made, or has failed."""
        return self._ended.is_set()

    def wait(self, limit_s: float) -> bool:
        """Wait for the end; return False if it does not come in time."""
        return self._ended.wait(limit_s)

    def end(self, error: KvpsError | None) -> None:
        """It was made, or has failed."""
        self.error = error
        self.make = list  # what it held is not needed any more
        on_end, self.on_end = self.on_end, lambda: None  # it may hold this turn, and that its rows
        on_end()
        if error is not None:
            self.on_error(error)
        self._ended.set()


class CollectiveQueue:
    """Makes turns one after the other."""

    def __init__(self, name: str) -> None:
        self.now: Collective | None = None
        """The one that is being made."""
        self.since = 0.0
        """When it was begun, by time.monotonic()."""
        self._name = name
        self._pid = os.getpid()
        self._queue: queue.Queue[Collective | None] = queue.Queue(PENDING_MAX)
        self._last: Collective | None = None
        self.over: KvpsError | None = None
        """What all turns fail with from now on."""
        self._thread = threading.Thread(target=self._run, name=f"kvps {name}", daemon=True)
        self._thread.start()

    def add(self, turn: Collective, limit_s: float) -> Collective:
        """Have ``turn`` made after all that were added before.

        Raises:
            Timeout: if too many wait already.
            ConfigError: in a process that was forked from the one that made the store.
        """
        if os.getpid() != self._pid:
            raise ConfigError(
                f"store {self._name!r} was made in process {self._pid} and is used in {os.getpid()} "
                "after a fork; use stores only in the process that made them"
            )
        try:
            self._queue.put(turn, timeout=limit_s)
        except queue.Full:
            raise Timeout(
                f"store {self._name!r}: {turn.words}: {PENDING_MAX} calls before it wait for other "
                f"ranks, for {limit_s:g} s now. This one was not begun; call it again"
            ) from None
        self._last = turn
        return turn

    def fail(self, error: KvpsError) -> None:
        """End all turns that come from now on with ``error``."""
        self.over = self.over or error

    def flush(self, limit_s: float) -> bool:
        """Wait until all that were added are over; return False if that takes longer."""
        return self._last is None or self._last.wait(limit_s)

    def stop(self, limit_s: float) -> bool:
        """End the thread behind the last turn; return False if it still runs."""
        self.fail(ConfigError(f"store {self._name!r} is closed; create another one"))
        with suppress(queue.Full):
            self._queue.put(None, timeout=limit_s)
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with torch.no_grad():  # values may be parameters
            while (turn := self._queue.get()) is not None:
                self.since, self.now = time.monotonic(), turn
                turn.end(self._made(turn))
                self.now = None
                del turn  # its rows live as long as somebody wants them

    def _made(self, turn: Collective) -> KvpsError | None:
        if self.over is not None:
            return self.over
        try:
            turn.rows = turn.make()
        except WorkerLost as error:
            self.fail(error)  # the ring is broken
            return error
        except KvpsError as error:
            return error
        except Exception as error:  # those who wait must be told, whatever it is
            self.fail(KvpsError(f"store {self._name!r}: {turn.words} failed: {error!r}"))
            return self.over
        return None
