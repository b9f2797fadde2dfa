"""A started cluster: the actors of one job, owned by the process that started them.

The actors end with their owner, however it ends: Ray kills the actors of an owner that is gone.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvps import __version__, config
from kvps.errors import ConfigError, KvpsError
from kvps.net.zap import keys_can_be
from kvps.ray.actors import KvpsScheduler, KvpsServer
from kvps.ray.plan import SLOW_MAX_S, RayPlan, actor_options, keys_text, shortage, too_slow
from kvps.runtime.keys import Section, generate

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
        self._scheduler = (
            ray.remote(KvpsScheduler)
            .options(
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote()
        )
        restarts = plan.restarts(folder)
        server = ray.remote(KvpsServer).options(
            **actor_options(plan.resources_per_server),
            scheduling_strategy=plan.strategy,
            max_restarts=restarts,
            max_task_retries=restarts,
        )
        self._servers = [server.remote() for _ in range(plan.servers)]
        try:
            self.scheduler, nodes = self._places(plan, folder)
        except BaseException:
            self.end(0.0)
            raise
        self._run(plan, nodes, folder)

    def worker_keys(self) -> str:
        """Return the keys of a worker, as text; empty without keys."""
        return keys_text(self._sections, "worker")

    def _places(self, plan: RayPlan, folder: str | None) -> tuple[str, list[str]]:
        """Return where the scheduler will listen, and the node of each server."""
        endpoint = self._scheduler.place.remote(__version__)
        places = [one.place.remote(__version__, folder) for one in self._servers]
        late = self._waited(places, plan.start_timeout)
        if late:
            total, free = ray.cluster_resources(), ray.available_resources()
            if text := shortage(plan, late, total, free):
                raise ConfigError(text)
            late = self._waited(places, SLOW_MAX_S)
        if late or self._waited([endpoint], SLOW_MAX_S):
            raise ConfigError(too_slow(plan, late, plan.start_timeout + SLOW_MAX_S))
        return ray.get(endpoint), ray.get(places)

    def _waited(self, places: list[Any], limit_s: float) -> int:
        """Return how many actors have no place after a time."""
        ready, late = ray.wait(places, num_returns=len(places), timeout=limit_s)
        try:
            ray.get(ready)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, KvpsError) else error) from None
        except RayActorError as error:
            raise ConfigError(
                f"a process of kvps could not start on a Ray node; install kvps there, or name it in runtime_env: {error}"
            ) from error
        return len(late)

    def _run(self, plan: RayPlan, nodes: list[str], folder: str | None) -> None:
        common = (self.settings, plan.log_level)
        scheduler_keys, server_keys = (
            keys_text(self._sections, role) for role in ("scheduler", "server")
        )
        sizes = (self.scheduler, self.workers, plan.servers)
        self._runs = [self._scheduler.run.remote(*sizes, scheduler_keys, *common)]
        for rank, (server, node) in enumerate(zip(self._servers, nodes, strict=True)):
            self._runs.append(
                server.run.remote(
                    *(self.scheduler, rank, server_keys, *common),
                    *(folder, plan.checkpoint_every, plan.memory_limit(), nodes.count(node)),
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
        return not late
