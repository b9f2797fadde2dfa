"""The figures of ``benchmarks/latency.py``, which does not measure wrong results."""

import json
import random
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import latency


def test_percentiles_are_over_the_calls_of_all_ranks() -> None:
    times = [float(item) for item in range(1, 1001)]
    random.Random(7).shuffle(times)
    trials = [
        {"64": {"push": (some, cpu_us, 3.0)}} for some, cpu_us in ((times[:400], 10.0), (times[400:], 20.0))
    ]
    (row,) = latency.rows_of(latency.Job("shm", 2, 2), trials)
    assert [row[name] for name in latency.PERCENTILES] == [501, 991, 1000]
    assert (row["calls"], row["worker_cpu_us"], row["servers_cpu_us"]) == (1000, 15, 3)
    (few,) = latency.rows_of(latency.Job("shm", 2, 2), trials[:1])
    assert few["p999_us"] is None
    assert "shm 2+2           push             64       501       991     1,000" in latency.told([row])


def test_a_wrong_number_ends_the_measurement() -> None:
    pools, sums = latency.arrays(1024, 2)
    latency.demand(pools[0][3] + pools[1][3], sums[3])
    wrong = sums[3].clone()
    wrong[17] += 1e-3
    with pytest.raises(ValueError, match="a result is wrong"):
        latency.demand(wrong, sums[3])


def test_processor_time_of_checks_does_not_count() -> None:
    def check(number: int) -> None:
        torch.randn(300_000).sort()

    found = latency.loop(5, int, int, check, lambda: None)
    assert len(found.times_us) == 5
    assert found.worker_us < 2000, "a sort takes ten times that"


def test_a_job_that_fails_costs_no_other_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(job: latency.Job, given: object) -> list[latency.Found]:
        if job.link == "gloo":
            raise subprocess.SubprocessError("gloo failed")
        return [{"64": {"push": ([5.0], 1.0, 1.0)}}]

    monkeypatch.setattr(latency, "run", run)
    with pytest.raises(SystemExit, match="gloo failed"):
        latency.main(["--quick", "--links", "gloo", "local"])
    assert "local " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.in_turn
@pytest.mark.parametrize("links", [["local"], ["shm", "zmq shm", "gloo"]])
def test_jobs_are_measured_written_and_drawn(tmp_path: Path, links: list[str]) -> None:
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "latency.json", tmp_path / "latency.png"
    sizes = ("--rounds", "5", "--turns", "1", "--sizes", "64", "1024")
    latency.main(["--links", *links, *sizes, "--json", str(file), "--plot", str(plot)])
    found = json.loads(file.read_text())
    assert {row["link"] for row in found["rows"]} == set(links)
    assert all(row["p50_us"] > 0 and row["worker_cpu_us"] >= 0 for row in found["rows"])
    assert plot.read_bytes().startswith(b"\x89PNG")
