"""Elastic training: a function that goes on from the last commit when a rank is lost and comes back."""

from kvps.compat.horovod.elastic.run import run
from kvps.compat.horovod.elastic.sampler import ElasticSampler
from kvps.compat.horovod.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
