"""The queue of collectives of an allreduce store: one thread makes them in the script's order.

Collectives have no names: the k-th of a rank meets the k-th of every other. So they may not overtake each
other, and one thread makes them. The script goes on meanwhile, and waits for a collective when it needs its
result. One whose wait timed out is not cancelled, since the others count on it.

The thread is a daemon. That of a ThreadPoolExecutor is joined before anything that atexit would call, so a
script that fails would wait for ranks that never come.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress

import torch

from kvps.errors import ConfigError, KvpsError, Timeout, WorkerLost

PENDING_MAX = 64
"""The number of collectives that may wait to be made; the next call waits until one has been."""


class Collective(Future[list[torch.Tensor]]):
    """One call that all ranks make together; its result is a row for each key, which never changes."""

    def __init__(self, title: str, run: Callable[[], list[torch.Tensor]], names: Sequence[str] = ()) -> None:
        """Describe a call that has not been begun.

        Args:
            title: the call of the script, for people.
            run: makes it, in the queue's thread.
            names: the keys of its rows.
        """
        super().__init__()
        self.title = title
        self.run = run
        self.rows: list[torch.Tensor] = []
        """Its result, for those that know that it is there."""
        self.versions: dict[str, int] = {}
        """Key -> the version of its row."""
        self.places = {name: place for place, name in enumerate(names)}
        """Key -> the place of its row in the result."""
        self.on_error: Callable[[KvpsError], None] = lambda error: None
        """Called by the queue's thread with its error, before any waiting thread continues."""

    def row(self, name: str) -> torch.Tensor:
        """Return the row of a key; call it when the result is there."""
        return self.rows[self.places[name]]

    @property
    def has_failed(self) -> bool:
        """Whether it is over, and has no result."""
        return self.done() and self.exception() is not None

    def wait(self, limit_s: float) -> bool:
        """Wait for the end; return False if it does not come in time."""
        return self.done() or bool(wait((self,), limit_s).done)


class CollectiveQueue:
    """Makes collectives one after the other."""

    def __init__(self, name: str) -> None:
        self.now: Collective | None = None
        """The one that is being made."""
        self.since = 0.0
        """When it was begun, by time.monotonic()."""
        self.over: KvpsError | None = None
        """The error of all collectives from now on."""
        self._name = name
        self._pid = os.getpid()
        self._queue: queue.Queue[Collective | None] = queue.Queue(PENDING_MAX)
        self._last: Collective | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvps {name}", daemon=True)
        self._thread.start()

    def add(self, collective: Collective, limit_s: float) -> Collective:
        """Have ``collective`` made after all that were added before.

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
            self._queue.put(collective, timeout=limit_s)
        except queue.Full:
            raise Timeout(
                f"store {self._name!r}: {collective.title}: {PENDING_MAX} earlier calls have waited for "
                f"other ranks for {limit_s:g} s. This call was not started; call it again"
            ) from None
        self._last = collective
        return collective

    def fail(self, error: KvpsError) -> None:
        """End all collectives that come from now on with ``error``."""
        self.over = self.over or error

    def flush(self, limit_s: float) -> bool:
        """Wait until all that were added are over; return False if that takes longer."""
        return self._last is None or self._last.wait(limit_s)

    def stop(self, limit_s: float) -> bool:
        """End the thread behind the last collective; return False if it still runs."""
        self.fail(ConfigError(f"store {self._name!r} is closed; create another store"))
        with suppress(queue.Full):
            self._queue.put(None, timeout=limit_s)
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with torch.no_grad():  # values may be parameters
            while (collective := self._queue.get()) is not None:
                self.since, self.now = time.monotonic(), collective
                self._make(collective)
                self.now = None
                del collective  # its rows live as long as somebody wants them

    def _make(self, collective: Collective) -> None:
        run, collective.run = collective.run, list  # what it holds is not needed any more
        try:
            if self.over is not None:
                raise self.over
            collective.rows = run()
        except Exception as error:  # those who wait must be told, whatever it is
            if isinstance(error, KvpsError):
                failure = error
            else:
                failure = KvpsError(f"store {self._name!r}: {collective.title} failed: {error!r}")
            if isinstance(error, WorkerLost) or failure is not error:
                self.fail(failure)  # the ring is broken
            collective.on_error(failure)
            collective.set_exception(failure)
        else:
            collective.set_result(collective.rows)
