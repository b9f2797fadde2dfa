"""Horovod's interface for PyTorch over kvps: ``import kvps.compat.horovod as hvd`` in place of
``import horovod.torch as hvd``.

Collectives are matched by name, in any order, and mismatched ones fail on every rank at once.
``docs/migrating/horovod.md`` has a table of every name.
"""

from kvps.compat.horovod import elastic, mpi_ops
from kvps.compat.horovod.common.exceptions import HostsUpdatedInterrupt
from kvps.compat.horovod.compression import Compression
from kvps.compat.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from kvps.compat.horovod.mpi_ops import *  # noqa: F403  # all of them are names of this package, too
from kvps.compat.horovod.optimizer import DistributedOptimizer
from kvps.compat.horovod.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "elastic",
    "mpi_ops",
]
__all__ += ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
__all__ += mpi_ops.__all__
