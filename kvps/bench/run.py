"""A plan carried out: systems measured in turns, then a table and a document."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from kvps.bench import figures, hardware, limits, local, tables
from kvps.bench.figures import Case, Measurement, TrialTimes
from kvps.bench.plan import Plan
from kvps.bench.processes import Leash
from kvps.bench.systems import System
from kvps.errors import StorageError

WIDTH = 120
"""Columns of a table that goes into a file."""
REFRESH_PER_S = 1
"""Updates of the bar in a second: it shares the cores with the measured systems."""


def perform(plan: Plan, leash: Leash) -> None:
    """Measure, print and write.

    Raises:
        KvpsError: if a system fails.
    """
    console = console_of_stdout()
    machine = hardware.described()
    console.print(tables.headline(machine), soft_wrap=True)
    limit = limits.measured() if plan.has_limits else {}
    rows = rows_of(plan, lambda system, case: local.measure(system, case, plan.rounds, leash))
    case = plan.cases[0]
    console.print(caption(plan, sizes(case)), soft_wrap=True)
    console.print(tables.table_of(rows))
    if limit:
        console.print(tables.table_of_limits(limit))
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
    with Progress(
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
        refresh_per_second=REFRESH_PER_S,
    ) as progress:
        task = progress.add_task("", total=len(plan.cases) * plan.repeat * len(by_name))

        def trial_of(case: Case, name: str) -> TrialTimes:
            progress.update(task, description=f"{case.workload}: {name}")
            trial = measure(by_name[name], case)
            progress.advance(task)
            return trial

        return figures.alternate(plan.cases, list(by_name), plan.repeat, trial_of)


def caption(plan: Plan, what: str) -> str:
    """Return the line above a table of what was measured."""
    return (
        f"{what}; ms of a push and pull of all arrays: median of {plan.rounds} rounds, then of "
        f"trials in turns ({plan.repeat}); ratios below 1 beat gloo"
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
