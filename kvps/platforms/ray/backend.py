"""Ray Train's backend of kvps: servers beside the workers of a trainer, which replaces a lost worker alone.

Theory of operation
-------------------
Ray Train keeps one backend in the controller of a run, and calls it for every *group* of workers that has
started: for all workers first, and later for each worker that was replaced. The backend starts the cluster
with the first group. A worker takes the rank that Ray gave it, so a replacement takes the seat of its
predecessor.

If no worker is left, Ray ends the whole group before it starts another. The servers still have the weights,
so they stay for :data:`~kvps.platforms.ray.plan.RESTART_MAX_S`, and the new workers are replacements, too.
With a process group there is nothing to return to, since its size is fixed: then Ray restarts all workers,
and the cluster with them.

The demand of a run for resources is checked against the Ray cluster before Ray Train waits for its workers.
Ray Train tries without an end to place workers for which the cluster has no resources. It warns, and names
none. So its controller is given a callback, by the variable of the environment that Ray Train has for
callbacks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend
from ray.train.torch import TorchConfig
from ray.train.v2._internal.execution.callback import ControllerCallback

from kvps import __version__, config
from kvps.errors import ConfigError, SchedulerLost
from kvps.platforms.ray import worker
from kvps.platforms.ray.actors import node_address
from kvps.platforms.ray.plan import (
    RESTART_MAX_S,
    START_MAX_S,
    RayPlan,
    ServerPlace,
    checkpoint_folder,
    demand_same_version,
    demand_train_v2,
    no_room,
    torch_variables,
)
from kvps.platforms.ray.started import StartedCluster

CALLBACKS = "RAY_TRAIN_CALLBACKS"
LOOK_EVERY_S = 0.5


class DemandResources(ControllerCallback):
    """Ends a run with kvps whose workers can find no place; other runs are left alone."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Wait for nodes that have what the workers of a run need.

        Raises:
            ConfigError: if there are none after the start timeout of the plan.
        """
        plan = getattr(train_run_context.backend_config, "plan", None)
        scaling = train_run_context.scaling_config
        if plan is None or scaling.min_workers == 0:
            return
        each, until = scaling._resources_per_worker_not_none, time.monotonic() + plan.start_timeout
        while text := no_room(each, scaling.min_workers, _nodes()):
            if time.monotonic() >= until:
                raise ConfigError(
                    f"{text}. Add nodes, or change ScalingConfig(num_workers=, resources_per_worker=); if an "
                    f"autoscaler adds nodes, allow it more than {plan.start_timeout:g} s with "
                    "KvpsConfig(start_timeout=)"
                )
            time.sleep(LOOK_EVERY_S)


def _nodes() -> list[dict[str, float]]:
    """Return the resources of each node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def subscribe() -> None:
    """Have trainers that this process starts from now on check their demand."""
    ours = f"{DemandResources.__module__}.{DemandResources.__name__}"
    known = [callback for callback in os.environ.get(CALLBACKS, "").split(",") if callback.strip()]
    if ours not in known:
        os.environ[CALLBACKS] = ",".join([*known, ours])


log = logging.getLogger("kvps")
OVER_MAX_S = 2.0
"""Seconds that a job which is over may take to tell so."""
END_MAX_S = 10.0
"""Seconds that servers may take to end when the job is over."""


