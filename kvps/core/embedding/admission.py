"""Admission: a count-min sketch that tells which ids were pushed often enough to get a row.

Most ids of real data are seen once or twice, and a row for each would fill the servers. So a table
may admit an id only at its n-th push. The counts of ids without a row are kept in a count-min
sketch: a fixed number of counters, some of which each id shares with others. A count may come out
too high by that, and never too low: an id is admitted at its n-th push or earlier, never later.

When half as many pushes as there are counters in a row were counted, all counts are halved. So
the sketch never fills up, and what counts is how often an id comes *lately*.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvps.core.embedding.id_hash import COUNT_SALT, Ids, hashes

DEPTH = 4
WIDTH = 1 << 20
"""Counters in each of DEPTH rows: 4 MiB together. An id that was never counted is taken for a counted id in
about one case in forty, just before the counts are halved, and less often otherwise."""
ADMIT_MAX = 255
"""Largest value of a counter."""


class Admission:
    """Counts pushes of ids that have no row.

    Args:
        admit: at which push an id is admitted; 2 to :data:`ADMIT_MAX`.
        width: counters in each row; a power of two.
    """

    def __init__(self, admit: int, width: int = WIDTH) -> None:
        self._admit = admit
        self.counts = np.zeros((DEPTH, width), np.uint8)
        self.counted = 0
        """Pushes counted since the counts were last halved."""

    def count(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Count one push of each id, named once each; return which of them are admitted by it."""
        width = self.counts.shape[1]
        places = [
            (hashes(ids, COUNT_SALT + row) & np.uint64(width - 1)).view(np.int64)
            for row in range(DEPTH)
        ]
        pairs = list(zip(self.counts, places, strict=True))
        seen = np.minimum.reduce([counts[at] for counts, at in pairs])
        counts_now = np.minimum(seen, ADMIT_MAX - 1) + np.uint8(1)
        for counts, at in pairs:
            np.maximum.at(counts, at, counts_now)
        self.counted += len(ids)
        if self.counted > width // 2:
            self.counts >>= 1
            self.counted = 0
        return np.asarray(counts_now >= self._admit)

    def merge(self, counts: npt.NDArray[np.uint8], counted: int) -> None:
        """Merge another sketch of this width: no id has a smaller count afterwards than it had there."""
        np.maximum(self.counts, counts, out=self.counts)
        self.counted = max(self.counted, counted)
