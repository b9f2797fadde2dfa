"""The plan of a job on Ray, and the decisions about it: resources, folders, environments, and
texts of errors.

Nothing here needs Ray, or does input and output.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvps import config
from kvps.errors import ConfigError
from kvps.runtime.key_files import Section

RAY_OLDEST = (2, 60)
"""The oldest Ray that the tests ran with. Replacing one worker alone needs Ray Train V2."""
TRAIN_V2 = "RAY_TRAIN_V2_ENABLED"
START_MAX_S = 25.0
"""Seconds that servers may take to find a place, unless the plan says otherwise."""
SLOW_MAX_S = 60.0
"""Seconds for which servers may start after that, if the Ray cluster has the resources."""
RESTART_MAX_S = 120.0
"""Seconds for which servers wait for another worker when none is left: Ray takes a while to start one."""
CHECKPOINTS = "kvps"
"""The folder of the servers' checkpoints, within the storage path of a run."""
OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resource -> the option of an actor that requests it; others are custom resources."""


@dataclass(frozen=True, slots=True)
class RayPlan:
    """The servers of a job, and their settings.

    Raises:
        ConfigError: for a value that cannot be.
    """

    servers: int
    resources_per_server: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    strategy: Any = "SPREAD"
    """The scheduling strategy of Ray for server actors."""
    max_restarts: int = 3
    checkpoint_dir: str | None = None
    checkpoint_every: float = 0.0
    start_timeout: float = START_MAX_S
    log_level: str = "warning"
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _demand_whole("servers", self.servers, 1)
        _demand_whole("max_restarts", self.max_restarts, 0)
        _demand_number("checkpoint_every", self.checkpoint_every)
        _demand_number("start_timeout", self.start_timeout)
        if self.start_timeout == 0:
            raise ConfigError("start_timeout=0: use a number of seconds above 0")
        if not isinstance(self.resources_per_server, Mapping):
            raise ConfigError(
                f"resources_per_server={self.resources_per_server!r}: use a dict from the name of "
                "a resource to "
                'its amount, as in {"CPU": 2}'
            )
        for name, amount in self.resources_per_server.items():
            _demand_number(f"resources_per_server[{name!r}]", amount)
        for name, value in self.env.items():
            if not (isinstance(name, str) and isinstance(value, str)):
                raise ConfigError(f"env[{name!r}]={value!r}: use texts")
            if config.is_place(name):
                raise ConfigError(
                    f"env[{name!r}] contradicts the cluster that kvps starts, which sets the place of each "
                    "process: omit it"
                )
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level={self.log_level!r}: use debug, info, warning or error")

    def memory_limit(self) -> int | None:
        """Return the bytes that a server may hold; None if no amount of memory is requested."""
        requested = self.resources_per_server.get("memory")
        return int(requested) if requested else None

    def restarts(self, folder: str | None) -> int:
        """Return how often Ray starts a server again; without checkpoints, a server has nothing to
        return to."""
        return 0 if folder is None else self.max_restarts


def demand_workers(workers: int) -> None:
    """Check a number of workers.

    Raises:
        ConfigError: if there cannot be as many.
    """
    _demand_whole("workers", workers, 1)


def _demand_whole(name: str, given: object, least: int) -> None:
    if type(given) is not int or given < least:
        raise ConfigError(f"{name}={given!r}: use a whole number, {least} or more")


def _demand_number(name: str, given: object) -> None:
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 <= given < math.inf:
        raise ConfigError(f"{name}={given!r}: use a number, 0 or more")


def demand_version(found: str) -> None:
    """Check that a version of Ray can replace one worker alone.

    Raises:
        ConfigError: if it is older.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers < RAY_OLDEST:
        oldest = ".".join(map(str, RAY_OLDEST))
        raise ConfigError(
            f"Ray {found} is installed, and kvps.platforms.ray needs {oldest} or later: pip "
            "install 'kvps[ray]' on every node"
        )


def demand_train_v2(env: Mapping[str, str] | None = None) -> None:
    """Check that the environment does not ask for Ray Train V1, which restarts all workers.

    Raises:
        ConfigError: if it does.
    """
    if not config.switch(TRAIN_V2, env, default=True):
        raise ConfigError(
            f"{TRAIN_V2}=0 selects Ray Train V1, which kvps.platforms.ray does not support: unset it"
        )


def demand_same_version(own: str, there: str, node: str) -> None:
    """Check that a node has the version of kvps that the job has.

    Raises:
        ConfigError: if it has another.
    """
    if own != there:
        raise ConfigError(
            f"kvps {there} is installed on the Ray node {node}, and {own} where the job was started: "
            "install the same version on every node, or name it in runtime_env"
        )


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return resources as the options of a Ray actor.

    Example:
        >>> actor_options({"CPU": 2, "disk": 1})
        {'num_cpus': 2, 'resources': {'disk': 1}}
    """
    options: dict[str, Any] = {"num_cpus": 0}
    custom = {}
    for name, amount in resources.items():
        if name in OPTIONS:
            options[OPTIONS[name]] = amount
        else:
            custom[name] = amount
    return options | ({"resources": custom} if custom else {})


def shortage(plan: RayPlan, unplaced: int, total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Return why servers found no place; empty if the Ray cluster has what they need, and may only be slow.

    Args:
        plan: the plan.
        unplaced: how many servers have not started.
        total: the resources of the Ray cluster.
        free: those that no actor or task has.
    """
    lacks = []
    for name, amount in plan.resources_per_server.items():
        need = amount * unplaced
        if need > total.get(name, 0):
            lacks.append(f"the Ray cluster has {total.get(name, 0):g} {name} in all")
        elif need > free.get(name, 0):
            lacks.append(f"{free.get(name, 0):g} of {total[name]:g} {name} are free")
    if not lacks:
        return ""
    return (
        f"{unplaced} of {plan.servers} kvps servers found no place in {plan.start_timeout:g} s. Each needs "
        f"{_each(plan)}: {'; '.join(lacks)}. Add nodes, use fewer workers or servers, or change "
        "resources_per_server; if an autoscaler adds nodes, allow it more time with start_timeout"
    )


