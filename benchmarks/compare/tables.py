"""Tables of sweeps, of networks, and of what each link carried."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks.compare.networks.layout import Hosts
from benchmarks.compare.networks.traffic import cpu_s_per_gb, traffic_of
from benchmarks.compare.sweeps import Sweep
from kvps.tools.bench.figures import Measurement, add_time_columns, times_of


def table_of_sweep(rows: Sequence[Measurement], sweep: Sweep) -> Table:
    """Return all systems, value by value."""
    table = Table()
    table.add_column(sweep.axis, justify="right")
    table.add_column("system")
    add_time_columns(table)
    for number, row in enumerate(rows):
        is_new = number == 0 or rows[number - 1].case != row.case
        is_last = number + 1 == len(rows) or rows[number + 1].case != row.case
        value = f"{sweep.value(row.case):,}" if is_new else ""
        table.add_row(value, row.system, *times_of(row, rows), end_section=is_last)
    return table


def table_of_network(rows: Sequence[Measurement], link_bytes_per_s: float) -> Table:
    """Return all systems, with how near they come to what a link allows."""
    table = Table()
    for name in ("workload", "system"):
        table.add_column(name)
    add_time_columns(table)
    for name in ("% of M/B", "CPU s per GB"):
        table.add_column(name, justify="right")
    for row in rows:
        bound_ms = 1e3 * row.case.payload_bytes / link_bytes_per_s
        percent = f"{100 * bound_ms / row.median_ms:.0f}"
        table.add_row(
            row.case.workload, row.system, *times_of(row, rows), percent, f"{cpu_s_per_gb(row):.2f}"
        )
    return table


def table_of_traffic(rows: Sequence[Measurement], hosts: Hosts) -> Table:
    """Return what each host's link carried in a round."""
    table = Table()
    for name in ("workload", "system", "host", "holds"):
        table.add_column(name)
    for name in ("MB in", "MB out", "in / M", "out / M"):
        table.add_column(name, justify="right")
    for row in rows:
        traffic = traffic_of(row)
        for number, link in enumerate(traffic):
            what = (row.case.workload, row.system) if number == 0 else ("", "")
            carried = (link.in_bytes, link.out_bytes)
            table.add_row(
                *what,
                link.host,
                hosts.holds(number),
                *(f"{count / 1e6:.2f}" for count in carried),
                *(f"{count / row.case.payload_bytes:.2f}" for count in carried),
                end_section=number + 1 == len(traffic),
            )
    return table
