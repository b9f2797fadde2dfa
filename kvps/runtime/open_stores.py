"""The stores that a script left open, closed when its process or LocalCluster worker ends."""

from __future__ import annotations

import atexit
import logging
import os
from typing import Protocol

from kvps.errors import KvpsError
from kvps.runtime.worker_session import end_process, ending

log = logging.getLogger("kvps")


class Endable(Protocol):
    """A store that has something to let go of."""

    @property
    def name(self) -> str:
        """Its name."""

    def close(self) -> None:
        """Flush, and let go."""

    def abandon(self) -> None:
        """Let go without waiting; again: nothing."""


class OpenStores:
    """The open stores of one worker that no session ends."""

    def __init__(self) -> None:
        self._open: list[Endable] = []

    @property
    def names(self) -> set[str]:
        """Return the names of the open stores."""
        return {store.name for store in self._open}

    def watch(self, store: Endable) -> None:
        """``store`` is open."""
        self._open.append(store)

    def forget(self, store: Endable) -> None:
        """It is closed."""
        if store in self._open:
            self._open.remove(store)

    def end(self, is_done: bool) -> None:
        """Close all stores; ``is_done`` says that the script succeeded: calls in flight are completed.

        Raises:
            KvpsError: if a store could not be flushed; the first one, when all have let go.
        """
        errors = []
        for store in list(self._open):
            try:
                if is_done:
                    store.close()
            except KvpsError as error:
                errors.append(error)
            store.abandon()
        if errors:
            raise errors[0]


class AtExit(OpenStores):
    """The open stores of a process, which end with it."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = 0

    def watch(self, store: Endable) -> None:
        """``store`` is open."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            ending.watch()
            atexit.register(self._at_exit)
        super().watch(store)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a fork, which has none of the threads that would be waited for
        try:
            self.end(ending.exit_code == 0)
        except KvpsError as error:
            log.error("at exit: %s", error)  # the text says all
            end_process(1)
