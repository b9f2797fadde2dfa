"""Jobs on Ray: servers beside the workers of Ray Train, or of any Ray program.

The names need Ray (``pip install 'kvps[ray]'``), and are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvps.platforms.ray.plan import demand_version

if TYPE_CHECKING:
    from kvps.platforms.ray.backend import KvpsConfig
    from kvps.platforms.ray.context import RayCluster, WorkerSeat, cluster

_HOME_OF = {
    "KvpsConfig": "kvps.platforms.ray.backend",
    "RayCluster": "kvps.platforms.ray.context",
    "WorkerSeat": "kvps.platforms.ray.context",
    "cluster": "kvps.platforms.ray.context",
}

__all__ = ["RayCluster", "KvpsConfig", "WorkerSeat", "cluster"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            f"kvps.platforms.ray.{name} needs Ray: pip install 'kvps[ray]' on every node"
        ) from error
    demand_version(getattr(ray, "__version__", "0"))
    found = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = found
    return found
