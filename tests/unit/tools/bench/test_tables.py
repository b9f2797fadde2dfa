"""The table of what was measured."""

import pytest
from rich.console import Console
from rich.table import Table

from kvps.tools.bench import figures
from kvps.tools.bench.figures import Case, Measurement, TrialTimes
from kvps.tools.bench.run import time_left

SMALL = Case("small", 2, 2)


def row(case: Case, system: str, *medians: float) -> Measurement:
    return Measurement(case, system, [TrialTimes((one,)) for one in medians])


def cells(table: Table, width: int = 120) -> list[list[str]]:
    """Return what a table shows, row by row."""
    console = Console(width=width)
    with console.capture() as shown:
        console.print(table)
    lines = [line for line in shown.get().splitlines() if "│" in line or "┃" in line]
    return [[one.strip() for one in line.replace("┃", "│").split("│")[1:-1]] for line in lines]


def test_a_table_has_ratios_to_gloo() -> None:
    rows = [row(SMALL, "kvps", 4.0, 5.0, 8.0), row(SMALL, "gloo", 10.0)]
    header, *found = cells(figures.table_of(rows))
    assert header == [
        *("workload", "arrays", "MB", "system", "median ms", "trials from .. to", "ratio to gloo")
    ]
    assert found == [
        ["small", "1,000", "1.0", "kvps", "5.00", "4.00 .. 8.00", "0.50"],
        ["", "", "", "gloo", "10.0", "10.0 .. 10.0", "1.00"],
    ]


def test_a_table_without_gloo_has_no_ratio() -> None:
    assert cells(figures.table_of([row(SMALL, "kvps", 4.0)]))[1][-1] == ""


def test_the_quick_table_fits_a_narrow_terminal() -> None:
    rows = [row(Case("resnet50", 2, 2), "kvps", 406.0), row(Case("resnet50", 2, 2), "gloo", 602.0)]
    *_, first, second = cells(figures.table_of(rows), width=60)
    assert first == ["resnet50", "161", "102.2", "kvps", "406", "0.67"], "one trial has no range"
    assert second == ["", "", "", "gloo", "602", "1.00"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(200, ", about 3 min left"), (61, ", about 70 s left"), (0, "")]
)
def test_the_time_that_is_left(seconds: float, text: str) -> None:
    assert time_left(seconds) == text


@pytest.mark.parametrize(
    ("time_ms", "text"), [(1234.5, "1,234"), (123.45, "123"), (12.345, "12.3"), (1.2345, "1.23")]
)
def test_times_have_three_digits(time_ms: float, text: str) -> None:
    assert figures.as_ms(time_ms) == text


def test_a_busy_machine_is_mentioned() -> None:
    idle = {"processor": "P", "cores": 2, "system": "Linux", "python": "3", "torch": "2"}
    idle |= {"kvps": "0", "load": 0.5}
    assert "busy" not in figures.headline(idle)
    assert "load 1.5" in figures.headline({**idle, "load": 1.5})
