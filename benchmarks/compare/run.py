"""A comparison carried out: systems measured in turns, then tables, a document and plots."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from rich.console import Console

from benchmarks.compare import tables
from benchmarks.compare.networks import trial as network
from benchmarks.compare.networks.layout import bytes_per_s
from benchmarks.compare.networks.namespaces import Namespaces
from benchmarks.compare.networks.traffic import cpu_s_per_gb, traffic_of
from benchmarks.compare.peers import trial as peers
from benchmarks.compare.plan import Comparison
from benchmarks.compare.systems import PEERS
from kvps.launchers.reaper import Reaper
from kvps.tools.bench import figures, local, run
from kvps.tools.bench.figures import Case, Measurement, TrialTimes
from kvps.tools.bench.systems import System


def perform(plan: Comparison, reaper: Reaper) -> None:
    """Measure, print, write and draw.

    Raises:
        KvpsError: if a system fails.
    """
    console = run.console_of_stdout()
    machine = {**figures.described(), **plan.versions}
    console.print(figures.headline(machine), soft_wrap=True)
    limit = run.limits_of_machine() if plan.has_limits else {}
    with Namespaces(plan.hosts.count, plan.rate) if plan.hosts else nullcontext() as namespaces:
        rows = run.rows_of(plan, _measure(plan, reaper, namespaces))
    _print(console, plan, rows)
    if limit:
        console.print(figures.table_of_limits(limit))
    if plan.json is not None:
        run.write(plan.json, figures.document(rows, machine, _settings(plan), limit, _traffic(plan)))
    if plan.plot is not None:
        _draw(plan, rows)


def _measure(
    plan: Comparison, reaper: Reaper, namespaces: Namespaces | None
) -> Callable[[System, Case], TrialTimes]:
    def trial(system: System, case: Case) -> TrialTimes:
        if plan.hosts is not None and namespaces is not None:
            return network.measure(system, case, plan.rounds, plan.hosts, namespaces, reaper)
        if system.kind in PEERS:
            python = plan.interpreters[system.kind]
            return peers.measure(system, case, plan.rounds, python, reaper)
        return local.measure(system, case, plan.rounds, reaper)

    return trial


def _print(console: Console, plan: Comparison, rows: list[Measurement]) -> None:
    console.print(run.caption(plan, _title(plan)), soft_wrap=True)
    if plan.sweep is not None:
        console.print(tables.table_of_sweep(rows, plan.sweep))
    elif plan.hosts is not None:
        console.print(tables.table_of_network(rows, bytes_per_s(plan.rate)))
        console.print(tables.table_of_traffic(rows, plan.hosts))
    else:
        console.print(figures.table_of(rows))


def _title(plan: Comparison) -> str:
    """Return what all cases have in common."""
    case, grown = plan.cases[0], plan.sweep.name if plan.sweep else ""
    workload = f"{case.workload}, " if grown in ("workers", "servers") else ""
    place = f", links of {plan.rate}" if plan.hosts else ""
    return f"{workload}{run.sizes(case, grown)}{place}"


def _settings(plan: Comparison) -> dict[str, object]:
    return {
        "rounds": plan.rounds,
        "repeat": plan.repeat,
        "sweep": plan.sweep.name if plan.sweep else None,
        "link_rate": plan.rate if plan.hosts else None,
        "hosts": [plan.hosts.holds(host) for host in range(plan.hosts.count)] if plan.hosts else [],
    }


def _traffic(plan: Comparison) -> Callable[[Measurement], dict[str, object]]:
    def traffic(row: Measurement) -> dict[str, object]:
        links = traffic_of(row) if plan.hosts else ()
        return {
            "traffic": [
                {"host": link.host, "in_bytes": link.in_bytes, "out_bytes": link.out_bytes} for link in links
            ],
            "cpu_s_per_gb": cpu_s_per_gb(row) if plan.hosts else None,
        }

    return traffic


def _draw(plan: Comparison, rows: list[Measurement]) -> None:
    from benchmarks.compare import plots  # loads matplotlib, which not everybody has

    assert plan.plot is not None
    title = _title(plan)
    if plan.sweep is not None:
        plots.draw_sweep(rows, plan.sweep, plan.plot / f"sweep-{plan.sweep.name}.png", title)
    elif plan.hosts is not None:
        plots.draw_bars(rows, plan.plot / "network.png", title)
    else:
        plots.draw_bars(rows, plan.plot / "bench.png", f"{title}, one host")
