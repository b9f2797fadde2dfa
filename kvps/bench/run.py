"""A plan carried out: systems measured in turns, then tables, a document and plots."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext

from rich.console import Console
from rich.progress import Progress

from kvps.bench import hardware, limits, local
from kvps.bench.network_layout import bytes_per_s
from kvps.bench.networks import trial as network
from kvps.bench.networks.namespaces import Namespaces
from kvps.bench.plan import Plan
from kvps.bench.processes import Leash
from kvps.bench.report import figures, tables
from kvps.bench.report.figures import Case, Measured, Trial
from kvps.errors import StorageError

WIDTH = 120
"""Columns of a table that goes into a file."""
REFRESH_PER_S = 1
"""How often the bar moves: it shares the cores with what is measured."""


def perform(plan: Plan, leash: Leash) -> None:
    """Measure, print, write and draw.

    Raises:
        KvpsError: if a system fails.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    found = {**hardware.described(), **plan.versions}
    console.print(tables.headline(found), soft_wrap=True)
    limit = limits.measured() if plan.has_limits else {}
    rows = _rows(plan, leash)
    _print(console, plan, rows)
    if limit:
        console.print(tables.table_of_limits(limit))
    if plan.json is not None:
        _write(plan, figures.document(rows, found, _settings(plan), limit))
    if plan.plot is not None:
        _draw(plan, rows)


def _rows(plan: Plan, leash: Leash) -> list[Measured]:
    screen = Console(stderr=True)
    with (
        Namespaces(plan.hosts.count, plan.rate) if plan.hosts else nullcontext() as namespaces,
        Progress(
            console=screen,
            transient=True,
            disable=not screen.is_terminal,
            refresh_per_second=REFRESH_PER_S,
        ) as progress,
    ):
        task = progress.add_task("", total=len(plan.cases) * plan.repeat * len(plan.systems))
        one_trial = _one_trial(plan, leash, namespaces)

        def measure(case: Case, system: str) -> Trial:
            progress.update(task, description=f"{case.workload}: {system}")
            trial = one_trial(case, system)
            progress.advance(task)
            return trial

        names = [system.name for system in plan.systems]
        return figures.alternate(plan.cases, names, plan.repeat, measure)


def _one_trial(
    plan: Plan, leash: Leash, namespaces: Namespaces | None
) -> Callable[[Case, str], Trial]:
    by_name = {system.name: system for system in plan.systems}

    def trial(case: Case, name: str) -> Trial:
        if plan.hosts is None or namespaces is None:
            return local.measure(by_name[name], case, plan.rounds, plan.interpreters, leash)
        return network.measure(by_name[name], case, plan.rounds, plan.hosts, namespaces, leash)

    return trial


def _print(console: Console, plan: Plan, rows: list[Measured]) -> None:
    case = plan.cases[0]
    place = "" if plan.hosts is None else f", links of {plan.rate}"
    console.print(
        f"{_sizes(plan, case)}{place}; ms of a push and pull of all arrays: median of "
        f"{plan.rounds} rounds, then of trials in turns ({plan.repeat}); ratios below 1 beat gloo",
        soft_wrap=True,
    )
    if plan.sweep is not None:
        console.print(tables.table_of_sweep(rows, plan.sweep))
    elif plan.hosts is not None:
        console.print(tables.table_of_network(rows, bytes_per_s(plan.rate)))
        console.print(tables.table_of_traffic(rows, plan.hosts))
    else:
        console.print(tables.table_of(rows))


def _sizes(plan: Plan, case: Case) -> str:
    """Say what all cases have in common."""
    swept = plan.sweep.name if plan.sweep else ""
    workload = f"{case.workload}, " if swept in ("workers", "servers") else ""
    counts = [("workers", case.workers), ("servers", case.servers)]
    return workload + ", ".join(
        f"{count} {name.removesuffix('s') if count == 1 else name}"
        for name, count in counts
        if name != swept
    )


def _settings(plan: Plan) -> dict[str, object]:
    return {
        "rounds": plan.rounds,
        "repeat": plan.repeat,
        "sweep": plan.sweep.name if plan.sweep else None,
        "link_rate": plan.rate if plan.hosts else None,
        "hosts": [plan.hosts.holds(host) for host in range(plan.hosts.count)] if plan.hosts else [],
    }


def _write(plan: Plan, document: dict[str, object]) -> None:
    assert plan.json is not None
    try:
        plan.json.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write --json {plan.json}: {error}") from error


def _draw(plan: Plan, rows: list[Measured]) -> None:
    from kvps.bench.report import plots  # loads matplotlib, which not everybody has

    assert plan.plot is not None
    case = plan.cases[0]
    title = _sizes(plan, case)
    if plan.sweep is not None:
        path = plan.plot / f"sweep-{plan.sweep.name}.png"
        plots.draw_sweep(rows, plan.sweep, path, title)
    elif plan.hosts is not None:
        plots.draw_bars(rows, plan.plot / "network.png", f"{title}, links of {plan.rate}")
    else:
        plots.draw_bars(rows, plan.plot / "bench.png", f"{title}, one host")
