"""Workers that are killed at every moment of a script, and replaced: each front end goes on, or says why not."""

import re
import sys
from functools import cache
from pathlib import Path

import pytest

import kvps
from tests.integration.processes import Process, Processes
from tests.integration.replacement_worker import MOMENTS, train, train_by_loader

WORKER = Path(__file__).with_name("replacement_worker.py")
FRONTS = (
    "trainer",
    "trainer-overlap",
    "gluon",
    "optimizer",
    "optimizer-forward",
    "shard",
    "diloco",
    "kvstore",
)


@cache
def undisturbed(front: str) -> list[float]:
    """Return the weights of a job that loses nobody."""
    with kvps.LocalCluster(workers=2, servers=2) as cluster:
        first, second = cluster.run(lambda rank: train(front))
    assert first == second
    return first


def launched(
    processes: Processes, front: str, rank: str, moment: str, *more: str, flags: tuple[object, ...] = ()
) -> Process:
    command = (sys.executable, WORKER, front, rank, moment, processes.folder, *more)
    launch = ("-n", 2, "-s", 2, "--max-restarts", 1, *flags)
    return processes.kvps("launch", *launch, "--", *command)


def weights_of(job: Process) -> list[list[float]]:
    found = re.findall(r"weights \[(.*)\]", job.out)
    return [[float(item) for item in line.split(",")] for line in found]


@pytest.mark.parametrize(
    ("front", "rank"),
    [
        ("trainer", 0),
        *(pytest.param(front, 1, marks=pytest.mark.in_turn) for front in FRONTS),
        pytest.param("optimizer", 0, marks=pytest.mark.in_turn),
    ],
)
def test_a_script_that_runs_again_arrives_where_the_others_are(
    processes: Processes, front: str, rank: int
) -> None:
    job = launched(processes, front, str(rank), "epoch")
    assert job.wait(60.0) == 0, job
    assert weights_of(job) == [undisturbed(front)] * 2
    unit = "2 merges" if front == "diloco" else "6 steps"
    assert (f"its first {unit} are passed over" in job.err) == (front != "kvstore")
    assert (processes.folder / "died").exists()


def test_an_optimizer_on_the_servers_resumes(processes: Processes) -> None:
    job = launched(processes, "optimizer", "1", "epoch", "resume")
    assert job.wait(60.0) == 0, job
    assert weights_of(job) == [undisturbed("optimizer")] * 2
    assert (processes.folder / "died").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("way", ["again", "resume"])
def test_at_every_moment_of_a_script(
    processes: Processes, front: str, moment: str, rank: str, way: str
) -> None:
    flags = ("--checkpoint-dir", processes.folder / "cuts")
    job = launched(processes, front, rank, moment, way, flags=flags)
    assert job.wait(60.0) == 0, job
    assert weights_of(job) == [undisturbed(front)] * 2
    assert (processes.folder / "died").exists()


@cache
def undisturbed_by_loader(front: str) -> tuple[list[float], list[list[str]]]:
    """Return the weights of a job that loses nobody, and the batches of each rank."""
    said: list[list[str]] = [[], []]
    with kvps.LocalCluster(workers=2, servers=2) as cluster:
        first, second = cluster.run(lambda rank: train_by_loader(front, said[rank].append))
    assert first == second
    return first, said


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("front", "moment", "rank"),
    [
        ("trainer", "pushed", 1),
        ("trainer", "step", 0),
        ("optimizer", "step", 1),
        ("optimizer", "pushed", 0),
        ("shard", "step", 1),
        ("diloco", "pushed", 1),
    ],
)
def test_a_replacement_reads_the_batches_that_its_predecessor_did_not(
    processes: Processes, front: str, moment: str, rank: int
) -> None:
    job = launched(processes, front, str(rank), moment, "loader")
    assert job.wait(60.0) == 0, job
    weights, batches = undisturbed_by_loader(front)
    assert weights_of(job) == [weights] * 2
    for each in range(2):
        said = re.findall(rf"^\[worker {each}\] (batch .*)$", job.out, re.MULTILINE)
        # Local steps since the last merge are made again.
        assert (said == batches[each]) or (front == "diloco" and set(said) == set(batches[each]))
    assert (processes.folder / "died").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("way", "why"),
    [("again", "a GradScaler may have dropped steps"), ("resume", "in each step the workers agree on flags")],
)
def test_with_a_grad_scaler_a_replacement_is_refused_at_once(
    processes: Processes, way: str, why: str
) -> None:
    job = launched(processes, "optimizer-scaler", "1", "step", way)
    assert job.wait(60.0) == 78, job
    assert job.err.count(f"cannot go on where it was: {why}") == 1, job


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["again", "resume"])
def test_a_worker_of_an_async_job_is_replaced(processes: Processes, way: str) -> None:
    job = launched(processes, "trainer-async", "1", "step", way)
    assert job.wait(60.0) == 0, job
    assert len(weights_of(job)) == 2
    assert (processes.folder / "died").exists()


