"""How PyTorch scripts use a cluster without thinking in keys.

Importing it makes the backend "kvps" known to torch.distributed.
"""

from kvps.torch.optimizer import DistributedOptimizer
from kvps.torch.rendezvous import register as _register

_register()

__all__ = ["DistributedOptimizer"]
