"""The demand of a run for resources, checked against the Ray cluster before Ray Train waits for its workers.

Ray Train tries without an end to place workers for which the cluster has no resources. It warns, and names none. So
its controller is given a callback, by the variable of the environment that Ray Train has for callbacks.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import ControllerCallback

from kvps.errors import ConfigError
from kvps.platforms.ray.plan import no_room

log = logging.getLogger("kvps")
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
                    f"{text}. Add nodes, or change ScalingConfig(num_workers=, resources_per_worker=); if an autoscaler "
                    f"adds nodes, allow it more than {plan.start_timeout:g} s with KvpsConfig(start_timeout=)"
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
