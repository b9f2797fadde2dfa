"""Medians, ratios, the order of trials, and the document."""

import json

import pytest

from kvps.tools.bench.figures import Case, Measurement, TrialTimes, alternate, document, ratio_of, slowest

SMALL, BIG = Case("small", 2, 2), Case("big", 2, 2)


def row(case: Case, system: str, *medians: float) -> Measurement:
    return Measurement(case, system, [TrialTimes((one,)) for one in medians])


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
    assert [(one.case.workload, one.system) for one in rows] == list(dict.fromkeys(turns))
    assert [trial.median_ms for trial in rows[1].trials] == [2.0, 4.0]


def test_ratios_are_to_gloo_in_the_same_case() -> None:
    rows = [row(SMALL, "kvps", 5.0), row(SMALL, "gloo", 10.0), row(BIG, "kvps", 30.0), row(BIG, "gloo", 20.0)]
    assert [ratio_of(one, rows) for one in rows] == [0.5, 1.0, 1.5, 1.0]


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
