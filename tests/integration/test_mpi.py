"""Scripts that MPI's launchers start: ranks follow from their variables, as under ``mpirun`` with any other library."""

from __future__ import annotations

import shutil
import sys

import pytest

from tests.integration.processes import Processes, free_port

LAUNCHERS = {
    "Open MPI": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"),
    "MPICH": ("mpiexec.hydra",),
}
SCRIPT = """
import os, torch, kvps
mine = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
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
    program = shutil.which(command[0])
    if program is None:
        pytest.skip(f"{command[0]} is not installed")
    env = {"STORE": store}
    if store == "allreduce":
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    else:
        cluster = processes.scheduler(3, 1)
        cluster.server()
        env["KVPS_SCHEDULER"] = cluster.endpoint
    script = processes.script(SCRIPT)
    started = processes.start("mpi", program, *command[1:], "-n", 3, sys.executable, script, **env)
    assert started.wait(120) == 0, started
    assert started.out.count("right") == 3, started
