"""Plots as PNG files: bars of a table, lines of a sweep. The only file that imports matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.compare.sweeps import Sweep
from kvps.tools.bench.figures import Measurement

DOTS_PER_INCH = 150
TIME = "median time of a round, ms"


def draw_bars(rows: Sequence[Measurement], path: Path, title: str) -> None:
    """Draw one panel per case, one bar per system."""
    cases = list(dict.fromkeys(row.case for row in rows))
    most = max(sum(row.case == case for row in rows) for case in cases)
    figure = Figure(figsize=(8, 1 + len(cases) * (0.8 + 0.3 * most)), layout="constrained")
    figure.suptitle(title)
    for number, case in enumerate(cases):
        panel = figure.add_subplot(len(cases), 1, number + 1)
        _draw_case(panel, [row for row in rows if row.case == case])
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _draw_case(panel: Axes, rows: Sequence[Measurement]) -> None:
    medians = [row.median_ms for row in rows]
    below = [row.median_ms - row.extremes_ms[0] for row in rows]
    above = [row.extremes_ms[1] - row.median_ms for row in rows]
    colours = ["tab:blue" if row.system.startswith("kvps") else "tab:gray" for row in rows]
    panel.barh([row.system for row in rows], medians, xerr=[below, above], color=colours)
    panel.invert_yaxis()
    panel.set_xlabel(TIME)
    case = rows[0].case
    panel.set_title(f"{case.workload}: {case.arrays:,} arrays, {case.payload_bytes / 1e6:,.1f} MB")


def draw_sweep(rows: Sequence[Measurement], sweep: Sweep, path: Path, title: str) -> None:
    """Draw one line per system, both axes logarithmic."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.add_subplot()
    for system in dict.fromkeys(row.system for row in rows):
        of_system = [row for row in rows if row.system == system]
        values = [sweep.value(row.case) for row in of_system]
        panel.plot(values, [row.median_ms for row in of_system], marker="o", label=system)
    panel.set_xscale("log")
    panel.set_yscale("log")
    if max(sweep.values) < 10:  # powers of 10 would leave the axis without a number
        panel.set_xticks(sweep.values, [str(value) for value in sweep.values])
        panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel(sweep.axis)
    panel.set_ylabel(TIME)
    panel.set_title(title)
    panel.grid(which="both", alpha=0.3)
    panel.legend()
    figure.savefig(path, dpi=DOTS_PER_INCH)


def draw_latency(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw one panel per call, one colour per job: the median, and dashed the 99th percentile."""
    calls = list(dict.fromkeys(row["call"] for row in rows))
    jobs = list(dict.fromkeys((row["link"], row["workers"], row["servers"]) for row in rows))
    figure = Figure(figsize=(5 * len(calls), 5), layout="constrained")
    figure.suptitle(title)
    first: Axes | None = None
    for number, call in enumerate(calls):
        panel = figure.add_subplot(1, len(calls), number + 1, sharey=first)
        first = first or panel
        for index, job in enumerate(jobs):
            where = [row for row in rows if (row["link"], row["workers"], row["servers"]) == job]
            points = [row for row in where if row["call"] == call]
            sizes = [row["bytes"] for row in points]
            colour = f"C{index}" if index < 10 else "black"
            label = f"{job[0]} {job[1]}+{job[2]}"
            panel.plot(sizes, [row["p50_us"] for row in points], color=colour, marker="o", label=label)
            panel.plot(sizes, [row["p99_us"] for row in points], color=colour, linestyle="--", alpha=0.4)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("bytes of the array")
        panel.set_title(call)
        panel.grid(which="both", alpha=0.3)
    assert first is not None
    first.set_ylabel("µs: p50, dashed p99")
    figure.legend(*first.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=DOTS_PER_INCH)
