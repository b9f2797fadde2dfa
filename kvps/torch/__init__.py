"""How PyTorch scripts use a cluster without thinking in keys.

Importing it makes the backend "kvps" known to torch.distributed.
"""

from kvps.torch.batchnorm import SyncBatchNorm
from kvps.torch.broadcasts import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from kvps.torch.comm_hook import CommState, comm_hook
from kvps.torch.embedding import Embedding
from kvps.torch.metrics import average
from kvps.torch.optimizer import DistributedOptimizer
from kvps.torch.rendezvous import register as _register
from kvps.torch.shard import Sharded, shard

_register()

__all__ = [
    "CommState",
    "DistributedOptimizer",
    "Embedding",
    "Sharded",
    "SyncBatchNorm",
    "average",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "comm_hook",
    "shard",
]
