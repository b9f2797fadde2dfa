"""torchrun with ``--rdzv-backend=kvps``: real agents that meet, lose a node or the scheduler, and go on; what goes wrong."""

import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.processes import BIN, Process, Processes, free_port, until

LIMIT_S = 90.0
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1"
"""A node that is lost is noticed in 4 seconds, and nobody waits for more nodes than there must be."""
RANK = """
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "KVPS_SCHEDULER")
line = "rank {} of {} local {} restart {} at {}\\n".format(*map(os.environ.get, names))
print(line, end="", flush=True)  # the ranks of an agent share its output
"""
STAY = (
    RANK
    + """
import sys, time
while not os.path.exists("end"):
    time.sleep(0.05)
"""
)


def torchrun(
    processes: Processes, endpoint: str, nodes: str, script: Path, *flags: object, **env: str
) -> Process:
    """Start an agent of a node with one worker."""
    words = ("-m", "torch.distributed.run", "--rdzv-backend=kvps", f"--rdzv-endpoint={endpoint}")
    more = (f"--nnodes={nodes}", "--nproc-per-node=1", f"--rdzv-conf={QUICK}", *flags, script)
    return processes.python(*words, *more, TMPDIR=left(processes), **env)


def left(processes: Processes) -> str:
    """Return a directory for the files that torchrun leaves."""
    folder = processes.folder / "torchrun"
    folder.mkdir(exist_ok=True)
    return str(folder)


def keys(folder: Path) -> str:
    from kvps.runtime import key_files as files

    files.write(folder, files.generate())
    return str(folder)


# --- ranks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_keys", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_two_agents_give_their_workers_ranks(processes: Processes, has_keys: bool) -> None:
    """The workers find the scheduler, though no variable names it. They need not be its members."""
    env = {"KVPS_KEYS": keys(processes.folder / "keys")} if has_keys else {}
    cluster = processes.scheduler(2, 0, **env)
    place = cluster.endpoint.removeprefix("tcp://")
    script = processes.script(RANK)
    agents = [torchrun(processes, place, "2", script, **env) for _ in range(2)]
    for agent in agents:
        assert agent.wait(LIMIT_S) == 0, agent
    printed = sorted("".join([agent.out for agent in agents]).splitlines())
    at = f"local 0 restart 0 at {cluster.endpoint}"
    assert printed == [f"rank 0 of 2 {at}", f"rank 1 of 2 {at}"]
    cluster.process.signal(signal.SIGTERM)
    assert cluster.process.wait() == 0