@dataclass(kw_only=True)
class KvpsConfig(TorchConfig):
    """The servers of a training run: ``TorchTrainer(torch_config=)``,
    ``DataParallelTrainer(backend_config=)``.

    Each worker's ``kvps.create`` joins them. A worker that is killed, or raises, is replaced alone up to
    ``FailureConfig(max_failures=)`` times: its replacement has its rank, and ``kv.resume(keys)`` tells where
    it continues. The other workers are not restarted.

    Args:
        backend: ``"kvps"`` also calls ``torch.distributed.init_process_group("kvps")`` in each worker, for
            DistributedDataParallel. A process group has a fixed size, so then Ray restarts all workers when
            one is lost. None (the default): no process group.
        timeout_s: seconds that a collective of the process group may take.
        servers: number of servers, 1 or more.
        resources_per_server: resources that each server requests, as in ``{"CPU": 2, "memory": 8e9}``.
            ``memory`` is in bytes, and the limit of the server as well.
        server_strategy: Ray's scheduling strategy for servers, such as ``"SPREAD"``, ``"DEFAULT"``, or a
            PlacementGroupSchedulingStrategy.
        max_restarts: how often Ray starts each server again that was killed, and the scheduler. A server
            continues from the last checkpoint, the scheduler from its last state.
        checkpoint_every: seconds between checkpoints of the servers; 0: only on ``kv.checkpoint()``.
        checkpoint_dir: where servers write them; None: ``kvps`` in the folder of the run in Ray's storage
            path.
        start_timeout: seconds that servers may take to find their resources, and for which a cluster may lack
            those of the workers.
        env: variables of workers and servers. The driver's that begin with ``KVPS_`` go along.
        log_level: level of the log of scheduler and servers.

    Raises:
        ConfigError: for a value that cannot be.

    Example:
        >>> from ray.train import FailureConfig, RunConfig, ScalingConfig
        >>> from ray.train.torch import TorchTrainer
        >>> trainer = TorchTrainer(  # doctest: +SKIP
        ...     train,
        ...     torch_config=kvps.platforms.ray.KvpsConfig(servers=2, checkpoint_every=60),
        ...     scaling_config=ScalingConfig(num_workers=4),
        ...     run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
        ... )
    """

    servers: int = 1
    resources_per_server: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    server_strategy: Any = "SPREAD"
    max_restarts: int = 3
    checkpoint_every: float = 0.0
    checkpoint_dir: str | None = None
    start_timeout: float = START_MAX_S
    env: Mapping[str, str] = field(default_factory=dict)
    log_level: str = "warning"

    def __post_init__(self) -> None:
        demand_train_v2()
        if self.backend not in (None, "kvps"):
            raise ConfigError(
                f"backend={self.backend!r}: use 'kvps', or None for no process group. A process group of "
                "another backend needs no servers: use TorchConfig for it"
            )
        if self.init_method != "env":
            raise ConfigError(f"init_method={self.init_method!r}: workers meet at the scheduler; omit it")
        subscribe()
        self.has_process_group = self.backend is not None  # TorchTrainer replaces None by "gloo"
        self.plan = RayPlan(
            servers=self.servers,
            resources_per_server=self.resources_per_server,
            strategy=self.server_strategy,
            max_restarts=self.max_restarts,
            checkpoint_dir=self.checkpoint_dir,
            checkpoint_every=self.checkpoint_every,
            start_timeout=self.start_timeout,
            log_level=self.log_level,
            env={**config.shared(), **self.env},
        )

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend: with a process group, Ray restarts all workers; without, one alone."""
        return GroupBackend if self.has_process_group else StoreBackend

    @property
    def train_func_context(self) -> Callable[[], object]:
        """The context in which a worker runs the training function."""
        return _Training

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration, as Ray shows it."""
        return {
            "servers": self.servers,
            "resources_per_server": dict(self.resources_per_server),
            "max_restarts": self.max_restarts,
            "checkpoint_every": self.checkpoint_every,
            "backend": "kvps" if self.has_process_group else None,
        }


