"""The LocalCluster that this process is inside of, if any.

It stands apart from the cluster's own module: a worker of another cluster asks for it, and should not load
the rules of schedulers and servers to hear that there is none.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from kvps.errors import ConfigError
from kvps.runtime.open_stores import OpenStores
from kvps.runtime.worker_session import WorkerSession


class CurrentCluster(Protocol):
    """The part of :class:`~kvps.LocalCluster` that a store inside of it needs."""

    workers: int
    most_workers: int

    @property
    def board(self) -> Any:
        """The torch store where the workers of allreduce stores meet."""

    def session(self) -> WorkerSession:
        """Return the session of the calling thread."""

    def endings(self) -> OpenStores:
        """Return the open stores of the calling thread that no session ends."""

    def leave(self) -> None:
        """Let the worker of the calling thread leave."""


class _Current:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.cluster: CurrentCluster | None = None


_current = _Current()


def current() -> CurrentCluster | None:
    """Return the cluster whose ``with`` block this process is in."""
    return _current.cluster


def enter(cluster: CurrentCluster) -> None:
    """Be inside of this cluster from now on.

    Raises:
        ConfigError: if this process is inside of a cluster already.
    """
    with _current.lock:
        if _current.cluster is not None:
            raise ConfigError("a LocalCluster is already active in this process; leave it first")
        _current.cluster = cluster


def leave() -> None:
    """Be inside of no cluster from now on."""
    _current.cluster = None