def no_room(each: Mapping[str, float], workers: int, nodes: Sequence[Mapping[str, float]]) -> str:
    """Return why a Ray cluster cannot have the workers of a run, whatever else it does; empty if it can.

    Args:
        each: the resources that each worker requests.
        workers: how many workers the run needs.
        nodes: the resources of each node.

    Example:
        >>> no_room({"CPU": 1, "GPU": 1}, 2, [{"CPU": 8.0}])
        '2 workers find no place. Each needs 1 CPU, 1 GPU: the Ray cluster has 0 GPU in all'
    """
    needs = {name: amount for name, amount in each.items() if amount > 0}
    total = {name: sum([node.get(name, 0.0) for node in nodes]) for name in needs}
    lacks = [
        f"the Ray cluster has {total[name]:g} {name} in all"
        for name, amount in needs.items()
        if amount * workers > total[name]
    ]
    if not lacks and needs:
        room = sum([min([node.get(name, 0.0) // needs[name] for name in needs]) for node in nodes])
        if room < workers:
            lacks = [f"the nodes have room for {room:g} of them, since a worker needs all on one node"]
    if not lacks:
        return ""
    return f"{workers} workers find no place. Each needs {_amounts(needs)}: {'; '.join(lacks)}"


def too_slow(plan: RayPlan, unplaced: int, waited_s: float) -> str:
    """Return the error of servers that did not start, though the Ray cluster has the resources."""
    return (
        f"{unplaced} of {plan.servers} kvps servers did not start in {waited_s:g} s, though the Ray cluster "
        f"has the resources ({_each(plan)} each): no single node may have them all, the strategy "
        f"{plan.strategy!r} may permit no node, or nodes are slow to start processes. See 'ray status' and "
        "'ray list actors'"
    )


def _each(plan: RayPlan) -> str:
    return _amounts(plan.resources_per_server) or "no resources"


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def checkpoint_folder(plan: RayPlan, filesystem: str, storage: str) -> str | None:
    """Return where servers write checkpoints; None for nowhere.

    Args:
        plan: the plan.
        filesystem: the type of the filesystem of the run's storage path, as pyarrow names it.
        storage: the folder of the run there.

    Raises:
        ConfigError: if checkpoints are wanted, and servers cannot open that filesystem.
    """
    if plan.checkpoint_dir is not None:
        return plan.checkpoint_dir
    if filesystem == "local":
        return f"{storage.rstrip('/')}/{CHECKPOINTS}"
    if plan.checkpoint_every:
        raise ConfigError(
            f"checkpoint_every={plan.checkpoint_every:g}, but servers write checkpoints as files, and the "
            f"storage path {storage!r} is on {filesystem}: give checkpoint_dir=, a directory that all "
            "servers share, or a storage_path on a shared file system"
        )
    return None


def keys_text(sections: Iterable[Section], role: str) -> str:
    """Return the keys that a process of a role needs: its own, and the public halves of all others."""
    return "".join(
        [
            section.text(with_secret=True)
            if section.role == role
            else section.public_half.text(with_secret=False)
            for section in sections
            if section.role in (role, "scheduler") or role == "scheduler"
        ]
    )


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """The place of one worker in a cluster."""

    scheduler: str
    rank: int
    keys: str = field(repr=False, default="")
    """The keys of a worker, as text; empty for a cluster without keys."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Settings, and variables that other libraries read."""

    def environment(self, before: Mapping[str, str], keys_path: str | None) -> dict[str, str]:
        """Return the environment of the worker's process.

        Args:
            before: the environment until now.
            keys_path: where the keys are; None without keys.
        """
        own = {"KVPS_SCHEDULER": self.scheduler, "KVPS_RANK": str(self.rank)}
        if keys_path is not None:
            own["KVPS_KEYS"] = keys_path
        return config.environment({**self.variables, **own}, {}, before)


def torch_variables(ranks: Mapping[str, int], master: str) -> dict[str, str]:
    """Return the variables that torchrun sets.

    Args:
        ranks: RANK, WORLD_SIZE and so on, as Ray Train numbers a worker.
        master: HOST:PORT where rank 0 lets the others meet.
    """
    host, _, port = master.rpartition(":")
    numbers = {name: str(number) for name, number in ranks.items()}
    return {**numbers, "MASTER_ADDR": host, "MASTER_PORT": port}
