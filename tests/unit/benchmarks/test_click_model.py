"""The comparison of ``benchmarks/click_model.py``: all ways train the same model, or the benchmark fails."""

import json
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvps
from benchmarks import click_model, click_model_worker

TASK = click_model_worker.Task(tables=3, rows=50, dim=4, batch=32, steps=4, optimizer="sgd")


def test_ids_are_as_frequent_as_zipf_says() -> None:
    ids = click_model_worker.zipf(1000, (200_000,), np.random.default_rng(3))
    assert (ids.min() >= 0, ids.max() < 1000) == (True, True)
    counts = np.sort(np.bincount(ids, minlength=1000))[::-1]
    expected = np.arange(1, 1001) ** -click_model_worker.ZIPF
    shares = expected / expected.sum()
    assert counts[:5].sum() / 200_000 == pytest.approx(shares[:5].sum(), rel=0.2)
    assert counts[500:].sum() / 200_000 == pytest.approx(shares[500:].sum(), rel=0.2)
    assert abs(int(np.diff(np.bincount(ids).argsort()[-2:])[0])) > 1, "frequent ids are no neighbours"


def losses(seed: int) -> list[list[float]]:
    dice = random.Random(seed)
    return [[0.7 - 0.01 * dice.random() for _ in range(8)] for _ in range(2)]


def moved(rank: int, step: int, by: float) -> list[list[float]]:
    other = losses(1)
    other[rank][step] += by
    return other


def test_a_loss_of_one_step_that_differs_is_refused() -> None:
    told = click_model.demand({"kvps sync": losses(1), "torchrec": moved(1, 3, 5e-6)})
    assert told == ["torchrec and kvps sync differ by 5.0e-06"]
    for wrong in (2e-5, float("nan")):
        with pytest.raises(ValueError, match="ddp gloo and kvps sync differ by"):
            click_model.demand({"ddp gloo": moved(0, 7, wrong), "kvps sync": losses(1)})


def test_stale_ways_are_compared_at_their_end() -> None:
    click_model.demand({"kvps sync": losses(1), "kvps async": moved(0, 0, 9.0)})
    with pytest.raises(ValueError, match=r"kvps hybrid and ddp gloo by .*; 0.1% is allowed"):
        click_model.demand({"ddp gloo": losses(1), "kvps hybrid": moved(1, 7, 0.4)})
    both = {"kvps sync": losses(1), "torchrec": moved(1, 3, 1e-3)}
    assert click_model.demand(both, "adagrad") == ["torchrec and kvps sync by 0.00% at the end"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The only rank of a process group."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_ways_begin_alike_and_learn_alike_unless_one_does_not_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    click_model_worker.first_values(TASK, 1, tmp_path / "first.npz")
    first: Any = np.load(tmp_path / "first.npz")
    with kvps.LocalCluster(1, servers=2) as cluster:
        (ours,) = cluster.run(lambda rank: click_model_worker.train(TASK, "kvps sync", rank, None))
    theirs = click_model_worker.train(TASK, "ddp gloo", 0, first)
    assert ours["sent"] > 0
    both = {"kvps sync": [ours["losses"]], "ddp gloo": [theirs["losses"]]}
    assert click_model.demand(both)
    monkeypatch.setitem(click_model_worker.RATES, "sgd", 1e-9)  # as if it did not push
    with kvps.LocalCluster(1, servers=2) as cluster:
        (still,) = cluster.run(lambda rank: click_model_worker.train(TASK, "kvps sync", rank, None))
    with pytest.raises(ValueError, match="differ by"):
        click_model.demand(both | {"kvps sync": [still["losses"]]})


@pytest.mark.thorough
def test_all_ways_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "click.json"
    flags = ["--quick", "--json", str(file)]
    if python := os.environ.get("KVPS_TEST_TORCHREC"):
        flags += ["--torchrec-python", python]
    assert click_model.main(flags) == 0
    found = json.loads(file.read_text())["ways"]
    ways = {*click_model.WAYS} - (set() if python else {"torchrec"})
    assert found.keys() == ways
    printed = capfd.readouterr().out
    assert "ddp gloo and kvps sync differ by" in printed
    assert len(found["kvps async"][0][1]["losses"]) == 6 + click_model_worker.WARM_UP
