"""Tables for people: the measured times, and their ratio to gloo's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from kvps.tools.bench.figures import Measurement, ratio_of


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
    """Add the columns that :func:`times_of` fills; without the range of the trials where each case has one trial."""
    trials = ("trials from .. to",) if has_trials else ()
    for name in ("median ms", *trials, "ratio to gloo"):
        table.add_column(name, justify="right")


def times_of(row: Measurement, rows: Sequence[Measurement]) -> tuple[str, str, str]:
    """Return a row's median, the range of its trials, and its ratio to gloo."""
    ratio = ratio_of(row, rows)
    least, most = row.extremes_ms
    return (
        as_ms(row.median_ms),
        f"{as_ms(least)} .. {as_ms(most)}",
        "" if ratio is None else f"{ratio:.2f}",
    )


def as_ms(time_ms: float) -> str:
    """Return a time with three digits that mean something."""
    if time_ms >= 100:
        return f"{time_ms:,.0f}"
    return f"{time_ms:.1f}" if time_ms >= 10 else f"{time_ms:.2f}"
