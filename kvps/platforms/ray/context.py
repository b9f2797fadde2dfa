"""A cluster for any Ray program: servers as actors, and seats for the program's own tasks and actors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray

from kvps import config
from kvps.errors import ConfigError
from kvps.platforms.ray import worker
from kvps.platforms.ray.plan import START_MAX_S, RayPlan, ServerPlace, demand_workers
from kvps.platforms.ray.started import StartedCluster

log = logging.getLogger("kvps")
END_MAX_S = 10.0
"""Seconds that the cluster may take to end when the block of :func:`cluster` ends."""


@dataclass(frozen=True, slots=True)
class WorkerSeat:
    """The place of one worker, for the task or actor that is this worker.

    It may be an argument of a task, a method or a constructor. Use it as a context manager around
    the work of a task; an actor calls :meth:`join` in its constructor, and :meth:`leave` at the end.

    Example:
        >>> @ray.remote  # doctest: +SKIP
        ... def train(seat):
        ...     with seat:
        ...         kv = kvps.create("dist_sync")
        ...         kv.init("w", torch.zeros(1))
        ...         return kv.pushpull("w", torch.tensor([kv.rank + 1.0])).item()
    """

    scheduler: str
    rank: int
    settings: Mapping[str, str]
    keys: ray.ObjectRef
    """The keys of a worker. Not the text: Ray keeps the arguments of constructors outside of the
    job's processes."""

    def join(self) -> None:
        """Make this process the worker: the next store joins the cluster.

        A task that Ray retries, or an actor that Ray restarts, takes its rank back: continue at
        ``kv.resume(keys)``.

        Raises:
            ConfigError: if the process is a worker already.
        """
        worker.take(ServerPlace(self.scheduler, self.rank, ray.get(self.keys), self.settings))

    def leave(self) -> None:
        """Flush all stores and leave the cluster; rounds close without this worker from then on.

        Raises:
            KvpsError: if a push could not be flushed.
        """
        worker.leave(None)

    def __enter__(self) -> WorkerSeat:
        self.join()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        worker.leave(error)


class RayCluster:
    """A cluster that :func:`cluster` started."""

    def __init__(self, started: StartedCluster) -> None:
        self.scheduler = started.scheduler
        """The address of the scheduler."""
        self.workers = started.workers
        self._settings = started.settings
        self._keys = ray.put(started.worker_keys())

    def seat(self, rank: int) -> WorkerSeat:
        """Return the place of a worker, to be given to the task or actor that is this worker.

        Raises:
            ConfigError: if there is no such rank.
        """
        if type(rank) is not int or not 0 <= rank < self.workers:
            raise ConfigError(
                f"rank={rank!r}: this cluster has {self.workers} workers, so use 0 to {self.workers - 1}"
            )
        return WorkerSeat(self.scheduler, rank, self._settings, self._keys)


@contextmanager
def cluster(
    workers: int,
    servers: int,
    *,
    resources_per_server: Mapping[str, float] | None = None,
    server_strategy: Any = "SPREAD",
    max_restarts: int = 3,
    checkpoint_dir: str | None = None,
    checkpoint_every: float = 0.0,
    start_timeout: float = START_MAX_S,
    env: Mapping[str, str] | None = None,
    log_level: str = "warning",
) -> Iterator[RayCluster]:
    """Run a scheduler and servers on the Ray cluster while a block runs.

    The workers are tasks or actors of the program, each with a :class:`WorkerSeat`. Wait for them
    before the block ends. All actors of kvps end with the block, and with the driver however it ends.

    Args:
        workers: number of workers, 1 or more.
        servers: number of servers, 1 or more.
        resources_per_server: resources that each server requests (one CPU).
        server_strategy: Ray's scheduling strategy for servers.
        max_restarts: how often Ray starts each server again that was killed, which needs
            ``checkpoint_dir``, and the scheduler.
        checkpoint_dir: where servers write checkpoints: a directory that all of them share. None:
            no checkpoints.
        checkpoint_every: seconds between checkpoints; 0: only on ``kv.checkpoint()``.
        start_timeout: seconds that servers may take to find their resources.
        env: variables of workers and servers. The driver's that begin with ``KVPS_`` go along.
        log_level: level of the log of scheduler and servers.

    Raises:
        ConfigError: for a value that cannot be, or if servers find no place.

    Example:
        >>> with kvps.platforms.ray.cluster(workers=2, servers=2) as cluster:  # doctest: +SKIP
        ...     ray.get([train.remote(cluster.seat(rank)) for rank in range(2)])
        [3.0, 3.0]
    """
    demand_workers(workers)
    if checkpoint_every and checkpoint_dir is None:
        raise ConfigError(
            f"checkpoint_every={checkpoint_every!r} has no directory to write to: give checkpoint_dir="
        )
    own = {} if resources_per_server is None else {"resources_per_server": resources_per_server}
    plan = RayPlan(
        servers=servers,
        strategy=server_strategy,
        max_restarts=max_restarts,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        start_timeout=start_timeout,
        log_level=log_level,
        env={**config.shared(), **(env or {})},
        **own,
    )
    if not ray.is_initialized():
        ray.init()
    started = StartedCluster(plan, workers, checkpoint_dir)
    patience_s = 0.0
    try:
        yield RayCluster(started)
        patience_s = END_MAX_S
    finally:
        if not started.end(patience_s) and patience_s:
            log.warning(
                "the cluster did not end in %.0f s, and was stopped: of its %d workers, some did not "
                "leave. Use 'with seat:', or seat.leave(), in each",
                patience_s,
                workers,
            )
