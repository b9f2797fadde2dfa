"""What PyTorch scripts expect around their training loop, over a store: broadcasts, means, batch norm."""

from kvps.torch.batchnorm import SyncBatchNorm
from kvps.torch.broadcasts import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from kvps.torch.metrics import average

__all__ = [
    "SyncBatchNorm",
    "average",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
