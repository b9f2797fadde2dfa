"""One training script, unchanged, under every engine that this machine has: the weights are the same, bit by bit."""

import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.engines import Engine, Slurm, Ssh
from tests.integration.processes import Process, Processes, free_port

WORKERS, SERVERS = 3, 2
LIMIT_S = 120.0
SCRIPT = """
import hashlib
import torch
import kvps
from kvps.torch import DistributedOptimizer

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))
kv = kvps.create("dist_sync", deterministic=True, average=True)
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = DistributedOptimizer(sgd, model, kv, update_on_kvstore=True)
for step in range(20):
    generator = torch.Generator().manual_seed(1000 * step + kv.rank)
    inputs = torch.randn(16, 20, generator=generator)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
digest = hashlib.sha256()
for name, value in sorted(model.state_dict().items()):
    digest.update(value.numpy().tobytes())
print("sha256", digest.hexdigest(), flush=True)
kv.close()
"""
RAY = """
import pathlib
import sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
import kvps.platforms.ray

def train(config):
    import contextlib, io
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(config["script"], "train.py", "exec"), {{"__name__": "__main__"}})
    pathlib.Path(config["out"], str(ray.train.get_context().get_world_rank())).write_text(printed.getvalue())

ray.init(num_cpus={workers} + {servers}, include_dashboard=False, object_store_memory=100_000_000)
TorchTrainer(
    train,
    train_loop_config={{"script": pathlib.Path("train.py").read_text(), "out": sys.argv[1]}},
    torch_config=kvps.platforms.ray.KvpsConfig(servers={servers}),
    scaling_config=ScalingConfig(num_workers={workers}),
    run_config=RunConfig(storage_path=sys.argv[1] + "/runs"),
).fit()
for rank in range({workers}):
    print(pathlib.Path(sys.argv[1], str(rank)).read_text(), end="", flush=True)
"""
"""The script as the training function of Ray; its lines come back by files."""
RAY_LIMIT_S = 300.0
COMMAND = (sys.executable, "train.py")


def by_launch(processes: Processes, folder: Path) -> list[Process]:
    return [processes.kvps("launch", "-n", WORKERS, "-s", SERVERS, "--", *COMMAND)]


def by_engine(made: Callable[[Path], Engine]) -> Callable[[Processes, Path], list[Process]]:
    """Return the start of the script by kvps-launch on the hosts of an engine."""

    def start(processes: Processes, folder: Path) -> list[Process]:
        engine = made(folder)
        try:
            launch = engine.launch(processes, "-n", WORKERS, "-s", SERVERS, "--", *COMMAND)
            launch.wait(LIMIT_S)
        finally:
            engine.close()
        return [launch]

    return start


def by_hand(processes: Processes, folder: Path) -> list[Process]:
    cluster = processes.scheduler(WORKERS, SERVERS)
    for _ in range(SERVERS):
        cluster.server()
    return [cluster.worker(*COMMAND) for _ in range(WORKERS)]


def by_dmlc(processes: Processes, folder: Path) -> list[Process]:
    env = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port())}
    env |= {"DMLC_NUM_WORKER": str(WORKERS), "DMLC_NUM_SERVER": str(SERVERS)}
    roles = ["scheduler", *["server"] * SERVERS, *["worker"] * WORKERS]
    return [processes.python("train.py", DMLC_ROLE=role, **env) for role in roles]


def by_torchrun(processes: Processes, folder: Path) -> list[Process]:
    cluster = processes.scheduler(WORKERS, SERVERS)
    for _ in range(SERVERS):
        cluster.server()
    words = ("-m", "torch.distributed.run", "--nproc-per-node", WORKERS, "--master-port")
    words = (*words, free_port(), "train.py")
    return [processes.python(*words, KVPS_SCHEDULER=cluster.endpoint, TMPDIR=str(folder))]


def by_rendezvous(processes: Processes, folder: Path) -> list[Process]:
    """Start an agent of torchrun for each worker; they meet at the scheduler."""
    cluster = processes.scheduler(WORKERS, SERVERS)
    for _ in range(SERVERS):
        cluster.server()
    words = ("-m", "torch.distributed.run", "--rdzv-backend=kvps", "--nnodes", WORKERS)
    words = (*words, f"--rdzv-endpoint={cluster.endpoint}", "train.py")
    return [processes.python(*words, TMPDIR=str(folder)) for _ in range(WORKERS)]


def by_mpirun(name: str, *flags: str) -> Callable[[Processes, Path], list[Process]]:
    """Return the start of the script by a launcher of MPI."""

    def start(processes: Processes, folder: Path) -> list[Process]:
        program = shutil.which(name)
        if program is None:
            pytest.skip(f"{name} is not installed")
        cluster = processes.scheduler(WORKERS, SERVERS)
        for _ in range(SERVERS):
            cluster.server()
        words = (program, *flags, "-n", WORKERS, *COMMAND)
        env = {"KVPS_SCHEDULER": cluster.endpoint, "TMPDIR": str(folder)}
        return [processes.start("mpi", *words, **env)]

    return start


def by_ray(processes: Processes, folder: Path) -> list[Process]:
    """Start the script in workers of Ray Train, each of which runs it as a program."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'kvps[ray]'")
    processes.script(RAY.format(workers=WORKERS, servers=SERVERS), "ray_train.py")
    env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0"}
    temporary = tempfile.mkdtemp(prefix="kvps-ray-", dir="/tmp")  # short: Ray has sockets there
    try:
        driver = processes.python("ray_train.py", folder, RAY_TMPDIR=temporary, **env)
        driver.wait(RAY_LIMIT_S)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [driver]


ENGINES: dict[str, Callable[[Processes, Path], list[Process]]] = {
    "kvps-launch": by_launch,
    "kvps-launch, ssh": by_engine(Ssh),
    "kvps-launch, Slurm": by_engine(Slurm),
    "kvps-worker by hand": by_hand,
    "DMLC variables by hand": by_dmlc,
    "torchrun": by_torchrun,
    "Ray Train": by_ray,
    "torchrun, backend kvps": by_rendezvous,
    "mpirun of Open MPI": by_mpirun("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"),
    "mpiexec of MPICH": by_mpirun("mpiexec.hydra"),
}
"""Each starts the script, and returns the processes that print its lines; it skips where the engine is not installed.

torchrun and Open MPI leave files in TMPDIR, so they get a directory of their own.
"""


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("fresh_interpreters")
def test_the_weights_are_the_same_everywhere(
    processes: Processes, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    processes.script(SCRIPT)
    digests: dict[str, set[str]] = {}
    for name, start in ENGINES.items():
        began = time.monotonic()
        try:
            digests[name] = run(processes, name, start, tmp_path_factory.mktemp("engine"))
        except pytest.skip.Exception as skipped:
            row = f"not here: {skipped.msg}"
        else:
            row = f"{' '.join(sorted(digests[name]))} {time.monotonic() - began:5.1f} s"
        with capsys.disabled():
            sys.stdout.write(f"\n{name:24} {row}")
            sys.stdout.flush()
    assert len(set.union(*digests.values())) == 1, digests


def run(
    processes: Processes, name: str, start: Callable[[Processes, Path], list[Process]], folder: Path
) -> set[str]:
    """Run the script by an engine; return the digests that its workers print."""
    started = start(processes, folder)
    for process in started:
        assert process.wait(LIMIT_S) == 0, (name, process)
    lines = "".join([process.out for process in started]).splitlines()
    found = [line.partition("sha256 ")[2] for line in lines if "sha256 " in line]
    assert len(found) == WORKERS, (name, started)
    return set(found)
