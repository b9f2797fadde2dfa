"""kvps: a parameter server for PyTorch.

The public names are loaded when they are first used, so that the scheduler and every ``--help``
start without torch.
"""

from __future__ import annotations

import gc
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvps import errors
from kvps.backend_name import register_with_torch
from kvps.errors import *  # noqa: F403  # all of them are names of this package, too

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvps.data import data_sampler, epochs_from, split_and_load
    from kvps.runtime.local_cluster import LocalCluster
    from kvps.runtime.preemption import leave_at_sigterm
    from kvps.runtime.process import shutdown
    from kvps.store.base import KVStoreBase
    from kvps.store.create import create
    from kvps.store.embedding import EmbeddingTable
    from kvps.store.kvstore import KVStore
    from kvps.subscriber import subscribe
    from kvps.trainer import Trainer

_HOMES: dict[str, tuple[str, ...]] = {
    "kvps.store.base": ("KVStoreBase",),
    "kvps.runtime.local_cluster": ("LocalCluster",),
    "kvps.store.create": ("KVStore", "create"),
    "kvps.runtime.process": ("shutdown",),
    "kvps.store.embedding": ("EmbeddingTable",),
    "kvps.runtime.preemption": ("leave_at_sigterm",),
    "kvps.data": ("data_sampler", "epochs_from", "split_and_load"),
    "kvps.trainer": ("Trainer",),
    "kvps.subscriber": ("subscribe",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["KVStore", "KVStoreBase", "EmbeddingTable", "Trainer", "LocalCluster", "__version__"]
__all__ += ["create", "data_sampler", "epochs_from", "leave_at_sigterm", "shutdown", "split_and_load"]
__all__ += ["subscribe"]
__all__ += [cls.__name__ for cls in errors.BY_CODE.values()]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kvps' has no attribute {name!r}")
    value = getattr(_imported(home), name)
    globals()[name] = value
    return value


def _imported(home: str) -> ModuleType:
    """Import a module, without the garbage collections that would look at all objects of torch in vain."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(home)
    finally:
        if was_on:
            gc.enable()


def __dir__() -> list[str]:
    return sorted(__all__)


register_with_torch()
