"""Retention: which complete checkpoints of a directory a new checkpoint makes superfluous.

A job keeps its two newest checkpoints, and the newest with each store that it has closed since: they are all that is left
of that store. Checkpoints of *earlier jobs* in the same directory are another matter: a job may
be about to restore one of them, or have begun anew by mistake. So a checkpoint of an earlier job is removed only
when checkpoints of this job that all servers have have passed it: they have all its stores, each at least at its version.
A checkpoint with a tag is never removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvps.checkpoint.manifest import Manifest

KEPT = 2
"""The number of complete cuts without a tag that are kept."""


CLOSED_KEPT = 8
"""The number of checkpoints that are kept for stores that the job has closed since."""


def superfluous(complete: Sequence[Manifest], common: int) -> list[Manifest]:
    """Return the complete checkpoints that may be removed.

    Args:
        complete: all that are complete here, oldest first; the last was completed just now.
        common: the newest checkpoint of the same job that all servers have; 0 for none yet.
    """
    ours = [manifest for manifest in complete if manifest.job == complete[-1].job]
    reached: dict[str, int] = {}
    for image in ours:
        if image.cut <= common:
            for name, store in image.stores.items():
                reached[name] = max(store.highest, reached.get(name, 0))
    kept = {common, *(manifest.cut for manifest in complete[-KEPT:]), *_last_of_closed(ours)}
    return [
        manifest
        for manifest in complete
        if not manifest.tag
        and manifest.cut not in kept
        and (manifest in ours or _is_passed(manifest, reached))
    ]


def _is_passed(manifest: Manifest, reached: Mapping[str, int]) -> bool:
    return all(store.highest <= reached.get(name, -1) for name, store in manifest.stores.items())


def _last_of_closed(ours: Sequence[Manifest]) -> list[int]:
    """Return the newest cuts with a store that no newer cut of the job has."""
    found, seen = [], set[str]()
    for manifest in reversed(ours):
        if manifest is not ours[-1] and not manifest.stores.keys() <= seen:
            found.append(manifest.cut)
        seen |= manifest.stores.keys()
    return found[:CLOSED_KEPT]


def further(complete: Sequence[Manifest]) -> Manifest | None:
    """Return the newest checkpoint of an earlier job beside the first of this job; None if it is not the first.

    Only a checkpoint counts that has a store in common with the first: others are of another model.

    Args:
        complete: as for :func:`superfluous`.
    """
    *others, newest = complete
    if any(other.job == newest.job for other in others):
        return None
    like = [other for other in others if other.stores.keys() & newest.stores.keys()]
    return like[-1] if like else None
