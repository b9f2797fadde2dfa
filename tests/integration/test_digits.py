"""Every store trains real digits, and the examples do what they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kvps
from examples import digits, linear_numpy

EXAMPLES = Path(digits.__file__).parent
STORES = ["dist_sync", "dist_sync_device", "dist_async", "dist_async_device"]
STORES += ["dist_ssp", "dist_ssp_device"]
DATA, UNSEEN = digits.load()


def train(kv: kvps.KVStoreBase) -> float:
    """Train as the example does; return the accuracy on unseen images."""
    model = digits.ConvNet()
    for _ in digits.train(kv, model, DATA, digits.EPOCHS, digits.BATCH, digits.LR):
        pass
    return digits.accuracy(model, UNSEEN)


@pytest.mark.in_turn
@pytest.mark.parametrize("store", ["local", "device"])
def test_a_local_store_learns_digits(store: str) -> None:
    torch.manual_seed(0)
    assert train(kvps.create(store)) >= 0.97


@pytest.mark.in_turn
@pytest.mark.parametrize("store", STORES)
def test_two_workers_learn_digits(store: str) -> None:
    torch.manual_seed(0)
    with kvps.LocalCluster(workers=2, servers=2) as cluster:
        results = cluster.run(lambda rank: train(kvps.create(store)))
    assert min(results) >= 0.97


# --- the examples -------------------------------------------------------------------------------------


def test_digits_saves_draws_and_says_how_good_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, picture = tmp_path / "weights.safetensors", tmp_path / "loss.png"
    files = ["--save", str(weights), "--plot", str(picture)]
    with kvps.LocalCluster():
        code = digits.main(["--epochs", "2", "--min-accuracy", "0.5", *files])
    printed = capsys.readouterr().out
    assert code == 0
    assert "dist_sync: 1 worker, 1437 images to train with, 360 to test with" in printed
    assert "epoch  2  loss" in printed
    assert "test accuracy 0." in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    model = digits.ConvNet()
    model.load_state_dict(load_file(weights))
    assert f"test accuracy {digits.accuracy(model, UNSEEN):.4f}" in printed


def test_digits_fails_below_the_accuracy_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert digits.main(["--store", "local", "--epochs", "1", "--min-accuracy", "1.01"]) == 1
    assert "below 1.01" in capsys.readouterr().err


def test_linear_numpy_finds_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    with kvps.LocalCluster(workers=3, servers=2) as cluster:
        codes = cluster.run(lambda rank: linear_numpy.main([]))
    assert codes == [0, 0, 0]
    assert capsys.readouterr().out.count("distance to the true weights 0.0") >= 4


@pytest.mark.in_turn
def test_async_vs_sync_shows_what_a_slow_worker_costs(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    ended = subprocess.run(
        [
            *(sys.executable, "-W", "error", EXAMPLES / "async_vs_sync.py"),
            # Most of a round is this pause, also where other tests take the processors.
            *("--seconds", "0.5", "--delay", "0.2", "--plot", picture),
        ],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    rates = {
        line.split()[1]: float(line.split()[3].replace(",", ""))
        for line in ended.stdout.splitlines()
        if line.startswith("│ dist_")
    }
    assert list(rates) == ["dist_sync", "dist_ssp", "dist_async"]
    assert rates["dist_async"] > rates["dist_sync"]
    assert picture.read_bytes().startswith(b"\x89PNG")