class _Training:
    """The training function's time in a cluster: the worker ends when it ends."""

    def __enter__(self) -> None:
        import torch

        from kvps.runtime.device import is_accelerator, select

        if torch.accelerator.is_available():
            device = ray.train.torch.get_device()
            if is_accelerator(device):
                select(device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch.distributed as dist

        try:
            if dist.is_available() and dist.is_initialized():
                with nullcontext() if error is None else suppress(Exception):  # the first error counts
                    dist.destroy_process_group()
        finally:
            worker.leave(error)


@dataclass(frozen=True, slots=True)
class _Described:
    """A worker, as Ray Train has numbered it, and where the run stores its files."""

    address: str
    ranks: dict[str, int]
    filesystem: str
    storage: str


def _describe(version: str) -> _Described:
    """Return the numbers of this worker."""
    address = node_address()
    demand_same_version(version, __version__, address)
    context = ray.train.get_context()
    storage = context.get_storage()
    return _Described(
        address,
        {
            "RANK": context.get_world_rank(),
            "WORLD_SIZE": context.get_world_size(),
            "LOCAL_RANK": context.get_local_rank(),
            "LOCAL_WORLD_SIZE": context.get_local_world_size(),
            "NODE_RANK": context.get_node_rank(),
        },
        storage.storage_filesystem.type_name,
        storage.experiment_fs_path,
    )


class StoreBackend(Backend):
    """The backend of a run without a process group: a lost worker is replaced alone."""

    has_replica_groups = True
    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._cluster: StartedCluster | None = None
        self._master = ""
        """HOST:PORT where rank 0 lets the others meet."""
        self._deadline: threading.Timer | None = None
        """The end of the servers' wait for another group of workers."""

    def on_start(self, worker_group: Any, backend_config: KvpsConfig) -> None:
        """Give each worker of a group its place, in a cluster that starts with the first group.

        Raises:
            ConfigError: if servers find no place, or a node cannot run one.
        """
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline.join()
            self._deadline = None
        try:
            self._start(worker_group, backend_config)
        except BaseException:
            worker_group.shutdown()  # Ray forgets a group whose start failed, and its resources with it
            raise

    def _start(self, worker_group: Any, backend_config: KvpsConfig) -> None:
        workers: list[_Described] = _unwrapped(lambda: worker_group.execute(_describe, __version__))
        warmed = worker_group.execute_async(worker.warm)
        size = workers[0].ranks["WORLD_SIZE"]
        if len(workers) == size:
            self._begin(worker_group, workers, backend_config.plan)
        elif self._cluster is None or self._cluster.is_over(0.0):
            raise SchedulerLost(
                "a worker is to be replaced, but the scheduler of its cluster has ended; see its log above. "
                "Start the run again; with checkpoints, kv.restore() continues from the last checkpoint"
            )
        assert self._cluster is not None
        keys = self._cluster.worker_keys()
        ray.get(warmed)
        taken = []
        for position, entry in enumerate(workers):
            variables = torch_variables(entry.ranks, self._master) | self._cluster.settings
            place = ServerPlace(self._cluster.scheduler, entry.ranks["RANK"], keys, variables)
            taken.append(worker_group.execute_single_async(position, worker.take, place))
        ray.get(taken)

    def _begin(self, group: Any, workers: list[_Described], plan: RayPlan) -> None:
        """Start a cluster for all workers of a run, unless the last one still waits for them."""
        kept = self._cluster
        if kept is not None and kept.workers == len(workers) and not kept.is_over(0.0):
            log.warning("all workers are replaced; the servers have kept the weights")
            return
        self._end(0.0)
        first = next(at for at, entry in enumerate(workers) if entry.ranks["RANK"] == 0)
        self._master = group.execute_single(first, worker.free_address, workers[first].address)
        folder = checkpoint_folder(plan, workers[0].filesystem, workers[0].storage)
        self._cluster = StartedCluster(plan, len(workers), folder)

    def on_shutdown(self, worker_group: Any, backend_config: KvpsConfig) -> None:
        """End the cluster if its job is over; else let it wait for another group of workers."""
        if self._cluster is None or len(worker_group) < self._cluster.workers:
            return
        if self.has_replica_groups and not self._cluster.is_over(OVER_MAX_S):
            self._deadline = threading.Timer(RESTART_MAX_S, self._end, (0.0,))
            self._deadline.daemon = True
            self._deadline.start()
        else:
            self._end(END_MAX_S if self.has_replica_groups else OVER_MAX_S)

    def _end(self, patience_s: float) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.end(patience_s)


class GroupBackend(StoreBackend):
    """The backend of a run with a process group, which needs all of its workers."""

    has_replica_groups = False

    def _start(self, worker_group: Any, backend_config: KvpsConfig) -> None:
        super()._start(worker_group, backend_config)
        worker_group.execute(_init_process_group, backend_config.timeout_s)


def _init_process_group(timeout_s: float) -> None:
    import torch.distributed as dist

    import kvps.torch  # noqa: F401, registers the backend

    dist.init_process_group("kvps", timeout=timedelta(seconds=timeout_s))


def _unwrapped(call: Callable[[], Any]) -> Any:
    """Return what a call returns, with an error of kvps as it was raised on a worker."""
    try:
        return call()
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, ConfigError) else error) from None
