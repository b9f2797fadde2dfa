"""How PyTorch scripts use a cluster without thinking in keys."""

from kvps.torch.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
