"""BytePS's interface for PyTorch over kvps: ``import kvps.compat.byteps as bps`` in place of
``import byteps.torch as bps``.

``docs/migrating/byteps.md`` has a table of every name.
"""

from kvps.compat.byteps import cross_barrier, ops, parallel
from kvps.compat.byteps.ops import *  # noqa: F403  # all of them are names of this package, too
from kvps.compat.byteps.ops import push_pull_async_inplace
from kvps.compat.horovod.compression import Compression

byteps_push_pull = push_pull_async_inplace
"""BytePS's other name of :func:`push_pull_async_inplace`."""

__all__ = ["Compression", "byteps_push_pull", "cross_barrier", "parallel"]
__all__ += ops.__all__
