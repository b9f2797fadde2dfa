"""Tables for people: what was measured, and how it compares with gloo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from kvps.bench.network_layout import Hosts
from kvps.bench.report.figures import Measured, ratio_of, traffic_of
from kvps.bench.report.sweeps import Sweep


def headline(machine: Mapping[str, object]) -> str:
    """Return one line about the machine, and a second one if it is busy."""
    line = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; Python "
        f"{machine['python']}, torch {machine['torch']}, kvps {machine['kvps']}"
    )
    if float(str(machine["load"])) > 0.5 * int(str(machine["cores"])):
        line += (
            f"\nThe machine is busy (load {machine['load']}): ratios are worth something, times not"
        )
    return line


def table_of(rows: Sequence[Measured]) -> Table:
    """Return all systems, workload by workload."""
    table = Table()
    for name in ("workload", "arrays", "MB", "system"):
        table.add_column(name, justify="right" if name in ("arrays", "MB") else "left")
    _add_time_columns(table)
    for number, row in enumerate(rows):
        is_new = number == 0 or rows[number - 1].case != row.case
        is_last = number + 1 == len(rows) or rows[number + 1].case != row.case
        megabytes = row.case.payload_bytes / 1e6
        what = (row.case.workload, f"{row.case.arrays:,}", f"{megabytes:.1f}")
        cells = what if is_new else ("", "", "")
        table.add_row(*cells, row.system, *_times(row, rows), end_section=is_last)
    return table


def table_of_sweep(rows: Sequence[Measured], sweep: Sweep) -> Table:
    """Return all systems, value by value."""
    table = Table()
    table.add_column(sweep.axis, justify="right")
    table.add_column("system")
    _add_time_columns(table)
    for number, row in enumerate(rows):
        is_new = number == 0 or rows[number - 1].case != row.case
        is_last = number + 1 == len(rows) or rows[number + 1].case != row.case
        value = f"{sweep.value(row.case):,}" if is_new else ""
        table.add_row(value, row.system, *_times(row, rows), end_section=is_last)
    return table


def table_of_network(rows: Sequence[Measured], link_bytes_per_s: float) -> Table:
    """Return all systems, with how near they come to what a link allows."""
    table = Table()
    for name in ("workload", "system"):
        table.add_column(name)
    _add_time_columns(table)
    table.add_column("% of M/B", justify="right")
    for row in rows:
        bound_ms = 1e3 * row.case.payload_bytes / link_bytes_per_s
        percent = f"{100 * bound_ms / row.median_ms:.0f}"
        table.add_row(row.case.workload, row.system, *_times(row, rows), percent)
    return table


def table_of_traffic(rows: Sequence[Measured], hosts: Hosts) -> Table:
    """Return what each host's link carried in a round."""
    table = Table()
    for name in ("workload", "system", "host", "holds"):
        table.add_column(name)
    for name in ("MB in", "MB out", "in / M", "out / M"):
        table.add_column(name, justify="right")
    for row in rows:
        traffic = traffic_of(row)
        for number, one in enumerate(traffic):
            what = (row.case.workload, row.system) if number == 0 else ("", "")
            carried = (one.in_bytes, one.out_bytes)
            table.add_row(
                *(*what, one.host, hosts.holds(number)),
                *(f"{count / 1e6:.2f}" for count in carried),
                *(f"{count / row.case.payload_bytes:.2f}" for count in carried),
                end_section=number + 1 == len(traffic),
            )
    return table


def table_of_limits(limits: Mapping[str, float]) -> Table:
    """Return what the machine can do at best."""
    table = Table("limit of this machine")
    table.add_column("GB/s", justify="right")
    for name, gigabytes_per_s in limits.items():
        table.add_row(name, f"{gigabytes_per_s:.1f}")
    return table


def _add_time_columns(table: Table) -> None:
    for name in ("median ms", "trials from .. to", "ratio to gloo"):
        table.add_column(name, justify="right")


def _times(row: Measured, rows: Sequence[Measured]) -> tuple[str, str, str]:
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
