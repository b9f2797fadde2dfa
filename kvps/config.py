"""What the environment says; the only file that reads it.

Settings come from flags, then ``KVPS_*`` variables, then defaults. MXNet's ``DMLC_*`` variables are
understood too. A process that finds no sign of a cluster starts an embedded one; one that finds
half a description of a cluster is told what is missing, since a silent guess would train the
wrong thing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvps.errors import ConfigError

DEFAULT_SCHEDULER = "tcp://127.0.0.1:9091"
BIGARRAY_VARIABLES = ("KVPS_BIGARRAY_BOUND", "MXNET_KVSTORE_BIGARRAY_BOUND")
_LAUNCHERS = {"SLURM_NTASKS": "Slurm", "OMPI_COMM_WORLD_SIZE": "Open MPI"}
_DMLC = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where a cluster is, and what this process is to be in it."""

    scheduler: str
    role: str = "worker"
    rank: int | None = None
    incarnation: int = 0
    """Of the seat that a guardian holds for this process; 0 where there is none."""
    workers: int | None = None
    servers: int | None = None


def text(name: str, default: str | None = None, env: Mapping[str, str] | None = None) -> str | None:
    """Return a variable; an empty one counts as unset."""
    return (os.environ if env is None else env).get(name) or default


def number(
    name: str, default: float | None = None, env: Mapping[str, str] | None = None
) -> float | None:
    """Return a variable as a number.

    Raises:
        ConfigError: if it is set to something else.
    """
    given = text(name, env=env)
    if given is None:
        return default
    try:
        value = float(given)
    except ValueError as error:
        raise ConfigError(f"{name}={given!r} is not a number; correct or unset it") from error
    if value != value or value in (float("inf"), float("-inf")):
        raise ConfigError(f"{name}={given!r} is not a finite number; correct or unset it")
    return value


def whole(
    name: str, default: int | None = None, env: Mapping[str, str] | None = None
) -> int | None:
    """Return a variable as a whole number from 0 on.

    Raises:
        ConfigError: if it is set to something else.
    """
    value = number(name, env=env)
    if value is None:
        return default
    if value != int(value) or value < 0:
        raise ConfigError(f"{name}={value:g} is not a whole number from 0 on; correct or unset it")
    return int(value)


def cluster(env: Mapping[str, str] | None = None) -> Cluster | None:
    """Return the cluster that the environment describes; None if it describes none.

    Raises:
        ConfigError: if it describes half of one, naming what is missing.
    """
    scheduler = text("KVPS_SCHEDULER", env=env)
    if scheduler is not None:
        return Cluster(
            scheduler,
            rank=whole("KVPS_RANK", env=env),
            incarnation=whole("KVPS_INCARNATION", 0, env=env) or 0,
        )
    found = _dmlc_cluster(env)
    if found is not None:
        return found
    if text("KVPS_RANK", env=env) is not None:
        raise ConfigError("KVPS_RANK is set but KVPS_SCHEDULER is not; set it to tcp://HOST:PORT")
    for name, launcher in _LAUNCHERS.items():
        if (whole(name, env=env) or 0) > 1:
            raise ConfigError(
                f"{launcher} started {text(name, env=env)} processes ({name}) but KVPS_SCHEDULER "
                "is not set, so each of them would train alone; start kvps-scheduler and set "
                "KVPS_SCHEDULER=tcp://HOST:PORT for all of them"
            )
    return None


def _dmlc_cluster(env: Mapping[str, str] | None) -> Cluster | None:
    names = (*_DMLC, "DMLC_ROLE")
    if all(text(name, env=env) is None for name in names):
        return None
    missing = [name for name in _DMLC if text(name, env=env) is None]
    if missing:
        present = [name for name in names if text(name, env=env) is not None]
        raise ConfigError(
            f"{', '.join(present)} is set but {', '.join(missing)} is not; a DMLC cluster needs "
            "all of them, and DMLC_ROLE in every process"
        )
    role = text("DMLC_ROLE", "worker", env=env)
    if role not in ("worker", "server", "scheduler"):
        raise ConfigError(f"DMLC_ROLE={role!r}: use worker, server or scheduler")
    host, port = text("DMLC_PS_ROOT_URI", env=env), whole("DMLC_PS_ROOT_PORT", env=env)
    return Cluster(
        f"tcp://{host}:{port}",
        role,
        workers=whole("DMLC_NUM_WORKER", env=env),
        servers=whole("DMLC_NUM_SERVER", env=env),
    )


def bigarray_bound(given: int | None, default: int) -> int:
    """Return the elements from which a key is cut over all servers.

    Raises:
        ConfigError: unless it is a whole number from 1 on.
    """
    for name in BIGARRAY_VARIABLES:
        if given is None:
            given = whole(name)
    bound = default if given is None else given
    if type(bound) is not int or bound < 1:
        raise ConfigError(f"bigarray_bound={bound!r}: use a whole number of elements from 1 on")
    return bound
