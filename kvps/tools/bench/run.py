"""A plan carried out: systems measured in turns, then a table and a document."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kvps.errors import StorageError
from kvps.launchers.reaper import Reaper
from kvps.tools.bench import figures, limits, local
from kvps.tools.bench.figures import Case, Measurement, TrialTimes
from kvps.tools.bench.plan import Plan
from kvps.tools.bench.systems import System

WIDTH = 120
"""Columns of a table that goes into a file."""
SAY_EVERY_S = 15.0
"""How often a line says how far it is, where no terminal shows a bar."""
REFRESH_PER_S = 1
"""Updates of the bar in a second: it shares the cores with the measured systems."""


def perform(plan: Plan, reaper: Reaper) -> None:
    """Measure, print and write.

    Raises:
        KvpsError: if a system fails.
    """
    console = console_of_stdout()
    machine = figures.described()
    console.print(figures.headline(machine), soft_wrap=True)
    limit = limits.measured() if plan.has_limits else {}
    rows = rows_of(plan, lambda system, case: local.measure(system, case, plan.rounds, reaper))
    case = plan.cases[0]
    console.print(caption(plan, sizes(case)), soft_wrap=True)
    console.print(figures.table_of(rows))
    if limit:
        console.print(figures.table_of_limits(limit))
    else:
        console.print("All systems, in turns, and the limits of this machine: kvps bench --full")
    if plan.json is not None:
        settings: dict[str, object] = {"rounds": plan.rounds, "repeat": plan.repeat}
        write(plan.json, figures.document(rows, machine, settings, limit))


def console_of_stdout() -> Console:
    """Return the console that tables are printed to."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def rows_of(plan: Plan, measure: Callable[[System, Case], TrialTimes]) -> list[Measurement]:
    """Measure all systems in all cases, in turns, beside a bar that shows how far that is."""
    by_name = {system.name: system for system in plan.systems}
    screen = Console(stderr=True)
    begin = said_at = time.monotonic()
    done, total = 0, len(plan.cases) * plan.repeat * len(by_name)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total} trials{task.fields[left]}"),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
        refresh_per_second=REFRESH_PER_S,
    ) as progress:
        task = progress.add_task("", total=total, left="")

        def trial_of(case: Case, name: str) -> TrialTimes:
            nonlocal done, said_at
            progress.update(task, description=f"{case.workload}: {name}")
            trial = measure(by_name[name], case)
            done, now = done + 1, time.monotonic()
            left = time_left((now - begin) / done * (total - done))
            progress.update(task, advance=1, left=left)
            if not screen.is_terminal and done < total and now >= said_at + SAY_EVERY_S:
                said_at = now
                screen.print(f"{done} of {total} trials{left}", soft_wrap=True, highlight=False)
            return trial

        return figures.alternate(plan.cases, list(by_name), plan.repeat, trial_of)


def time_left(seconds: float) -> str:
    """Return how long the rest takes, for the end of a line; empty for nothing.

    Example:
        >>> time_left(200), time_left(7), time_left(0)
        (', about 3 min left', ', about 10 s left', '')
    """
    if seconds <= 0:
        return ""
    minutes = round(seconds / 60)
    what = f"{minutes} min" if minutes >= 2 else f"{10 * math.ceil(seconds / 10)} s"
    return f", about {what} left"


def caption(plan: Plan, what: str) -> str:
    """Return the line above a table of times."""
    trials = f", then of trials in turns ({plan.repeat})" if plan.repeat > 1 else ""
    return (
        f"{what}; ms of a push and pull of all arrays: median of {plan.rounds} rounds{trials}; "
        "ratios below 1 beat gloo"
    )


def sizes(case: Case, grown: str = "") -> str:
    """Return how many workers and servers there are, but for the quantity that grows."""
    counts = [("workers", case.workers), ("servers", case.servers)]
    return ", ".join(
        f"{number} {name.removesuffix('s') if number == 1 else name}"
        for name, number in counts
        if name != grown
    )


def write(path: Path, document: dict[str, object]) -> None:
    """Write all figures.

    Raises:
        StorageError: if that fails.
    """
    try:
        path.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write --json {path}: {error}") from error
