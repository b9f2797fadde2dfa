"""Medians, ratios, the order of trials, and the document."""

import json

import pytest
from rich.console import Console
from rich.table import Table

from kvps.tools.bench import figures
from kvps.tools.bench.figures import Case, Measurement, TrialTimes, alternate, document, ratio_of, slowest
from kvps.tools.bench.run import time_left

SMALL, BIG = Case("small", 2, 2), Case("big", 2, 2)


def row(case: Case, system: str, *medians: float) -> Measurement:
    return Measurement(case, system, [TrialTimes((median,)) for median in medians])


def test_a_round_takes_as_long_as_its_slowest_worker() -> None:
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == (2.0, 5.0)


def test_medians_of_rounds_then_of_runs() -> None:
    trials = [TrialTimes((1.0, 2.0, 90.0)), TrialTimes((4.0, 5.0, 6.0)), TrialTimes((70.0, 80.0, 90.0))]
    found = Measurement(SMALL, "kvps", trials)
    assert [trial.median_ms for trial in trials] == [2.0, 5.0, 80.0]
    assert found.median_ms == 5.0
    assert found.extremes_ms == (2.0, 80.0)


def test_systems_are_measured_in_turns() -> None:
    order = []

    def measure(case: Case, system: str) -> TrialTimes:
        order.append((case.workload, system))
        return TrialTimes((float(len(order)),))

    rows = alternate([SMALL, BIG], ["kvps", "gloo"], 2, measure)
    turns = [("small", "kvps"), ("small", "gloo")] * 2 + [("big", "kvps"), ("big", "gloo")] * 2
    assert order == turns
    assert [(row.case.workload, row.system) for row in rows] == list(dict.fromkeys(turns))
    assert [trial.median_ms for trial in rows[1].trials] == [2.0, 4.0]


def test_ratios_are_to_gloo_in_the_same_case() -> None:
    rows = [row(SMALL, "kvps", 5.0), row(SMALL, "gloo", 10.0), row(BIG, "kvps", 30.0), row(BIG, "gloo", 20.0)]
    assert [ratio_of(item, rows) for item in rows] == [0.5, 1.0, 1.5, 1.0]


def test_the_document_is_json() -> None:
    rows = [row(SMALL, "kvps", 5.0, 7.0), row(SMALL, "gloo", 12.0)]
    whole = document(rows, {"cores": 2}, {"rounds": 1}, {"copy": 8.0})
    read = json.loads(json.dumps(whole))
    assert (read["machine"], read["settings"]) == ({"cores": 2}, {"rounds": 1})
    assert read["limits_gb_per_s"] == {"copy": 8.0}
    first = read["rows"][0]
    assert (first["workload"], first["arrays"], first["payload_bytes"]) == ("small", 1000, 1024000)
    assert (first["workers"], first["servers"], first["system"]) == (2, 2, "kvps")
    assert (first["median_ms"], first["ratio_to_gloo"]) == (6.0, 0.5)
    assert first["trials"][0] == {"median_ms": 5.0, "rounds_ms": [5.0]}
    more = document(rows, {}, {}, {}, lambda row: {"more": row.system})
    assert [entry["more"] for entry in json.loads(json.dumps(more))["rows"]] == ["kvps", "gloo"]


def test_workers_that_measured_different_rounds_are_a_bug() -> None:
    with pytest.raises(ValueError, match="shorter"):
        slowest([[1.0, 5.0], [2.0]])


# --- the table of what was measured ---------------------------------------------------------------


def cells(table: Table, width: int = 120) -> list[list[str]]:
    """Return what a table shows, row by row."""
    console = Console(width=width)
    with console.capture() as shown:
        console.print(table)
    lines = [line for line in shown.get().splitlines() if "│" in line or "┃" in line]
    return [[item.strip() for item in line.replace("┃", "│").split("│")[1:-1]] for line in lines]


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
    rows = [
        row(Case("resnet50", 2, 2), "kvps", 406.0),
        row(Case("resnet50", 2, 2), "gloo", 602.0),
    ]
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
