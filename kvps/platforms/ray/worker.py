"""A worker's part in a cluster on Ray: taking its place in this process, and leaving it.

These functions run in processes of Ray, which may run other tasks later: leaving restores the environment.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from kvps.errors import ConfigError
from kvps.platforms.ray.plan import ServerPlace
from kvps.runtime.key_files import KeyMemory, parse


@dataclass(slots=True)
class _Taken:
    """The place that this process has, and what leaving restores."""

    place: ServerPlace
    before: dict[str, str | None]
    """The variables that joining changed, as they were; None for an unset one."""
    keys: KeyMemory | None


_taken: _Taken | None = None


def take(place: ServerPlace) -> None:
    """Make this process a worker of a cluster: the next store joins it.

    Raises:
        ConfigError: if the process is a worker already.
    """
    global _taken
    if _taken is not None:
        raise ConfigError(
            f"process {os.getpid()} is worker {_taken.place.rank} already, and a process is one worker: use "
            "a task or an actor for each, and no threads"
        )
    keys = KeyMemory(parse(place.keys, "the job")) if place.keys else None
    now = dict(os.environ)
    then: dict[str, str | None] = dict(place.environment(now, None if keys is None else keys.path))
    changed = {name for name in now.keys() | then.keys() if now.get(name) != then.get(name)}
    _taken = _Taken(place, {name: now.get(name) for name in changed}, keys)
    _set({name: then.get(name) for name in changed})


def leave(failure: BaseException | None) -> None:
    """Leave the cluster; do nothing in a process that is no worker.

    Args:
        failure: the error that ended the worker, which makes it a lost worker; None if it is done,
            and its pushes are flushed.

    Raises:
        KvpsError: if a push could not be flushed.
    """
    global _taken
    taken, _taken = _taken, None
    if taken is None:
        return
    try:
        _end_session(failure)
    finally:
        _set(taken.before)
        if taken.keys is not None:
            taken.keys.close()


def _end_session(failure: BaseException | None) -> None:
    if "kvps.runtime.process" not in sys.modules:  # no store was created
        return
    from kvps.runtime import process

    if failure is None:
        process.shutdown()
    else:
        process.fail(f"raised {type(failure).__name__}")


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def warm() -> None:
    """Load what stores need, while servers start."""
    import kvps

    kvps.create  # noqa: B018, the name loads torch


def free_address(host: str) -> str:
    """Return HOST:PORT with a port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"
