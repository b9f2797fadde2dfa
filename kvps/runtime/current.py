"""The LocalCluster that this process is inside of, if any.

It stands apart from the cluster's own module: a worker of another cluster asks for it, and should not load
the rules of schedulers and servers to hear that there is none.

Workers of such a cluster are threads of one process. So they may compute on one accelerator,
which is noted here, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from kvps.errors import ConfigError
from kvps.runtime.device import is_away
from kvps.runtime.open_stores import OpenStores
from kvps.runtime.worker_session import WorkerSession


class CurrentCluster(Protocol):
    """The part of :class:`~kvps.LocalCluster` that a store inside of it needs."""

    workers: int
    most_workers: int
    users: dict[Any, set[int]]
    """Accelerator -> the threads whose workers compute there."""

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


def claim(tensors: Iterable[torch.Tensor]) -> Callable[[], bool]:
    """Note on which accelerators this thread's worker computes; return a question: does another worker of
    this process compute there, too?

    Ask it behind a call that all workers make. A backward pass on a shared accelerator must not wait for
    other workers: torch has one thread for the backward passes of an accelerator.
    """
    cluster = current()
    found = [cluster.users.setdefault(value.device, set()) for value in tensors if cluster and is_away(value)]
    for users in found:
        users.add(threading.get_ident())
    return lambda: any(len(users) > 1 for users in found)


def demand_own_device(is_shared: bool, waits: str, device: torch.device) -> None:
    """Check that no other worker of this process trains on a device, by the answer to :func:`claim`.

    Raises:
        ConfigError: that ``waits``, whose backward pass waits for other workers, would wait for ever.
    """
    if is_shared:
        raise ConfigError(
            f"{waits}: several workers of this process train on {device}, where torch runs their backward "
            "passes one after another, and one that waits for the others would wait for ever. Start a "
            "process for each worker (kvps-launch), or give each worker its own device"
        )


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
