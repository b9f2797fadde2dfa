"""Measured figures, and the medians, ratios and document computed from them.

A round takes as long as its slowest worker. A trial's figure is the median of its rounds, a row's
the median of its trials, and a ratio is a row's time over gloo's time in the same case.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvps.tools.bench.systems import BASE
from kvps.tools.bench.workloads import payload_bytes, shapes_of


@dataclass(frozen=True, slots=True)
class Case:
    """The workload of every system, and the numbers of workers and servers."""

    workload: str
    workers: int
    servers: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of all arrays."""
        return payload_bytes(shapes_of(self.workload))

    @property
    def arrays(self) -> int:
        """The number of arrays."""
        return len(shapes_of(self.workload))


@dataclass(frozen=True, slots=True)
class TrialTimes:
    """One start of one system: the times of its rounds."""

    rounds_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The median of its rounds."""
        return statistics.median(self.rounds_ms)


@dataclass(slots=True)
class Measurement:
    """All trials of one system in one case."""

    case: Case
    system: str
    trials: list[TrialTimes] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """The median of the trials' medians."""
        return statistics.median(trial.median_ms for trial in self.trials)

    @property
    def extremes_ms(self) -> tuple[float, float]:
        """The fastest and the slowest trial."""
        medians = [trial.median_ms for trial in self.trials]
        return min(medians), max(medians)


def alternate(
    cases: Sequence[Case],
    systems: Sequence[str],
    repeat: int,
    measure: Callable[[Case, str], TrialTimes],
) -> list[Measurement]:
    """Measure every system in every case ``repeat`` times, one system after the other.

    Machines drift: A, B, C, A, B, C has all systems drift alike, A, A, B, B, C, C has not.
    """
    rows = []
    for case in cases:
        of_case = [Measurement(case, system) for system in systems]
        for _ in range(repeat):
            for row in of_case:
                row.trials.append(measure(case, row.system))
        rows += of_case
    return rows


def slowest(workers: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return for each round the time of the worker that took longest."""
    return tuple(max(times) for times in zip(*workers, strict=True))


def ratio_of(row: Measurement, rows: Sequence[Measurement]) -> float | None:
    """Return the row's time over gloo's in the same case; None if gloo was not measured."""
    for other in rows:
        if other.case == row.case and other.system == BASE:
            return row.median_ms / other.median_ms
    return None


def document(
    rows: Sequence[Measurement],
    machine: Mapping[str, object],
    settings: Mapping[str, object],
    limits: Mapping[str, float],
    more_of: Callable[[Measurement], Mapping[str, object]] = lambda row: {},
) -> dict[str, object]:
    """Return everything as what JSON can hold; ``more_of`` adds entries to a row."""
    return {
        "machine": dict(machine),
        "settings": dict(settings),
        "limits_gb_per_s": dict(limits),
        "rows": [{**_row(row, rows), **more_of(row)} for row in rows],
    }


def _row(row: Measurement, rows: Sequence[Measurement]) -> dict[str, object]:
    return {
        "workload": row.case.workload,
        "payload_bytes": row.case.payload_bytes,
        "arrays": row.case.arrays,
        "workers": row.case.workers,
        "servers": row.case.servers,
        "system": row.system,
        "median_ms": row.median_ms,
        "ratio_to_gloo": ratio_of(row, rows),
        "trials": [
            {"median_ms": trial.median_ms, "rounds_ms": trial.rounds_ms} for trial in row.trials
        ],
    }