@pytest.mark.parametrize("front", ["optimizer-here"])
def test_a_front_end_with_state_on_the_workers_is_refused_once(processes: Processes, front: str) -> None:
    job = launched(processes, front, "1", "epoch")
    assert job.wait(60.0) != 0, job
    assert job.err.count("this worker replaces a lost worker") == 1, job
    assert "use update_on_kvstore=True" in job.err


def test_with_shrink_the_others_go_on_while_a_replacement_starts(processes: Processes) -> None:
    script = processes.script(
        "import os, pathlib, time\nimport kvps, torch\n"
        "died, sits, went_on, end = map(pathlib.Path, ('died', 'sits', 'went-on', 'end'))\n"
        "is_second = died.exists() and os.environ['KVPS_RANK'] == '1'\n"
        "kv = kvps.create('dist_sync', timeout=30, on_worker_lost='shrink')\n"
        "if is_second: sits.touch()\n"
        "while is_second and not went_on.exists(): time.sleep(0.01)\n"
        "kv.init('w', torch.zeros(4))\n"
        "begin, steps, alone = kv.resume(['w']), 0, 0\n"
        "while not end.exists():\n"
        "    kv.pushpull('w', torch.ones(4)); steps += 1\n"
        "    if kv.rank == 1 and not is_second: died.touch(); os._exit(5)\n"
        "    alone += sits.exists()\n"
        "    if kv.rank == 0 and alone == 50: went_on.touch()\n"
        "    if is_second and steps == 20: end.touch()\n"
        "print(f'began at {begin}, made {steps}', flush=True)\n"
    )
    job = processes.kvps("launch", "-n", 2, "-s", 2, "--max-restarts", 1, "--", sys.executable, script)
    assert job.wait(60.0) == 0, job
    begun = sorted(int(number) for number in re.findall(r"began at (\d+)", job.out))
    assert begun[0] == 0, job
    assert begun[1] > 50, "it begins where the others are"


@pytest.mark.spec("R646")
@pytest.mark.parametrize(("kind", "row"), [("dist_async", 24.0), ("dist_sync", 12.0)])
def test_tables_go_on_where_the_optimizer_resumes(processes: Processes, kind: str, row: float) -> None:
    script = processes.script(
        "import os, pathlib\nimport kvps, torch, kvps.torch\n"
        f"tables, notes = kvps.create({kind!r}, name='tables'), kvps.create('dist_async', name='notes')\n"
        "recipe = {'init': 'zeros', 'optimizer': 'test', 'lr': 1.0}\n"
        "rows = kvps.torch.Embedding(tables.embedding('user', 1, **recipe))\n"
        "model = torch.nn.Linear(1, 1)\n"
        "sgd = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "optimizer = kvps.torch.DistributedOptimizer(sgd, model, update_on_kvstore=True)\n"
        "notes.init('steps', torch.zeros(1)); notes.set_optimizer('test')\n"
        "for step in range(optimizer.resume(), 12):\n"
        "    optimizer.zero_grad()\n"
        "    found = rows(torch.tensor([7]))\n"
        "    (model(found).sum() * 0 + found.sum()).backward()\n"
        "    notes.push('steps', torch.ones(1))\n"
        "    if step == 8 and notes.rank == 1 and not pathlib.Path('died').exists():\n"
        "        rows.table.pull([7]); pathlib.Path('died').touch(); os._exit(5)\n"
        "    optimizer.step()\n"
        "tables.barrier()\n"
        "print('row', rows.table.pull([7]).item(), flush=True)\n"
    )
    job = processes.kvps("launch", "-n", 2, "-s", 2, "--max-restarts", 1, "--", sys.executable, script)
    assert job.wait(60.0) == 0, job
    assert job.out.count(f"row {row}") == 2, job
    assert job.err.count("pushes of 'steps' of store 'notes'") == 1, job


@pytest.mark.spec("R647")
def test_replacement_with_a_file_of_its_own_hears_that_servers_drop_its_pushes(processes: Processes) -> None:
    script = processes.script(
        "import os, pathlib\nimport kvps, torch\n"
        "died = pathlib.Path('died')\n"
        "kv = kvps.create('dist_async')\n"
        "kv.init('w', torch.zeros(4)); kv.set_optimizer('test')\n"
        "for step in range(3 if died.exists() and kv.rank == 1 else 0, 6):\n"
        "    kv.pushpull('w', torch.ones(4))\n"
        "    if step == 3 and kv.rank == 1 and not died.exists(): died.touch(); os._exit(5)\n"
        "kv.barrier('end')\n"
    )
    job = processes.kvps("launch", "-n", 2, "-s", 1, "--max-restarts", 1, "--", sys.executable, script)
    assert job.wait(60.0) == 0, job
    assert job.err.count("Servers drop up to 4 of its next pushes of 'w'") == 1, job
