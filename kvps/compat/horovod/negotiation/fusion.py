"""Fusion: which operations of one cycle travel as one buffer.

Every rank decides the same, because every rank has the same decisions in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvps.compat.horovod.negotiation.coordinator import Execute
from kvps.compat.horovod.negotiation.request import ALLREDUCE, BROADCAST, SUMMING


def fused(runs: Sequence[tuple[Execute, int]], limit: int) -> list[list[Execute]]:
    """Return the operations of a cycle as buckets, in their order.

    The sums of one process set and element type share buckets, and so do the broadcasts of one root. The place of a
    bucket is that of its first operation.

    Args:
        runs: operations, each with the bytes of its tensors.
        limit: bytes of a bucket, unless its only operation is larger; 0 fuses nothing.
    """
    buckets: list[list[Execute]] = []
    latest: dict[Hashable, tuple[list[Execute], int]] = {}
    for run, size in runs:
        kind = _kind(run)
        bucket, filled = latest.get(kind, ([], 0))
        if kind is None or not bucket or filled + size > limit:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(run)
        if kind is not None:
            latest[kind] = bucket, filled + size
    return buckets


def _kind(run: Execute) -> Hashable:
    """Return what operations of one bucket have in common; None if this one travels alone."""
    request = run.first
    if request.kind == BROADCAST:
        return request.process_set, request.kind, request.root
    dtypes = {part.dtype for part in request.parts}
    if request.kind == ALLREDUCE and request.op in SUMMING and len(dtypes) == 1:
        return request.process_set, request.kind, dtypes.pop(), run.joined
    return None
