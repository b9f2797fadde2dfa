"""BytePS's interface for PyTorch over kvps: ``import kvps.byteps as bps`` in place of ``import byteps.torch as bps``.

``docs/migrating/byteps.md`` has a table of every name.
"""

from kvps.byteps import cross_barrier, parallel
from kvps.byteps.compression import Compression
from kvps.byteps.ops import (
    declare,
    init,
    local_rank,
    local_size,
    poll,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_inplace,
    rank,
    resume,
    shutdown,
    size,
    suspend,
    synchronize,
)
from kvps.byteps.optimizer import (
    DistributedOptimizer,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

byteps_push_pull = push_pull_async_inplace
"""BytePS's other name of :func:`push_pull_async_inplace`."""

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "cross_barrier",
    "declare",
    "init",
    "local_rank",
    "local_size",
    "parallel",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
]
