"""The meter of a server: its counters, how late each rank pushes, how stale its values were, and which keys
move the most bytes.

Every figure is counted where it happens, by a few additions, and all of it is bounded: beyond
:data:`RUNS_MAX` runs of keys, and :data:`READS_MAX` reads, new ones are not counted.

Lateness is by how much a rank's pushes come after the first push of their round. It tells which
worker is slow, whatever the others do meanwhile: the rank that is first has 0. It is a moving
mean, so that a worker that was slow once is soon forgotten, and one that is slow always is found
within some rounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cache
from heapq import nlargest
from itertools import islice

import torch

from kvps.core.counts import BOUNDS_S, STALENESS, Counts
from kvps.core.placement import EMBEDDING
from kvps.core.server.chunks.slab import Chunks
from kvps.protocol.envelope import Packet, Role
from kvps.protocol.membership import Hello, KeyTraffic, Pong
from kvps.protocol.stores import Piece
from kvps.protocol.values import Ask, Run

RUNS_MAX = 4096
"""Runs of keys whose traffic is counted."""
READS_MAX = 65_536
"""Reads whose version is remembered, each of one span by one rank."""
HOT_MAX = 16
"""Keys, or runs of keys, that are reported."""
OTHERS_MAX = 10_000
"""Keys of a run that are counted when it is reported."""

NO_REQUESTS = Hello, Pong
"""Messages of a worker that ask for nothing of a store."""
ROUND = "kvps_round_duration_seconds"
IN, OUT = ("kvps_payload_bytes_total", "in"), ("kvps_payload_bytes_total", "out")
OF_RANKS = (
    *("kvps_worker_pushes_total", "kvps_worker_bytes_total"),
    *("kvps_straggler_seconds_total", "kvps_straggler_pushes_total"),
)
SMOOTHING = 8
"""Pushes after which a change shows by two thirds."""


@cache
def _of_rank(rank: int) -> tuple[tuple[str, str], ...]:
    """Return the counters of a rank's pushes."""
    return tuple([(name, str(rank)) for name in OF_RANKS])


class Meter(Counts):
    """The counters of one server: a call for each event.

    Metrics last as long as the process, all else as long as the stores.
    """

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[str, int] = {}
        """Store -> the newest version of any of its keys."""
        self._lateness: defaultdict[str, dict[int, float]] = defaultdict(dict)
        """Store -> rank -> the mean lateness of its pushes, in seconds."""
        self._late_news: set[str] = set()
        """Stores that had pushes since the lateness was told last."""
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

    # --- events -----------------------------------------------------------------------------

    def on_packet(self, packet: Packet, now: float) -> None:
        """A packet came."""
        self.now = now
        for frame in packet.payload:
            self._values[IN] += frame.nbytes
        kind = type(packet.message)
        if packet.envelope.role is Role.WORKER and kind not in NO_REQUESTS:
            self._values["kvps_requests_total", kind.__name__] += 1

    def on_push(self, verdict: str, ranks: tuple[int, ...], payload: Sequence[memoryview]) -> None:
        """A push of ``ranks`` was judged, and applied if it counts."""
        values = self._values
        values["kvps_pushes_total", verdict] += 1
        if verdict != "counted":
            return
        size = 0
        for frame in payload:
            size += frame.nbytes
        for rank in ranks:
            pushes, octets, _, _ = _of_rank(rank)
            values[pushes] += 1
            values[octets] += size // len(ranks)

    def on_count(self, store: str, ranks: tuple[int, ...], opened_at: float) -> None:
        """A push of ``ranks`` counts in a round of a span that was opened at this time."""
        late_s = self.now - opened_at
        means = self._lateness[store]
        self._late_news.add(store)
        for rank in ranks:
            mean = means.get(rank, late_s)
            means[rank] = mean + (late_s - mean) / SMOOTHING
            _, _, seconds, pushes = _of_rank(rank)
            self._values[seconds] += late_s
            self._values[pushes] += 1

    def on_values(self, chunk: int, runs: Sequence[Run] | Sequence[Ask], itemsize: int) -> None:
        """Values of these runs of a chunk were pushed, or are pulled."""
        traffic = self._traffic
        for run in runs:
            at = chunk, run.start, run.size
            count = traffic.get(at)
            if count is not None or len(traffic) < RUNS_MAX:
                traffic[at] = (count or 0) + run.size * itemsize

    def on_rows(self, piece: Piece, frames: Sequence[memoryview] | Sequence[torch.Tensor]) -> None:
        """Rows of a key or of a table, which begins here with ``piece``, were pushed or pulled."""
        self.on_values(piece.chunk, (Run(piece.start, piece.size, 0),), 0)
        at = piece.chunk, piece.start, piece.size
        if at in self._traffic:
            self._traffic[at] += sum([frame.nbytes for frame in frames])

    def on_close(self, store: str, number: int, opened_at: float, *, is_short: bool) -> None:
        """A round closes, without a lost rank's push if it is short."""
        took_s = self.now - opened_at
        self._buckets[ROUND][bisect_left(BOUNDS_S, took_s)] += 1
        self._total_s[ROUND] += took_s
        self.versions[store] = max(self.versions.get(store, 0), number + 1)
        if is_short:
            self._values["kvps_short_rounds_total", ""] += 1

    def on_send(self, payload: Sequence[memoryview]) -> None:
        """Payload goes to a worker."""
        for frame in payload:
            self._values[OUT] += frame.nbytes

    def moved(self, store: str, version: int) -> None:
        """Take in the version of a key."""
        self.versions[store] = max(self.versions.get(store, 0), version)

    def compressed(self, direction: str, size: int, uncompressed: int) -> None:
        """Count compressed values: their bytes, and how many they would have been."""
        self.add("kvps_compressed_bytes_total", direction, size)
        self.add("kvps_uncompressed_bytes_total", direction, uncompressed)

    # --- what is latest -----------------------------------------------------------------------

    def latest(self, store: str, limit: int) -> dict[str, float]:
        """Return the mean lateness of the ranks that are latest in a store, at most ``limit``."""
        return self._latest((store,), limit)

    def latest_news(self, limit: int) -> dict[str, float]:
        """Return the latest figures of the stores that had pushes since the last call."""
        news, self._late_news = self._late_news, set()
        return self._latest(news, limit)

    def _latest(self, stores: Collection[str], limit: int) -> dict[str, float]:
        """Return by rank the largest mean in these stores, of the ranks that are latest."""
        largest: dict[int, float] = {}
        for store in stores:
            for rank, seconds in self._lateness.get(store, {}).items():
                largest[rank] = max(seconds, largest.get(rank, 0.0))
        latest = sorted(largest.items(), key=lambda entry: (-entry[1], entry[0]))[:limit]
        return {str(rank): seconds for rank, seconds in latest}

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
            self.observe(STALENESS, age)
        return max(ages, default=None)

    # --- keys -------------------------------------------------------------------------------

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