GROUP = """
import os
import torch.distributed as dist, torch
import kvps.torch

dist.init_process_group("kvps")
rank = dist.get_rank()
assert (rank, dist.get_world_size()) == (int(os.environ["RANK"]), 2)
start = int(open("step").read()) if os.path.exists("step") else 0
for step in range(start, 6):
    one = torch.tensor([step * 10.0 + rank])
    dist.all_reduce(one)
    assert one.item() == step * 20 + 1, (step, one)
    dist.barrier()
    if rank == 0:
        open("step", "w").write(str(step + 1))
    if step == 3 and rank == int(os.environ["DIES"]) and not os.path.exists("died"):
        open("died", "w").close()
        os._exit(9)
aside = dist.new_group(backend="gloo")
dist.all_reduce(one, group=aside)
dist.destroy_process_group()
print(f"rank {rank} began at {start}\\n", end="", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("dies", ["0", "1"])
@pytest.mark.parametrize("backend", ["kvps", "static"])
def test_a_group_is_started_again_by_torchrun(processes: Processes, dies: str, backend: str) -> None:
    """The ranks are new processes, and no sum holds a value of their predecessors.

    Without the backend kvps, KVPS_SCHEDULER is the only variable that a script needs.
    """
    cluster = processes.scheduler(2, 1)
    cluster.server()
    flags: tuple[object, ...] = ("--rdzv-backend=kvps", f"--rdzv-endpoint={cluster.endpoint}")
    env = {"DIES": dies}
    if backend == "static":
        flags, env = ("--master-port", free_port()), {**env, "KVPS_SCHEDULER": cluster.endpoint}
    words = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", *flags)
    agent = processes.python(*words, processes.script(GROUP), TMPDIR=left(processes), **env)
    assert agent.wait(LIMIT_S) == 0, agent
    begun = {int(item) for item in re.findall(r"began at (\d)", agent.out)}
    assert begun in ({3}, {4}), agent
    assert cluster.process.wait() == 0, cluster.process


# --- what is lost ---------------------------------------------------------------------------------------


def lose(processes: Processes, agent: Process, script: str) -> None:
    """Kill a node: the agent and its worker."""
    for pid in [agent.pid, *_children(processes, agent.pid, script)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def _children(processes: Processes, parent: int, script: str) -> list[int]:
    found = []
    for pid in processes.pids(script):
        with suppress(OSError, IndexError):
            status = Path(f"/proc/{pid}/stat").read_text()
            if int(status.rpartition(")")[2].split()[1]) == parent:
                found.append(pid)
    return found


def fail(processes: Processes, agent: Process, script: str) -> None:
    """End the worker of an agent, as a collective that lost a rank does."""
    (worker,) = until(lambda: _children(processes, agent.pid, script), "worker")
    os.kill(worker, signal.SIGKILL)


@pytest.mark.thorough
def test_the_others_go_on_without_the_first_node_and_with_a_new_one(processes: Processes) -> None:
    cluster = processes.scheduler(4, 0)
    script = processes.script(STAY, "stay.py")
    start = (processes, cluster.endpoint, "1:2", script, "--max-restarts=5")
    agents = [torchrun(*start) for _ in range(2)]
    for agent in agents:
        agent.expect(r"rank \d of 2", LIMIT_S)
    (first,) = [agent for agent in agents if "rank 0 of 2" in agent.out]
    (other,) = [agent for agent in agents if agent is not first]
    lose(processes, first, "stay.py")
    fail(processes, other, "stay.py")
    other.expect("rank 0 of 1 local 0 restart 1", LIMIT_S)
    third = torchrun(*start)
    third.expect(r"rank \d of 2", LIMIT_S)
    until(lambda: len(re.findall(r"rank \d of 2", other.out)) == 2, "next round", LIMIT_S)
    (processes.folder / "end").touch()
    for agent in (other, third):
        assert agent.wait(LIMIT_S) == 0, agent
    cluster.process.signal(signal.SIGTERM)
    cluster.process.wait()


@pytest.mark.thorough
def test_the_agents_outlive_the_scheduler(processes: Processes) -> None:
    """It is killed and starts again, with its state; then a worker fails, and the agents meet again."""
    bind = f"tcp://127.0.0.1:{free_port()}"
    flags = ("--workers", 2, "--servers", 0, "--bind", bind, "--state", processes.folder / "state")
    scheduler = processes.kvps("scheduler", *flags)
    script = processes.script(STAY, "stay.py")
    agents = [torchrun(processes, bind, "2", script, "--max-restarts=3") for _ in range(2)]
    for agent in agents:
        agent.expect("rank . of 2 local 0 restart 0", LIMIT_S)
    scheduler.signal(signal.SIGKILL)
    scheduler.wait()
    again = processes.kvps("scheduler", *flags)
    for agent in agents:
        fail(processes, agent, "stay.py")
    for agent in agents:
        agent.expect("rank . of 2 local 0 restart 1", LIMIT_S)
    (processes.folder / "end").touch()
    for agent in agents:
        assert agent.wait(LIMIT_S) == 0, agent
    again.signal(signal.SIGTERM)
    again.wait()


# --- what is wrong --------------------------------------------------------------------------------------


def test_the_entry_point_is_found() -> None:
    from torch.distributed.elastic.rendezvous import registry as torchs
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    from kvps.platforms.torchrun.handler import create

    torchs._register_out_of_tree_handlers()
    assert rendezvous_handler_registry._registry["kvps"] is create
    assert sys.modules[create.__module__].NAME == "kvps"
    assert (BIN / "torchrun").exists()
