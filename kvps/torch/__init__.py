"""PyTorch front ends: optimizers, process group, sharding and modules over a cluster.

``import kvps`` has made the backend "kvps" known to torch.distributed (:mod:`kvps.backend_name`).
"""

from kvps.torch.broadcast import (
    all_gather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    gather_object,
)
from kvps.torch.embedding import Embedding, EmbeddingBag
from kvps.torch.embedding_collection import EmbeddingCollection
from kvps.torch.local_steps.diloco import DiLoCo
from kvps.torch.local_steps.local_sgd import LocalSGD
from kvps.torch.metrics import average
from kvps.torch.optimizer import DistributedOptimizer
from kvps.torch.sharded.shard import Sharded, shard
from kvps.torch.sync_batchnorm import SyncBatchNorm

__all__ = ["DiLoCo", "DistributedOptimizer", "LocalSGD", "Sharded", "SyncBatchNorm", "shard"]
__all__ += [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "all_gather_object",
    "average",
    "gather_object",
]
__all__ += ["broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
