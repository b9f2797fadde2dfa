"""Jobs on a real Ray: what is lost comes back, what is missing is named, and nothing is left.

Ray takes seconds to start, so these tests are slow: pip install 'kvps[ray]', and pytest -m slow tests/integration/platforms/test_ray.py.
"""

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest

from tests.integration.processes import ROOT, Process, Processes, has_checkpoint, until

pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvps[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.usefixtures("fresh_interpreters")]
LIMIT_S = 400.0
"""Seconds that Ray may take, on a machine that has other work."""

PAGE = (ROOT / "docs" / "launching" / "ray.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

START = """
import os, sys, signal, pathlib, time
import ray
import kvps.platforms.ray
{before}
ray.init({where}, log_to_driver=True)
"""
LOCAL = "num_cpus=6, include_dashboard=False, object_store_memory=100_000_000"
TRAINER = """
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

def fit(trainer, train, workers, config, **options):
    name = "torch_config" if trainer is TorchTrainer else "backend_config"
    failures = FailureConfig(max_failures=2, controller_failure_limit=0)
    run = RunConfig(storage_path=os.getcwd() + "/runs", name="run", failure_config=failures)
    return trainer(
        train, scaling_config=ScalingConfig(num_workers=workers), run_config=run, **{name: config}, **options
    ).fit()
"""
COUNT = """
def train(config):
    import torch, kvps
    kv = kvps.create("dist_sync", deterministic=True, name="model")
    kv.init("w", torch.zeros(3))
    kv.set_optimizer("sgd", lr=1.0)
    out = torch.zeros(3)
    step = kv.resume("w")
    print(f"worker {kv.rank} is process {os.getpid()} and begins at {step}", flush=True)
    while step < config["steps"]:
        if (kv.rank, step) == (config.get("rank"), config.get("at")):
            mark = pathlib.Path(config["mark"])
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        while step == config.get("hold") and not pathlib.Path(config["mark"]).exists():
            time.sleep(0.05)
        try:
            kv.pushpull("w", torch.ones(3), out=out)
            step += 1
        except kvps.EpochChanged as error:
            step = min(error.after.values(), default=0)
            print(f"worker {kv.rank} goes back to {step}", flush=True)
            if not error.after:
                kv.init("w", torch.zeros(3))
            if not error.has_optimizer:
                kv.set_optimizer("sgd", lr=1.0)
            kv.pull("w", out=out)
        time.sleep(config.get("pause", 0))
    print(f"worker {kv.rank} has {out.tolist()}", flush=True)
"""
HOLDING = COUNT.replace(
    'while step == config.get("hold") and not pathlib.Path(config["mark"]).exists():\n            time.sleep(0.05)',
    """if step == config["hold"]:
            print(f"worker {kv.rank} holds", flush=True)
            while not pathlib.Path(config["mark"]).with_name("go").exists():
                time.sleep(0.05)
            kv.barrier()""",
)
"""The same, but that it waits at a step for the file ``go``, and then at a barrier."""


@pytest.fixture(autouse=True)
def places(processes: Processes) -> Iterator[None]:
    """Give Ray a folder whose name is short enough for its sockets."""
    folder = tempfile.mkdtemp(prefix="kvps-ray-", dir="/tmp")
    processes.env |= {
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",
    }
    yield
    processes.check_nothing_left(60.0)
    shutil.rmtree(folder)


def driver(processes: Processes, *parts: str, where: str = LOCAL, before: str = "") -> Process:
    """Start a driver that has these parts, and does something before it joins a Ray cluster."""
    text = START.format(where=where, before=before) + "".join(parts)
    return processes.python(processes.script(text, f"driver{len(parts)}.py"))


def done(process: Process, limit_s: float = LIMIT_S) -> str:
    """Return what a driver has printed that ends well; on stderr, Ray Train repeats what workers print."""
    assert process.wait(limit_s) == 0, process
    return process.out


@pytest.mark.parametrize("trainer", ["DataParallelTrainer", "TorchTrainer"])
def test_a_killed_worker_is_replaced_alone(processes: Processes, trainer: str) -> None:
    config = f"dict(steps=30, rank=1, at=10, mark={str(processes.folder / 'mark')!r})"
    run = f"fit({trainer}, train, 2, kvps.platforms.ray.KvpsConfig(servers=2), train_loop_config={config})\n"
    free = "print('free', ray.available_resources()['CPU'])\n"
    wait = "while ray.available_resources()['CPU'] < 6: time.sleep(0.1)\n"
    out = done(driver(processes, TRAINER, COUNT, run, wait, free))
    assert out.count("worker 0 is process") == 1, out
    assert out.count("worker 1 is process") == 2, out
    assert "and begins at 10" in out, out
    assert out.count("has [-60.0, -60.0, -60.0]") == 2, out
    assert "free 6" in out


def test_servers_keep_the_weights_while_all_workers_are_replaced(processes: Processes) -> None:
    config = f"dict(steps=30, rank=0, at=10, mark={str(processes.folder / 'mark')!r})"
    run = f"fit(TorchTrainer, train, 1, kvps.platforms.ray.KvpsConfig(), train_loop_config={config})\n"
    out = done(driver(processes, TRAINER, COUNT, run))
    assert "and begins at 10" in out, out
    assert "has [-30.0, -30.0, -30.0]" in out, out


def test_a_killed_server_returns_to_its_checkpoint(processes: Processes) -> None:
    config = "kvps.platforms.ray.KvpsConfig(servers=2, checkpoint_every=0.5)"
    loop = f"dict(steps=100, pause=0.05, hold=60, mark={str(processes.folder / 'mark')!r})"
    run = f"fit(TorchTrainer, train, 2, {config}, train_loop_config={loop})\n"
    process = driver(processes, TRAINER, COUNT, run)
    folder = processes.folder / "runs" / "run" / "kvps"
    until(lambda: has_checkpoint(folder), "checkpoint", LIMIT_S)
    os.kill(processes.pids("ray::KvpsServer")[0], signal.SIGKILL)
    processes.script("", "mark")
    out = done(process)
    assert out.count("goes back to") == 2, out
    assert out.count("has [-200.0, -200.0, -200.0]") == 2, out
    assert out.count("is process") == 2, "no worker was restarted"


def test_a_killed_scheduler_comes_back_and_nobody_notices(processes: Processes) -> None:
    """Even twice; barriers and a worker that is replaced later need the new scheduler."""
    mark = processes.folder / "mark"
    loop = f"dict(steps=60, pause=0.02, hold=20, rank=1, at=40, mark={str(mark)!r})"
    run = f"fit(TorchTrainer, train, 2, kvps.platforms.ray.KvpsConfig(servers=1), train_loop_config={loop})\n"
    process = driver(processes, TRAINER, HOLDING, run)
    for life in range(2):
        process.expect("worker 1 holds", LIMIT_S)
        (before,) = processes.pids("ray::KvpsScheduler")
        os.kill(before, signal.SIGKILL)

        def is_back(before: int = before) -> bool:
            return bool(set(processes.pids("ray::KvpsScheduler.run")) - {before})

        until(is_back, f"scheduler of life {life + 1}", 60.0)
    processes.script("", "go")
    out = done(process)
    assert out.count("worker 0 is process") == 1, out
    assert out.count("worker 1 is process") == 2, out
    assert "and begins at 40" in out, out
    assert out.count("has [-120.0, -120.0, -120.0]") == 2, out
    assert "SchedulerLost" not in out + process.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_ended_driver_leaves_no_actor(processes: Processes, number: int) -> None:
    """``ray job stop`` sends SIGTERM, and SIGKILL later; the Ray cluster goes on."""
    hold = """
print("address", ray.get_runtime_context().gcs_address, flush=True)
while not pathlib.Path("end").exists():
    time.sleep(0.1)
"""
    head = driver(processes, hold)
    address = head.expect(r"address (\S+)", LIMIT_S)[1]
    config = "train_loop_config=dict(steps=10**9, pause=0.1)"
    run = f"fit(TorchTrainer, train, 2, kvps.platforms.ray.KvpsConfig(servers=2), {config})\n"
    process = driver(processes, TRAINER, COUNT, run, where=f"address={address!r}")
    process.expect("worker 1 is process", LIMIT_S)
    kinds = "ray::(Kvps|RayTrainWorker|TrainController)"
    assert len(processes.pids("ray::Kvps(Server|Scheduler)")) == 3
    process.signal(number)
    process.popen.wait(LIMIT_S)
    until(lambda: not processes.pids(kinds), "end of the actors", 60.0)
    assert processes.pids("raylet"), "Ray goes on"
    processes.script("", "end")
    done(head)


PLAIN = """
import torch, kvps

@ray.remote(max_retries=2)
def train(seat, steps, at, mark):
    with seat:
        kv = kvps.create("dist_sync", deterministic=True)
        kv.init("w", torch.zeros(2))
        kv.set_optimizer("sgd", lr=1.0)
        out = torch.zeros(2)
        begin = kv.resume("w")
        for step in range(begin, steps):
            if (kv.rank, step) == (1, at) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            kv.pushpull("w", torch.ones(2), out=out)
        return kv.rank, begin, out.tolist(), os.environ["KVPS_RANK"]

@ray.remote
class Trainer:
    def __init__(self, seat):
        self.seat = seat
        seat.join()
        self.kv = kvps.create("dist_sync")
        self.kv.init("w", torch.zeros(2))

    def step(self):
        return self.kv.pushpull("w", torch.ones(2)).tolist()

    def end(self):
        self.seat.leave()
        of_the_test = ("KVPS_TEST_MARK", "KVPS_RECORD_DIR")
        return [name for name in os.environ if name.startswith("KVPS_") and name not in of_the_test]
"""


def test_tasks_and_actors_are_workers(processes: Processes) -> None:
    mark = f"pathlib.Path({str(processes.folder / 'mark')!r})"
    body = f"""
with kvps.platforms.ray.cluster(workers=2, servers=2) as cluster:
    print(ray.get([train.remote(cluster.seat(rank), 20, 5, {mark}) for rank in range(2)]))
with kvps.platforms.ray.cluster(workers=2, servers=1) as cluster:
    actors = [Trainer.remote(cluster.seat(rank)) for rank in range(2)]
    print(ray.get([one.step.remote() for one in actors]))
    print("left", ray.get([one.end.remote() for one in actors]))
try:
    with kvps.platforms.ray.cluster(workers=1, servers=1) as cluster:
        cluster.seat(1)
except kvps.ConfigError as error:
    print(error)
del actors
while ray.available_resources()["CPU"] < 6:
    time.sleep(0.1)
"""
    process = driver(processes, PLAIN, body)
    out = done(process)
    assert "(0, 0, [-40.0, -40.0], '0'), (1, 5, [-40.0, -40.0], '1')" in out, out
    assert "[[2.0, 2.0], [2.0, 2.0]]" in out, out
    assert "left [[], []]" in out, out
    assert "rank=1: this cluster has 1 workers" in out, out
    assert "did not end in" not in process.err, process


def test_a_process_group_serves_ddp_and_starts_over_as_a_whole(processes: Processes) -> None:
    body = """
def train(config):
    import torch
    import ray.train.torch
    import torch.distributed as dist
    print(f"worker {dist.get_rank()} begins", flush=True)
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    assert dist.get_backend() == "kvps", dist.get_backend()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        mark = pathlib.Path(config["mark"])
        if (dist.get_rank(), step) == (1, 1) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(2, 4) * (dist.get_rank() + step)).sum().backward()
        optimizer.step()
    print("weights", [value.tolist() for value in model.module.parameters()], flush=True)
"""
    config = f"train_loop_config=dict(mark={str(processes.folder / 'mark')!r})"
    run = f"fit(TorchTrainer, train, 2, kvps.platforms.ray.KvpsConfig(backend='kvps', servers=2), {config})\n"
    out = done(driver(processes, TRAINER, body, run))
    assert out.count("worker 0 begins") == out.count("worker 1 begins") == 2, out
    found = [line.partition("weights")[2] for line in out.splitlines() if "weights [[" in line]
    assert len(found) == 2, out
    assert len(set(found)) == 1, out


@pytest.mark.parametrize(("block", "text"), [(0, "-50000.0"), (1, "[3.0, 3.0]")])
def test_the_blocks_of_the_page_run(processes: Processes, block: int, text: str) -> None:
    assert len(BLOCKS) == 2
    process = processes.python(processes.script(BLOCKS[block], "page.py"), HOME=str(processes.folder))
    assert text in done(process), process
