"""Tables and plots of sweeps and networks."""

from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.compare import plots, tables
from benchmarks.compare.networks.layout import layout_of
from benchmarks.compare.networks.traffic import NetworkTrial, Traffic
from benchmarks.compare.sweeps import SWEEPS
from kvps.tools.bench.figures import Case, Measurement

SMALL = Case("small", 2, 2)


def row(case: Case, system: str, *medians: float) -> Measurement:
    traffic = (Traffic("host 0", 0.0, 0.0), Traffic("host 1", 1.024e6, 2.048e6), Traffic("host 2", 1.0, 1.0))
    return Measurement(case, system, [NetworkTrial((median,), traffic, 0.001) for median in medians])


def cells(table: Table) -> list[list[str]]:
    """Return what a table shows, row by row."""
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table)
    lines = [line for line in shown.get().splitlines() if "│" in line or "┃" in line]
    return [[item.strip() for item in line.replace("┃", "│").split("│")[1:-1]] for line in lines]


def test_a_sweep_shows_its_values() -> None:
    sweep = SWEEPS["bytes"]
    cases = sweep.cases(SMALL, [1024, 4096])
    found = cells(tables.table_of_sweep([row(case, "kvps", 1.0) for case in cases], sweep))
    assert found[0][0] == "size of one array, bytes"
    assert [item[0] for item in found[1:]] == ["1,024", "4,096"]


def test_a_network_shows_the_part_of_the_bound() -> None:
    # 1.024 MB at 1.024 MB/s take a second
    found = cells(tables.table_of_network([row(SMALL, "kvps", 2000.0)], 1.024e6))
    assert found[0][-2:] == ["% of M/B", "CPU s per GB"]
    assert found[1] == ["small", "kvps", "2,000", "2,000 .. 2,000", "", "50", "0.49"]


def test_links_show_bytes_and_shares_of_the_model() -> None:
    found = cells(tables.table_of_traffic([row(SMALL, "kvps", 1.0)], layout_of("1x1")))
    assert found[2] == ["", "", "host 1", "worker 0", "1.02", "2.05", "1.00", "2.00"]


def test_plots_are_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(SMALL, "kvps", 4.0, 6.0), row(SMALL, "gloo", 10.0)]
    plots.draw_bars(rows, tmp_path / "bars.png", "title")
    for name in ("workers", "bytes"):
        sweep = SWEEPS[name]
        swept = [row(case, "kvps", 1.0) for case in sweep.cases(SMALL, [1, 4])]
        plots.draw_sweep(swept, sweep, tmp_path / f"{name}.png", "title")
    pictures = list(tmp_path.iterdir())
    assert len(pictures) == 3
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
