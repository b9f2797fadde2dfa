"""The session of a store: its place in a cluster as a worker, whether that is other processes or
this one alone."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from kvps.core.worker.calls import Call
from kvps.core.worker.cluster_info import ClusterInfo
from kvps.runtime.cuda_staging import Staging
from kvps.runtime.ticket import Ticket


class Session(Protocol):
    """A worker: :class:`~kvps.runtime.worker_session.WorkerSession` in a cluster, or
    :class:`~kvps.runtime.in_process.InProcessSession` without one."""

    names: dict[str, str]
    """Name of each open store -> its type."""
    handles: Counter[str]
    """Name of each open store -> how many objects of this process use it."""
    staging: Staging

    @property
    def rank(self) -> int:
        """The worker's rank."""

    @property
    def info(self) -> ClusterInfo:
        """An immutable copy of what the worker knows of its cluster."""

    @property
    def is_over(self) -> bool:
        """Whether it takes no more calls."""

    def figures(self, store: str) -> dict[str, float]:
        """Return the numbers of a store; asks nobody but the loop of this process."""

    def close_store(self, name: str) -> None:
        """No object of this process uses a store any more; nobody waits."""

    def call(self, call: Call, timeout_s: float) -> Ticket:
        """Begin a call."""
