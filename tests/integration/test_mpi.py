"""Scripts that MPI's launchers start: ranks follow from their variables, as under ``mpirun`` with any other library."""

import shutil
import sys

import pytest

from tests.integration.processes import BIN, Processes, free_port

LAUNCHERS = {
    "Open MPI": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"),
    "MPICH": ("mpiexec.hydra",),
}
SCRIPT = """
import os, torch, kvps
names = ("EXPECTED", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
mine = int(next(os.environ[name] for name in names if name in os.environ))
kv = kvps.create(os.environ["STORE"])
assert (kv.rank, kv.num_workers) == (mine, 3), (kv.rank, kv.num_workers)
kv.init("w", torch.zeros(3))
out = torch.empty(3)
kv.pushpull("w", torch.full((3,), float(10**mine)), out=out)
assert out.tolist() == [111.0] * 3, out
kv.barrier()
kvps.shutdown()
os.write(1, b"right\\n")
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("store", ["dist_sync", "allreduce"])
def test_ranks_are_those_of_the_launcher(processes: Processes, launcher: str, store: str) -> None:
    command = LAUNCHERS[launcher]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    env = {"STORE": store}
    if store == "allreduce":
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    else:
        cluster = processes.scheduler(3, 1)
        cluster.server()
        env["KVPS_SCHEDULER"] = cluster.endpoint
    script = processes.script(SCRIPT)
    ranks = ("-n", 3, processes.interpreter, script)
    started = processes.start(
        "mpi", *command, *ranks, **env
    )  # by its path, Open MPI would set LD_LIBRARY_PATH
    assert started.wait(120) == 0, started
    assert started.out.count("right") == 3, started


VARIABLES = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


@pytest.mark.parametrize(
    ("launcher", "way"), list(zip(VARIABLES, ("kvps-worker", "DMLC", "script", "script"), strict=True))
)
def test_ranks_follow_from_the_variables_alone(processes: Processes, launcher: str, way: str) -> None:
    cluster = processes.scheduler(3, 1)
    cluster.server()
    script, (rank, size) = processes.script(SCRIPT), VARIABLES[launcher]
    host, _, port = cluster.endpoint.removeprefix("tcp://").rpartition(":")
    place = {"KVPS_SCHEDULER": cluster.endpoint}
    if way == "DMLC":
        place = {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port, "DMLC_ROLE": "worker"}
        place |= {"DMLC_NUM_WORKER": "3", "DMLC_NUM_SERVER": "1"}
    command = (BIN / "kvps-worker", "--", sys.executable) if way == "kvps-worker" else (sys.executable,)
    workers = [
        processes.start(
            "worker",
            *command,
            script,
            **({rank: str(mine), size: "3", "EXPECTED": str(mine), "STORE": "dist_sync"} | place),
        )
        for mine in (2, 0, 1)
    ]
    assert [worker.wait(60.0) for worker in workers] == [0, 0, 0], workers


def test_kvps_rank_counts_before_the_variables_of_a_launcher(processes: Processes) -> None:
    cluster = processes.scheduler(3, 1)
    cluster.server()
    script = processes.script(SCRIPT)
    workers = [
        cluster.plain(
            script,
            **{"OMPI_COMM_WORLD_RANK": str(mine), "OMPI_COMM_WORLD_SIZE": "3"},
            **{"KVPS_RANK": str(2 - mine), "EXPECTED": str(2 - mine), "STORE": "dist_sync"},
        )
        for mine in range(3)
    ]
    assert [worker.wait(60.0) for worker in workers] == [0, 0, 0], workers


def test_processes_of_mpi_without_a_scheduler_do_not_train_alone(processes: Processes) -> None:
    env = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "STORE": "dist_sync"}
    alone = processes.python(processes.script(SCRIPT), **env)
    assert alone.wait() == 1
    assert "Open MPI started 3 processes (OMPI_COMM_WORLD_SIZE) but KVPS_SCHEDULER" in alone.err
