"""The merged trace: the spans of all processes on the scheduler's clock, and how exact that is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvps.protocol.envelope import Node, Role
from kvps.protocol.tracing import Part, RoundTrip
from kvps.tools.trace.spans import TimeSpan, unpack

SECOND_NS = 1_000_000_000
DRIFT = 10_000
"""Two clocks drift apart by at most a nanosecond in this many: 100 parts in a million."""


@dataclass(slots=True)
class Process:
    """One process, and its spans."""

    node: Node
    incarnation: int
    host: str
    pid: int
    spans: list[TimeSpan] = field(default_factory=list)
    """In the order of their beginnings, on the scheduler's clock."""
    error_ns: int | None = 0
    """By how much its times may be wrong; None if that is unknown."""
    lost: int = 0
    """Spans that are missing."""

    @property
    def name(self) -> str:
        """Its role and rank, with its life if there were several."""
        return str(self.node)


@dataclass(slots=True)
class MergedTrace:
    """One trace of one cluster."""

    processes: list[Process]
    wall_s: float = 0.0
    """Seconds since 1970 when the scheduler's clock was ``clock``."""
    clock: int = 0

    @property
    def begin(self) -> int:
        """When the first span begins."""
        return min([process.spans[0].begin for process in self.processes if process.spans], default=0)

    @property
    def end(self) -> int:
        """When the last span ends."""
        return max([span.end for process in self.processes for span in process.spans], default=0)

    @property
    def error_ns(self) -> int | None:
        """By how much the times of two processes may differ from the truth; None if unknown."""
        errors = [process.error_ns for process in self.processes]
        return None if None in errors else max([error or 0 for error in errors], default=0)


class ClockOffset:
    """The offset of one member's clock, from round trips between it and the scheduler.

    An answer that took ``back - sent`` was read somewhere in between: half of that is the error,
    and it grows with the time from there, as clocks drift. Clocks that agree within all errors
    count as equal: processes of one host have the same clock.
    """

    def __init__(self, trips: Sequence[RoundTrip]) -> None:
        self._trips = trips
        self._near: dict[int, RoundTrip] = {}
        self.error_ns: int | None = None
        self._is_equal = all(abs(_offset(trip)) <= _half(trip) for trip in trips)
        if trips and self._is_equal:
            self.error_ns = min([_half(trip) for trip in trips])

    def apply(self, clock: int) -> int:
        """Return the scheduler's time when the member's clock showed ``clock``."""
        if self._is_equal:
            return clock
        second = clock // SECOND_NS
        if second not in self._near:
            middle = second * SECOND_NS + SECOND_NS // 2
            errors = [_half(trip) + abs(trip.clock - middle) // DRIFT for trip in self._trips]
            self.error_ns = max(self.error_ns or 0, min(errors) + SECOND_NS // 2 // DRIFT)
            self._near[second] = self._trips[errors.index(min(errors))]
        return clock + _offset(self._near[second])


def _offset(trip: RoundTrip) -> int:
    return (trip.sent + trip.back) // 2 - trip.clock


def _half(trip: RoundTrip) -> int:
    return max(0, trip.back - trip.sent) // 2 + 1


def merge(parts: Iterable[tuple[Part, bytes]], wall_s: float = 0.0, clock: int = 0) -> MergedTrace:
    """Put all parts on the scheduler's clock.

    Args:
        parts: as they came from the scheduler.
        wall_s: seconds since 1970 at the moment ``clock``.
        clock: the moment on the scheduler's clock, in nanoseconds.

    Raises:
        ProtocolError: if they are damaged.
    """
    found: dict[tuple[int, int, int], Process] = {}
    offsets: dict[tuple[int, int, int], ClockOffset] = {}
    for part, octets in parts:
        who = part.role, part.rank, part.incarnation
        if who not in found:
            node = Node(Role(part.role), part.rank)
            found[who] = Process(node, part.incarnation, part.host, part.pid)
            offsets[who] = ClockOffset(part.trips)
        process, offset = found[who], offsets[who]
        process.lost = max(process.lost, part.lost)
        process.spans += [span._replace(begin=offset.apply(span.begin)) for span in unpack(octets)]
        process.error_ns = 0 if part.role == Role.SCHEDULER else offset.error_ns
    for process in found.values():
        process.spans.sort(key=lambda span: (span.begin, -span.took))
    return MergedTrace([found[who] for who in sorted(found)], wall_s, clock)
