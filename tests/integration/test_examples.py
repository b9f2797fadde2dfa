"""The examples that use DistributedOptimizer, or several devices, do what examples/README.md says."""

import csv
import importlib.util
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kvps
from examples import click_model, digits, gluon_digits, gpt, horovod_digits, recommender
from kvps.store.metrics import NAMES
from tests.integration.processes import BIN, ROOT, Processes

TABLE = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
DATA, UNSEEN = digits.load()
PNG = b"\x89PNG\r\n"


def run(example: object, *flags: str, workers: int = 2) -> list[int]:
    """Run an example's ``main`` on some workers; return the exit codes."""
    with kvps.LocalCluster(workers, servers=2) as cluster:
        return cluster.run(lambda rank: example.main(list(flags)))  # type: ignore[attr-defined]


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("example", "flags"),
    [
        (horovod_digits, []),
        (horovod_digits, ["--update-on-kvstore"]),
        (gluon_digits, []),
        (gluon_digits, ["--overlap"]),
    ],
    ids=["horovod", "horovod-on-kvstore", "gluon", "gluon-overlap"],
)
def test_digits_are_learned(
    example: object, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "weights.safetensors"
    short = ["--epochs", "3", "--min-accuracy", "0.9", "--save", str(saved)]
    assert run(example, *short, *flags) == [0, 0]
    printed = capsys.readouterr().out
    assert "2 workers" in printed
    assert printed.count("epoch  3  loss") == 1, "rank 0 alone prints"
    found = re.search(r"test accuracy (0\.\d{4})\n", printed)
    assert found
    model = digits.ConvNet()
    model.load_state_dict(load_file(saved))
    assert abs(digits.accuracy(model, UNSEEN) - float(found[1])) < 1e-4


@pytest.mark.parametrize("example", [horovod_digits, gluon_digits], ids=["horovod", "gluon"])
def test_too_little_accuracy_is_a_failure(example: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(example, "--epochs", "1", "--min-accuracy", "1.01", workers=1) == [1]
    assert "below 1.01" in capsys.readouterr().err


# Documentation strings are read once, and by one thread: not all may use ``ast.parse`` at a time.
docstrings, pairs = cache(gpt.docstrings), cache(recommender.load)


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> None:
    docstrings()
    monkeypatch.setattr(gpt, "docstrings", docstrings)


@pytest.mark.in_turn
@pytest.mark.usefixtures("text")
def test_gpt_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(gpt, "--steps", "4", "--batch-size", "8", "--max-loss", "9") == [0, 0]
    printed = capsys.readouterr().out
    assert "2 workers, 2 passes of 2 pieces each" in printed
    assert re.search(r"4 steps in \d+ s; test loss \d\.\d{3} \(", printed)
    assert printed.count("---\nReturn the") == 1


@pytest.mark.in_turn
@pytest.mark.usefixtures("text")
def test_gpt_fails_above_the_loss_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    short = ("--steps", "1", "--batch-size", "2", "--store", "local")
    assert run(gpt, *short, "--max-loss", "0.01", workers=1) == [1]
    assert "above 0.01" in capsys.readouterr().err


@pytest.mark.in_turn
@pytest.mark.parametrize("store", ["dist_async", "dist_sync"])
def test_recommender_counts_steps_and_compares(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs()
    monkeypatch.setattr(recommender, "load", pairs)
    with kvps.LocalCluster(3, servers=2) as cluster:
        codes = cluster.run(lambda rank: recommender.train_for(1.0, store))
    printed = capsys.readouterr().out
    steps = {int(rank): int(n) for rank, n in re.findall(r"worker (\d).*: (\d+) steps", printed)}
    assert sorted(steps) == [0, 1, 2]
    found = re.search(r"among the first 10: (0\.\d+); popular ones alone (0\.\d+)", printed)
    assert found, printed
    assert codes[1:] == [0, 0]
    assert codes[0] == (float(found[1]) <= float(found[2])), "it is judged by the baseline"
    if store == "dist_async":
        assert min(steps[0], steps[1]) > 1.5 * steps[2], "nobody waits for the slow one"


@pytest.mark.in_turn
def test_click_model_is_exported_and_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ("--examples", "16384", "--modes", "hybrid", "all-async", "--min-auc", "0.55")
    assert run(click_model, *short, "--export", str(tmp_path)) == [0, 0]
    printed = capsys.readouterr().out
    worst = re.search(r"scores from there differ by (\S+) at most", printed)
    assert worst, printed
    assert float(worst[1]) < 0.05, "some ids have no row yet"
    assert {file.stem for file in tmp_path.iterdir()} == {*click_model.TABLES, "tower"}
    aucs = dict(re.findall(r"^([\w -]+): AUC (0\.\d+)", printed, re.MULTILINE))
    assert aucs.keys() == {"hybrid", "all-async", "planted optimum"}
    assert float(aucs["hybrid"]) < float(aucs["planted optimum"])
    assert click_model.main(["--serve", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("planted probability") == 5


def test_click_model_serves_zeros_for_ids_without_a_row(tmp_path: Path) -> None:
    with kvps.create("local") as kv:
        model = click_model.ClickModel(kv, seed=0)
        seen = click_model.plant(64, seed=5)
        model(seen).sum().backward()
        click_model.export(model, tmp_path)
        torch.testing.assert_close(click_model.served(tmp_path, seen), click_model.scores_of(model, seen))
        unknown = seen._replace(ids=seen.ids + 10_000)
        without = model.tower(seen.numbers, torch.zeros(64, len(click_model.TABLES), click_model.WIDTH))
    torch.testing.assert_close(click_model.served(tmp_path, unknown), without.sigmoid().detach())


def test_auc_is_the_share_of_pairs_in_order() -> None:
    dice = torch.Generator().manual_seed(4)
    scores, clicks = torch.randn(60, generator=dice), torch.randint(2, (60,), generator=dice)
    pairs = scores[clicks == 1][:, None] > scores[clicks == 0]
    assert click_model.auc(scores, clicks.float()) == pytest.approx(pairs.float().mean().item())


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_hybrid_and_async_reach_the_auc_of_sync(processes: Processes) -> None:
    """As far as sync's own seeds differ."""
    example = ROOT / "examples" / "click_model.py"
    launched = processes.kvps("launch", "-n", 2, "-s", 2, "--", sys.executable, example, "--seeds", 3)
    assert launched.wait(800.0) == 0, launched
    found = {
        mode: [float(auc) for auc in aucs.split()]
        for mode, aucs in re.findall(r"([\w-]+): AUC ((?:0\.\d+ ?){3})", launched.out)
    }
    assert found.keys() == {*click_model.MODES}, launched
    sync = found["all-sync"]
    for mode in ("hybrid", "all-async"):
        assert sum(found[mode]) / 3 > sum(sync) / 3 - (max(sync) - min(sync)), (mode, found)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "flags",
    [
        ["--every-step"],
        ["--quorum", "1", "--slow", "2"],
        ["--quorum", "1", "--late", "drop", "--slow", "2"],
        [
            *("--mode", "async", "--outer", "delayed_nesterov", "--dynamic", "--fragments", "1"),
            *("--slow", "2", "--by-speed", "--first-step", "1"),
        ],
    ],
)
def test_gpt_by_local_steps(processes: Processes, flags: list[str]) -> None:
    """In processes of their own: it imports gpt.py as its neighbour."""
    example = ROOT / "examples" / "gpt_local_steps.py"
    short = ("--steps", 6, "--sync-every", 3, "--delay", 0, "--batch-size", 4, "--max-loss", 9)
    words = ("-n", 2, "-s", 1, "--", sys.executable, example, *short, *flags)
    launched = processes.kvps("launch", *words)
    assert launched.wait(120.0) == 0, launched
    steps = 8 if "--by-speed" in flags else 6
    found = rf"{steps} steps in \d+ s, .* MB sent; test loss \d\.\d{{3}} \("
    assert re.search(found, launched.out), launched
    ages = re.findall(r"rank \d: \d merges, the last after \d steps; .* pushes of others old", launched.out)
    assert len(ages) == (2 if "async" in flags else 0), launched


# --- as the table says --------------------------------------------------------------------------------

SEEN = {
    "digits.py": (r"test accuracy 0\.9[789]", 120.0),
    "metrics.py": (r"(?s)test accuracy 0\.9.*99th percentile", 120.0),
    "ddp_digits.py": (r"test accuracy 0\.9[789]", 120.0),
    "horovod_digits.py": (r"test accuracy 0\.9[789]", 120.0),
    "gluon_digits.py": (r"test accuracy 0\.9[789]", 120.0),
    "ray_digits.py": (r"test accuracy 0\.9[789]", 500.0),
    "linear_numpy.py": (r"(?s)(distance to the true weights .*){5}", 60.0),
    "async_vs_sync.py": (r"dist_async", 120.0),
    "compressed_digits.py": (r"(?s)randomk, both ways: 0\.9[789].*1bit has a learning rate", 300.0),
    "gpt.py": (r"test loss [12]\.\d+", 600.0),
    "gpt_local_steps.py": (r"of which .* s waiting; .* MB sent; test loss 2\.\d+", 600.0),
    "click_model.py": (r"(?s)hybrid: AUC 0\.8.*planted optimum: AUC 0\.8|planted probability", 300.0),
    "recommender.py": (r"among the first 10: 0\.2", 300.0),
    "rollouts.py": (r"(?s)reader 1 \(killed\).*reader 2 \(slow\).*reward 0\.\d\d at first, (0\.9|1)", 120.0),
    "serve_table.py": (
        r"(?s)waits for the first version.*version  20  error 0\.0\d\d  a stranger's score 0\.0",
        120.0,
    ),
    "word_vectors.py": (r"ranked right: 0\.[67]", 300.0),
    "sharded_mlp.py": (r"accuracy 0\.9", 300.0),
    "lightning_digits.py": (r"test accuracy 0\.9[789]", 180.0),
    "accelerate_digits.py": (r"test accuracy 0\.9[5-9]", 180.0),
    "transformers_gpt.py": (r"loss 2\.\d+ after 120 steps", 300.0),
}
"""What each example prints at its end, and within how many seconds even a busy machine gets there."""
LAST_LOSS = (r"falls to about (0\.\d+)", r"(?s).*epoch 12  loss (0\.\d+)", 0.4)
FIGURES = {
    "digits.py": LAST_LOSS,
    "ddp_digits.py": LAST_LOSS,
    "horovod_digits.py": LAST_LOSS,
    "metrics.py": (r"about (\d+) MB sent", r"sent (\d+\.\d) MB", 0.05),
    "gpt.py": (r"test loss of about (\d\.\d)", r"test loss (\d\.\d+)", 0.05),
    "gpt_local_steps.py": (r"test loss of about (\d\.\d)", r"test loss (\d\.\d+)", 0.05),
    "click_model.py": (r"`hybrid: AUC (0\.\d+)", r"hybrid: AUC (0\.\d+)", 0.01),
    "recommender.py": (r"first 10: (0\.\d+)", r"among the first 10: (0\.\d+)", 0.15),
    "word_vectors.py": (r"ranked right: (0\.\d+)", r"ranked right: (0\.\d+)", 0.1),
}
"""Script -> the figure of the table, the figure that is printed, and by which share they may differ."""
COMMANDS = re.findall(r"`((?:python|kvps-launch)[^`]*examples/[^`]*)`", TABLE)
FLAGS = {
    "examples/horovod_digits.py": "--update-on-kvstore",
    "examples/gluon_digits.py": "--overlap",
    "examples/ray_digits.py": "--kill",
}
COMMANDS += [f"{item} {FLAGS[item.split()[-1]]}" for item in COMMANDS if item.split()[-1] in FLAGS]


def test_the_table_names_every_example() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    named = {re.search(r"examples/(\w+\.py)", command)[1] for command in COMMANDS}  # type: ignore[index]
    assert named == scripts == set(SEEN)


@pytest.mark.thorough
@pytest.mark.timeout(700)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_table(processes: Processes, command: str) -> None:
    package = re.search(r"examples/(lightning|accelerate|transformers)_", command)
    if package and importlib.util.find_spec(package[1]) is None:
        pytest.skip(f"{package[1]} is not installed")
    (processes.folder / "examples").symlink_to(ROOT / "examples")
    if "ray_digits" in command:
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvps[ray]'")
    words = [str(BIN / item) if (BIN / item).exists() else item for item in shlex.split(command)]
    process = processes.start("example", *words)
    script = re.search(r"(\w+\.py)", command)
    assert script
    pattern, limit_s = SEEN[script[1]]
    assert process.wait(limit_s) == 0, process
    assert re.search(pattern, process.out), process
    if figure := FIGURES.get(script[1]):
        in_table, printed, share = figure
        row = next(line for line in TABLE.splitlines() if f"examples/{script[1]}" in line)
        said, found = re.search(in_table, row), re.search(printed, process.out)
        assert said, row
        assert found, process
        assert float(found[1]) == pytest.approx(float(said[1]), rel=share), row


@pytest.mark.thorough
def test_numbers_are_logged_as_csv(processes: Processes) -> None:
    flags = ("--epochs", 1, "--csv", "run.csv", "--plot", "run.png")
    process = processes.python(ROOT / "examples" / "metrics.py", *flags)
    assert process.wait(120) == 0, process
    with (processes.folder / "run.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["10", "20"]
    assert rows[0].keys() == {"step", "loss", *NAMES}
    assert [int(row["rounds"]) for row in rows] == [10, 20]
    assert int(rows[1]["sent_bytes"]) > int(rows[0]["sent_bytes"]) > 0
    assert (processes.folder / "run.png").read_bytes().startswith(PNG)


@pytest.mark.thorough
def test_numbers_are_logged_for_tensorboard(processes: Processes) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    flags = ("--epochs", 1, "--tensorboard", "runs")
    process = processes.python(ROOT / "examples" / "metrics.py", *flags)
    assert process.wait(120) == 0, process
    assert list((processes.folder / "runs").glob("events.out.tfevents.*"))
