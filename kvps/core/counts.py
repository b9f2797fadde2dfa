"""Counters of a core: what happened since the process began, by the name of its metric and a label.

A core counts and does nothing else: :mod:`kvps.observe` asks for a copy, and knows what each name
means. Labels are from small fixed sets. The names of keys, stores and peers are never labels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from kvps.errors import BY_CODE, KvpsError, Overload, Unauthorized

BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""The upper bounds of histograms of durations but the last bound, which is infinite."""
STALENESS = "kvps_staleness_versions"
STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""The upper bounds of the histogram of staleness, which counts versions."""
LINK_WATCHED, LINK_BUSY = "kvps_link_watched_seconds_total", "kvps_link_busy_seconds_total"
"""The counters of links to workers, by rank; and by rank and direction."""
UNFORESEEN = "unforeseen"
"""The reason of a refusal that is a bug here, or of an error without a class of its own."""


def bounds_of(name: str) -> tuple[float, ...]:
    """Return the upper bounds of a histogram; the last, infinite one is left out."""
    return STALENESS_BOUNDS if name == STALENESS else BOUNDS_S


@dataclass(frozen=True, slots=True)
class Durations:
    """The values of one histogram: durations of events, or the staleness of pushes."""

    buckets: tuple[int, ...]
    """How many were within each bound and above the one before; the last is without a bound."""
    total_s: float


class Counts:
    """The counters of one core."""

    def __init__(self) -> None:
        self.now = 0.0
        """The time of the door that was called last, for events that are not told the time."""
        self.lap: Callable[[], None] | None = None
        """Called before and after each step of an optimizer, for a timeline; None without."""
        self._values: defaultdict[tuple[str, str], float] = defaultdict(int)
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(BOUNDS_S) + 1))
        self._total_s: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, label: str = "", by: float = 1) -> None:
        """Count ``by`` more events, bytes or seconds."""
        self._values[name, label] += by

    def observe(self, name: str, value: float) -> None:
        """Count one event that took so many seconds, or was so many versions late."""
        if name == STALENESS and name not in self._buckets:
            self._buckets[name] = [0] * (len(STALENESS_BOUNDS) + 1)
        self._buckets[name][bisect_left(bounds_of(name), value)] += 1
        self._total_s[name] += value

    def refused(self, error: Exception) -> None:
        """Count a request that was answered by an error: a limit by its name, all else by the error."""
        if isinstance(error, Overload):
            self.add("kvps_overloads_total", error.reason)
        else:
            self.add("kvps_refusals_total", reason_of(error))

    def value(self, name: str, label: str = "") -> int:
        """Return one counter."""
        return int(self._values[name, label])

    def values(self) -> dict[tuple[str, str], float]:
        """Return a copy of all counters, by name and label."""
        return dict(self._values)

    def durations(self) -> dict[str, Durations]:
        """Return a copy of all histograms, by name."""
        return {
            name: Durations(tuple(buckets), self._total_s[name]) for name, buckets in self._buckets.items()
        }


def reason_of(error: Exception) -> str:
    """Return the label of a refusal by ``error``.

    Example:
        >>> from kvps.errors import Fenced
        >>> reason_of(Fenced("a newer incarnation has this rank"))
        'fenced'
    """
    if isinstance(error, KvpsError) and error.reason:
        return error.reason
    cls = BY_CODE[error.code] if isinstance(error, KvpsError) else KvpsError
    return UNFORESEEN if cls is KvpsError else _snake(cls.__name__)


def _snake(name: str) -> str:
    """Return ``ProtocolError`` as ``protocol_error``."""
    return "".join(
        ["_" * bool(at) + letter.lower() if letter.isupper() else letter for at, letter in enumerate(name)]
    )


REASONS = tuple(
    sorted({reason_of(cls("")) for cls in BY_CODE.values()} - {"overload"} | {*Unauthorized.REASONS})
)
"""The labels of refusals; an overload is counted by its limit."""
