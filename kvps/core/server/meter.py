"""The tally of a server: how late each rank pushes, how stale its values were, and which keys move
the most bytes.

Every figure is counted where it happens, by a few additions, and all of it is bounded: beyond
:data:`RUNS_MAX` runs of keys, and :data:`READS_MAX` reads, new ones are not counted.

Lateness is by how much a rank's pushes come after the first push of their round. It tells which
worker is slow, whatever the others do meanwhile: the rank that is first has 0. It is a moving
mean, so that a worker that was slow once is soon forgotten, and one that is slow always is found
within some rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from heapq import nlargest
from itertools import islice

from kvps.core.counts import STALENESS, Counts
from kvps.core.placement import EMBEDDING
from kvps.core.server.chunks.slab import Chunks
from kvps.protocol.membership import KeyTraffic
from kvps.protocol.values import Ask, Run

RUNS_MAX = 4096
"""Runs of keys whose traffic is counted."""
READS_MAX = 65_536
"""Reads whose version is remembered, each of one span by one rank."""
HOT_MAX = 16
"""Keys, or runs of keys, that are reported."""
OTHERS_MAX = 10_000
"""Keys of a run that are counted when it is reported."""

SMOOTHING = 8
"""Pushes after which a change shows by two thirds."""


class Lateness:
    """The lateness of the ranks that push to one store on one server, in seconds."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._is_news = False

    def note(self, ranks: Iterable[int], seconds: float) -> None:
        """A push of these ranks came so long after the first of its round."""
        self._is_news = True
        for rank in ranks:
            mean = self._means.get(rank)
            self._means[rank] = seconds if mean is None else mean + (seconds - mean) / SMOOTHING

    def take_news(self) -> bool:
        """Return whether there were pushes since this was asked last."""
        is_news, self._is_news = self._is_news, False
        return is_news

    def means(self) -> dict[int, float]:
        """Return a copy of the means, by rank."""
        return dict(self._means)


def most_late(stores: Iterable[Lateness], limit: int) -> dict[str, float]:
    """Return by rank the largest mean of several stores, of the ranks that are latest.

    Args:
        stores: of one server.
        limit: how many ranks to return at most.
    """
    largest: dict[int, float] = {}
    for store in stores:
        for rank, seconds in store.means().items():
            largest[rank] = max(seconds, largest.get(rank, 0.0))
    latest = sorted(largest.items(), key=lambda entry: (-entry[1], entry[0]))[:limit]
    return {str(rank): seconds for rank, seconds in latest}


class Tally:
    """The counters of one server.

    Args:
        counts: those that are metrics; they last as long as the process, all else as long as the stores.
    """

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.versions: dict[str, int] = {}
        """Store -> the newest version of any of its keys."""
        self._lateness: dict[str, Lateness] = {}
        """By store."""
        self._traffic: dict[tuple[int, int, int], int] = {}
        """(chunk, start, size) of a run -> bytes of values that were pushed and pulled."""
        self._reads: dict[tuple[int, int, int], int] = {}
        """(rank, chunk, start of a span) -> the version that this rank read last, where pushes
        have no rounds."""

    def forget(self) -> None:
        """Forget what belongs to stores that are dropped."""
        self.versions.clear()
        self._lateness.clear()
        self._traffic.clear()
        self._reads.clear()

    def drop(self, store: str, chunks: Collection[int]) -> None:
        """Forget what belongs to one store and its chunks."""
        self.versions.pop(store, None)
        self._lateness.pop(store, None)
        self._traffic = {at: size for at, size in self._traffic.items() if at[0] not in chunks}
        self._reads = {at: seen for at, seen in self._reads.items() if at[1] not in chunks}

    # --- pushes -----------------------------------------------------------------------------

    def pushed(self, ranks: tuple[int, ...], size: int) -> None:
        """Count a push of ``size`` bytes, which speaks for these ranks."""
        for rank in ranks:
            label = str(rank)
            self.counts.add("kvps_worker_pushes_total", label)
            self.counts.add("kvps_worker_bytes_total", label, size // len(ranks))

    def late(self, store: str, ranks: tuple[int, ...], seconds: float) -> None:
        """Count by how much a push came after the first of its round."""
        lateness = self._lateness.get(store)
        if lateness is None:
            lateness = self._lateness[store] = Lateness()
        lateness.note(ranks, seconds)
        for rank in ranks:
            label = str(rank)
            self.counts.add("kvps_straggler_seconds_total", label, seconds)
            self.counts.add("kvps_straggler_pushes_total", label)

    def latest(self, store: str, limit: int) -> dict[str, float]:
        """Return the mean lateness of the ranks that are latest in a store, at most ``limit``."""
        return most_late([self._lateness[store]] if store in self._lateness else [], limit)

    def latest_news(self, limit: int) -> dict[str, float]:
        """Return that of the stores to which there were pushes since this was asked last."""
        news = [lateness for lateness in self._lateness.values() if lateness.take_news()]
        return most_late(news, limit)

    def closed(self, store: str, number: int, opened_at: float) -> None:
        """Count a round that closes now."""
        self.counts.observe("kvps_round_duration_seconds", self.counts.now - opened_at)
        self.moved(store, number + 1)

    def moved(self, store: str, version: int) -> None:
        """Take in the version of a key."""
        if version > self.versions.get(store, 0):
            self.versions[store] = version

    def compressed(self, direction: str, size: int, uncompressed: int) -> None:
        """Count compressed values: their bytes, and how many they would have been."""
        self.counts.add("kvps_compressed_bytes_total", direction, size)
        self.counts.add("kvps_uncompressed_bytes_total", direction, uncompressed)

    # --- staleness --------------------------------------------------------------------------

    def read(self, rank: int, chunk: int, start: int, version: int) -> None:
        """Note which version of a span a rank is given."""
        at = rank, chunk, start
        if at in self._reads or len(self._reads) < READS_MAX:
            self._reads[at] = version

    def stale(self, ranks: tuple[int, ...], chunk: int, start: int, version: int) -> int | None:
        """Count by how many versions a span has moved since the ranks that push to it read it.

        Returns:
            The most of any rank; None if no rank is known to have read it.
        """
        reads = [self._reads.get((rank, chunk, start)) for rank in ranks]
        ages = [max(version - before, 0) for before in reads if before is not None]
        for age in ages:
            self.counts.observe(STALENESS, age)
        return max(ages, default=None)

    # --- keys -------------------------------------------------------------------------------

    def traffic(self, chunk: int, runs: Sequence[Run] | Sequence[Ask], itemsize: int) -> None:
        """Count the values of runs that are pushed or pulled."""
        for run in runs:
            self.moved_bytes(chunk, run.start, run.size, run.size * itemsize)

    def moved_bytes(self, chunk: int, start: int, size: int, count: int) -> None:
        """Count bytes of values of one run."""
        at = chunk, start, size
        before = self._traffic.get(at)
        if before is not None or len(self._traffic) < RUNS_MAX:
            self._traffic[at] = (before or 0) + count

    def hot(self, chunks: Chunks) -> tuple[KeyTraffic, ...]:
        """Return the runs with the most traffic, by the names of their keys."""
        found = []
        for at, count in nlargest(HOT_MAX, self._traffic.items(), key=lambda entry: entry[1]):
            number, start, size = at
            chunk = chunks.by_number.get(number)
            if chunk is None:
                continue
            keys = [key for key, _, _ in islice(chunk.pieces(start, start + size), OTHERS_MAX)]
            name = keys[0].removeprefix(EMBEDDING)
            found.append(KeyTraffic(chunk.store, name, len(keys) - 1, count))
        return tuple(found)
