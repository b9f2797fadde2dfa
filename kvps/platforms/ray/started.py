"""A started cluster: the actors of one job, owned by the process that started them.

The actors end with their owner, however it ends: Ray kills the actors of an owner that is gone.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvps import __version__, config
from kvps.errors import ConfigError, KvpsError
from kvps.net.zap import keys_can_be
from kvps.platforms.ray.actors import KvpsScheduler, KvpsServer, node_address
from kvps.platforms.ray.plan import SLOW_MAX_S, RayPlan, actor_options, keys_text, shortage, too_slow
from kvps.platforms.ray.state import StateMemory
from kvps.runtime.key_files import Section, generate

log = logging.getLogger("kvps")


class StartedCluster:
    """The scheduler and the servers of one job.

    Args:
        plan: the servers, and their settings.
        workers: how many workers the job has.
        folder: where servers write checkpoints; None for nowhere.

    Raises:
        ConfigError: if servers find no place, or a node cannot run one.
    """

    def __init__(self, plan: RayPlan, workers: int, folder: str | None) -> None:
        self.workers = workers
        self.settings = dict(plan.env)
        """Variables of all processes of the job."""
        if folder is not None:
            self.settings["KVPS_CHECKPOINT_DIR"] = folder
        is_keyless = config.switch("KVPS_INSECURE", self.settings) or not keys_can_be()
        self._sections: list[Section] = [] if is_keyless else generate()
        node = ray.get_runtime_context().get_node_id()
        self._foothold = RayFoothold(node_address(), has_state=plan.max_restarts > 0)
        self._scheduler = (
            ray.remote(KvpsScheduler)
            .options(
                num_cpus=0,
                max_restarts=plan.max_restarts,
                max_task_retries=_retries(plan.max_restarts),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote()
        )
        restarts = plan.restarts(folder)
        server = ray.remote(KvpsServer).options(
            **actor_options(plan.resources_per_server),
            scheduling_strategy=plan.strategy,
            max_restarts=restarts,
            max_task_retries=_retries(restarts),
        )
        self._servers = [server.remote() for _ in range(plan.servers)]
        try:
            nodes = self._places(plan, folder)
        except BaseException:
            self.end(0.0)
            raise
        self._run(plan, nodes, folder)

    def worker_keys(self) -> str:
        """Return the keys of a worker, as text; empty without keys."""
        return keys_text(self._sections, "worker")

    @property
    def scheduler(self) -> str:
        """Where the scheduler listens, each time it is started."""
        return self._foothold.endpoint

    def _places(self, plan: RayPlan, folder: str | None) -> list[str]:
        """Return the node of each server, once all actors have started."""
        scheduler = self._scheduler.place.remote(__version__)
        places = [server.place.remote(__version__, folder) for server in self._servers]
        late = self._waited(places, plan.start_timeout)
        if late:
            total, free = ray.cluster_resources(), ray.available_resources()
            if text := shortage(plan, late, total, free):
                raise ConfigError(text)
            late = self._waited(places, SLOW_MAX_S)
        if late or self._waited([scheduler], SLOW_MAX_S):
            raise ConfigError(too_slow(plan, late, plan.start_timeout + SLOW_MAX_S))
        return list(ray.get(places))

    def _waited(self, places: list[Any], limit_s: float) -> int:
        """Return how many actors have no place after a time."""
        ready, late = ray.wait(places, num_returns=len(places), timeout=limit_s)
        try:
            ray.get(ready)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, KvpsError) else error) from None
        except RayActorError as error:
            raise ConfigError(
                "a process of kvps could not start on a Ray node; install kvps there, or name it "
                f"in runtime_env: {error}"
            ) from error
        return len(late)

    def _run(self, plan: RayPlan, nodes: list[str], folder: str | None) -> None:
        common = (self.settings, plan.log_level)
        scheduler_keys, server_keys = (keys_text(self._sections, role) for role in ("scheduler", "server"))
        sizes = (self.scheduler, self.workers, plan.servers)
        state = self._foothold.state_paths
        self._runs = [self._scheduler.run.remote(*sizes, scheduler_keys, *common, state)]
        for rank, (server, node) in enumerate(zip(self._servers, nodes, strict=True)):
            self._runs.append(
                server.run.remote(
                    self.scheduler,
                    rank,
                    server_keys,
                    *common,
                    folder,
                    plan.checkpoint_every,
                    plan.memory_limit(),
                    nodes.count(node),
                )
            )
        log.info("the scheduler listens on %s; %d servers start", self.scheduler, plan.servers)

    def is_over(self, patience_s: float) -> bool:
        """Return whether the scheduler has ended, as it does when the job is over, or does so in time."""
        return bool(ray.wait(self._runs[:1], timeout=patience_s)[0])

    def end(self, patience_s: float) -> bool:
        """End all actors, and return whether all had ended by themselves.

        Args:
            patience_s: seconds that they may take to end by themselves.
        """
        runs: list[Any] = getattr(self, "_runs", [])
        late = ray.wait(runs, num_returns=len(runs), timeout=patience_s)[1] if runs else []
        for actor in (*self._servers, self._scheduler):
            ray.kill(actor)
        self._foothold.close()
        return not late


def _retries(restarts: int) -> int:
    """Return how often Ray repeats the call of an actor that it starts again: -1 for as often as needed.

    When a node is lost, Ray tries the old address some times before it knows, and each of these
    attempts counts. The number of restarts is limited in any case.
    """
    return -1 if restarts else 0


class RayFoothold:
    """The scheduler's port, and the memory for its state, which it finds again when it is started again.

    Args:
        host: the address of this node.
        has_state: the scheduler may be started again.
    """

    def __init__(self, host: str, *, has_state: bool) -> None:
        # Bound and not listened on, so that no other process gets the port while there is no scheduler.
        self._kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind((host, 0))
        self.endpoint = f"tcp://{host}:{self._kept.getsockname()[1]}"
        self._memory = StateMemory() if has_state else None
        self.state_paths = () if self._memory is None else self._memory.paths

    def close(self) -> None:
        """Give both back."""
        self._kept.close()
        if self._memory is not None:
            self._memory.close()
