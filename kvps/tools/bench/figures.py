"""Measured figures, the medians, ratios and document computed from them, and tables of them.

A round takes as long as its slowest worker. A trial's figure is the median of its rounds, a row's
the median of its trials, and a ratio is a row's time over gloo's time in the same case.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from rich.table import Table

from kvps import __version__
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
    cases: Sequence[Case], systems: Sequence[str], repeat: int, measure: Callable[[Case, str], TrialTimes]
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
        "trials": [{"median_ms": trial.median_ms, "rounds_ms": trial.rounds_ms} for trial in row.trials],
    }


def headline(machine: Mapping[str, object]) -> str:
    """Return one line about the machine, and a second one if it is busy."""
    line = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; Python "
        f"{machine['python']}, torch {machine['torch']}, kvps {machine['kvps']}"
    )
    if float(str(machine["load"])) > 0.5 * int(str(machine["cores"])):
        line += f"\nThe machine is busy (load {machine['load']}): trust the ratios, not the times"
    return line


def table_of(rows: Sequence[Measurement]) -> Table:
    """Return all systems, workload by workload."""
    table = Table()
    for name in ("workload", "arrays", "MB", "system"):
        is_number = name in ("arrays", "MB")
        # In a narrow terminal the headings of the times are wrapped, and not these.
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    has_trials = any(len(row.trials) > 1 for row in rows)
    add_time_columns(table, has_trials)
    for number, row in enumerate(rows):
        is_new = number == 0 or rows[number - 1].case != row.case
        is_last = number + 1 == len(rows) or rows[number + 1].case != row.case
        megabytes = row.case.payload_bytes / 1e6
        what = (row.case.workload, f"{row.case.arrays:,}", f"{megabytes:.1f}")
        cells = what if is_new else ("", "", "")
        median, trials, ratio = times_of(row, rows)
        times = (median, trials, ratio) if has_trials else (median, ratio)
        table.add_row(*cells, row.system, *times, end_section=is_last)
    return table


def table_of_limits(limits: Mapping[str, float]) -> Table:
    """Return the best times of the machine."""
    table = Table("limit of this machine")
    table.add_column("GB/s", justify="right")
    for name, gigabytes_per_s in limits.items():
        table.add_row(name, f"{gigabytes_per_s:.1f}")
    return table


def add_time_columns(table: Table, has_trials: bool = True) -> None:
    """Add the columns that :func:`times_of` fills; without the range of the trials where each case has one
    trial."""
    trials = ("trials from .. to",) if has_trials else ()
    for name in ("median ms", *trials, "ratio to gloo"):
        table.add_column(name, justify="right")


def times_of(row: Measurement, rows: Sequence[Measurement]) -> tuple[str, str, str]:
    """Return a row's median, the range of its trials, and its ratio to gloo."""
    ratio = ratio_of(row, rows)
    least, most = row.extremes_ms
    return (as_ms(row.median_ms), f"{as_ms(least)} .. {as_ms(most)}", "" if ratio is None else f"{ratio:.2f}")


def as_ms(time_ms: float) -> str:
    """Return a time with three digits that mean something."""
    if time_ms >= 100:
        return f"{time_ms:,.0f}"
    return f"{time_ms:.1f}" if time_ms >= 10 else f"{time_ms:.2f}"


def described() -> dict[str, object]:
    """Return the machine and the versions that matter."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "kvps": __version__,
        "torch": metadata.version("torch"),
        "pyzmq": metadata.version("pyzmq"),
    }


def _processor() -> str:
    """Return the name of the processor, where the kernel tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
