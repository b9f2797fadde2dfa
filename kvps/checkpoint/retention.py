"""Retention: which complete checkpoints of a directory a new checkpoint makes superfluous.

A job keeps its two newest checkpoints. Checkpoints of *earlier jobs* in the same directory are another matter: a job may
be about to restore one of them, or have begun anew by mistake. So a checkpoint of an earlier job is removed only
when a checkpoint of this job that all servers have has passed it: it has all its stores, each at least at its version.
A checkpoint with a tag is never removed.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvps.checkpoint.manifest import Manifest

KEPT = 2
"""The number of complete cuts without a tag that are kept."""


def has_passed(newer: Manifest, older: Manifest) -> bool:
    """Return whether ``newer`` has every store of ``older``, at its version or a later one.

    Example:
        >>> image = ImageFile(image_name(0, 1), 8, "0" * 64)
        >>> def at(version):
        ...     stores = {"model": StoreVersions(1, version, version)}
        ...     return Manifest(1, bytes(16), 0, 1, "0.1.0", (image,), stores)
        >>> has_passed(at(10), at(9)), has_passed(at(8), at(9))
        (True, False)
    """
    return all(
        name in newer.stores and newer.stores[name].highest >= store.highest
        for name, store in older.stores.items()
    )


def superfluous(complete: Sequence[Manifest], common: int) -> list[Manifest]:
    """Return the complete checkpoints that may be removed.

    Args:
        complete: all that are complete here, oldest first; the last was completed just now.
        common: the newest checkpoint of the same job that all servers have; 0 for none yet.
    """
    newest = complete[-1]
    proof = next((one for one in complete if one.cut == common), None)
    return [
        one
        for one in complete[:-KEPT]
        if not one.tag
        and one.cut != common
        and (one.job == newest.job or (proof is not None and has_passed(proof, one)))
    ]


def further(complete: Sequence[Manifest]) -> Manifest | None:
    """Return the newest checkpoint of an earlier job beside the first of this job; None if it is not the first.

    Only a checkpoint counts that has a store in common with the first: others are of another model.

    Args:
        complete: as for :func:`superfluous`.
    """
    *others, newest = complete
    if any(one.job == newest.job for one in others):
        return None
    like = [one for one in others if one.stores.keys() & newest.stores.keys()]
    return like[-1] if like else None
