"""Counters over time: the last answers or beats of each member, and the rates and quantiles that
follow from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvps.core.counts import LINK_BUSY, LINK_WATCHED, bounds_of
from kvps.core.scheduler.figures.measurements import ServerFigures
from kvps.protocol.membership import StoreFigures

WINDOW_S = 30.0
"""Seconds over which latencies and lateness are taken."""
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Moment:
    """An answer of a server, by the names of metrics; or a beat of a member, by the names of its counters."""

    at: float
    number: int
    values: Mapping[tuple[str, str], float]
    buckets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    moved: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @classmethod
    def of(cls, figures: ServerFigures, now: float) -> Moment:
        """Return what ``figures`` say, which were measured ``age_s`` before ``now``."""
        measured = figures.measured
        return cls(
            now - figures.age_s,
            measured.number,
            {(count.name, count.label): count.value for count in measured.counts},
            {histogram.name: histogram.buckets for histogram in measured.histograms},
            {store.store: store.version for store in measured.stores},
            {(traffic.store, traffic.key): traffic.moved_bytes for traffic in measured.traffic},
        )

    def value(self, name: str, label: str = "") -> float:
        """Return a counter or gauge; 0 where there is none."""
        return self.values.get((name, label), 0.0)

    def total(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        return sum([value for (of, _), value in self.values.items() if of == name])


@dataclass(slots=True)
class Track:
    """The answers, or the beats, of one incarnation of a member in the last seconds."""

    incarnation: int
    window_s: float = WINDOW_S
    stores: tuple[StoreFigures, ...] = ()
    moments: deque[Moment] = field(default_factory=deque)

    def add(self, moment: Moment) -> None:
        """Take in an answer, unless it is the last one again."""
        if not self.moments or moment.number != self.moments[-1].number:
            self.moments.append(moment)
        while len(self.moments) > 2 and self.moments[1].at < moment.at - self.window_s:
            self.moments.popleft()

    @property
    def last(self) -> Moment:
        """The newest answer."""
        return self.moments[-1]

    def rate(self, name: str, label: str = "") -> float:
        """Return by how much a counter grows per second, between the last two answers."""
        return self._rate([(moment.at, moment.value(name, label)) for moment in self._pair])

    def mean_rate(self, name: str) -> float:
        """Return by how much a counter grows per second in the window."""
        return self._rate([(moment.at, moment.value(name)) for moment in (self.moments[0], self.last)])

    def rounds_rate(self) -> float:
        """Return how many versions the stores advance per second: those with rounds, or all if none has."""
        kept = [figure.store for figure in self.stores if figure.mode == "sync"] or list(self.last.versions)
        points = [
            (moment.at, sum([moment.versions.get(store, 0) for store in kept])) for moment in self._pair
        ]
        return self._rate(points)

    def moved_rate(self, key: tuple[str, str]) -> float:
        """Return how many bytes of values of a run of keys move per second."""
        return self._rate([(moment.at, moment.moved.get(key, 0)) for moment in self._pair])

    def growth(self, name: str, label: str = "") -> float:
        """Return by how much a counter has grown in the window."""
        return max(0.0, self.last.value(name, label) - self.moments[0].value(name, label))

    def grown_buckets(self, name: str) -> list[int]:
        """Return the values that came into each bucket of a histogram in the window."""
        before, after = [moment.buckets.get(name, ()) for moment in (self.moments[0], self.last)]
        empty = (0,) * (len(bounds_of(name)) + 1)
        pairs = zip(before or empty, after or empty, strict=False)
        return [max(0, new - old) for old, new in pairs]

    def links(self) -> dict[int, tuple[float, float]]:
        """Return by worker the shares of the time in which values from it, and to it, were under way."""
        found = {}
        for name, label in self.last.values:
            if name == LINK_WATCHED and label.isdecimal() and (all_s := self.growth(name, label)):
                in_s, out_s = [self.growth(LINK_BUSY, f"{label},{way}") for way in ("in", "out")]
                found[int(label)] = in_s / all_s, out_s / all_s
        return found

    @property
    def _pair(self) -> list[Moment]:
        return list(self.moments)[-2:]

    @staticmethod
    def _rate(points: Sequence[tuple[float, float]]) -> float:
        (begin, before), (end, after) = points[0], points[-1]
        return max(0.0, after - before) / (end - begin) if end > begin else 0.0


def track_of(tracks: dict[K, Track], member: K, incarnation: int, window_s: float = WINDOW_S) -> Track:
    """Return the track of a member, a new one if its process was replaced."""
    track = tracks.get(member)
    if track is None or track.incarnation != incarnation:
        track = tracks[member] = Track(incarnation, window_s)
    return track


def added(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the sums of the columns; rows may be empty.

    Example:
        >>> added([(1, 2), (), (3, 4)])
        [4, 6]
    """
    return [sum(column) for column in zip(*[row for row in rows if row], strict=False)]


def quantile(name: str, buckets: Sequence[int], share: float) -> float | None:
    """Return a quantile of a histogram, interpolated within its bucket; None if it is empty.

    Above the highest bound that bound is returned.

    Example:
        >>> quantile("kvps_round_duration_seconds", [0, 0, 4], 0.5)
        0.00175
    """
    bounds, target = bounds_of(name), share * sum(buckets)
    if not target:
        return None
    below, seen = 0.0, 0
    for bound, count in zip(bounds, buckets, strict=False):
        if count and seen + count >= target:
            return below + (bound - below) * (target - seen) / count
        below, seen = bound, seen + count
    return float(bounds[-1])
