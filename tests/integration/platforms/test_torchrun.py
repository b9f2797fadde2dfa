"""torchrun with ``--rdzv-backend=kvps``: real agents that meet, lose a node or the scheduler, and go on; what goes wrong."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.processes import BIN, Cluster, Process, Processes, free_port, until

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
    from kvps.runtime import keys as files

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
    begun = {int(one) for one in re.findall(r"began at (\d)", agent.out)}
    assert begun in ({3}, {4}), agent
    assert cluster.process.wait() == 0, cluster.process


STORE = """
import os
import torch
import kvps

kv = kvps.create("dist_sync", deterministic=True)
kv.init("w", torch.zeros(4))
for step in range(kv.resume("w"), 8):
    if step == 4 and kv.rank == 1 and not os.path.exists("died"):
        open("died", "w").close()
        os._exit(9)
    kv.pushpull("w", torch.full((4,), kv.rank + 1.0 + step), out=(out := torch.empty(4)))
assert kv.rank == int(os.environ["RANK"])
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"rank {kv.rank} restart {restart} {out.tolist()}\\n", end="", flush=True)
kv.close()
"""


@pytest.mark.thorough
def test_a_killed_worker_of_a_store_comes_back_by_torchrun_and_resumes(processes: Processes) -> None:
    cluster = processes.scheduler(2, 1)
    cluster.server()
    words = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1")
    flags = ("--rdzv-backend=kvps", f"--rdzv-endpoint={cluster.endpoint}")
    agent = processes.python(*words, *flags, processes.script(STORE), TMPDIR=left(processes))
    assert agent.wait(LIMIT_S) == 0, agent
    last = [1.0 + 2.0 + 2 * 7] * 4
    for rank in (0, 1):
        assert f"rank {rank} restart 1 {last}" in agent.out, agent
    assert cluster.process.wait() == 0, cluster.process


FOR_EVER = """
import kvps, torch

kv = kvps.create("dist_sync")
kv.init("w", torch.zeros(4))
for step in range(10**9):
    kv.pushpull("w", torch.ones(4))
    if step == 20:
        print("running", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_torchrun_leaves_no_worker(processes: Processes, number: signal.Signals) -> None:
    cluster = processes.scheduler(2, 1)
    server = cluster.server()
    words = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=kvps")
    script = processes.script(FOR_EVER, "steady.py")
    flags = (f"--rdzv-endpoint={cluster.endpoint}", script)
    agent = processes.python(*words, *flags, TMPDIR=left(processes))
    agent.expect("running(.|\n)*running", LIMIT_S)
    agent.signal(number)
    assert agent.wait(LIMIT_S) != 0
    until(lambda: not processes.pids("steady"), "end of the workers", LIMIT_S)
    cluster.process.signal(signal.SIGTERM)
    for process in (cluster.process, server):
        process.wait(LIMIT_S)


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


@pytest.fixture
def stranger() -> Iterator[str]:
    """Yield the endpoint of a web server, which is no scheduler."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    peer, _ = listening.accept()
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                    peer.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def refused(agent: Process, says: str, limit_s: float = 30.0) -> None:
    """Expect the agent to end in time (and in what its interpreter takes on a busy machine), and to say why."""
    began = time.monotonic()
    assert agent.wait(limit_s + 30.0) == 1, agent
    assert re.search(f"RendezvousConnectionError: {says}", agent.err), agent
    assert time.monotonic() - began < limit_s + 30.0


@pytest.mark.thorough
def test_no_scheduler_there(processes: Processes, stranger: str) -> None:
    script = processes.script(RANK)
    nobody = f"127.0.0.1:{free_port()}"
    for endpoint in (nobody, stranger, "no-such-host.invalid:9091"):
        agent = torchrun(processes, endpoint, "1", script)
        refused(agent, rf".* at tcp://{re.escape(endpoint)}.*--scheduler")


@pytest.mark.thorough
def test_other_keys(processes: Processes) -> None:
    good, other = keys(processes.folder / "good"), keys(processes.folder / "other")
    script = processes.script(RANK)
    locked: Cluster = processes.scheduler(1, 0, KVPS_KEYS=good)
    refused(
        torchrun(processes, locked.endpoint, "1", script, KVPS_KEYS=other),
        "the process at .* is not the scheduler whose public key is in --keys",
    )
    refused(torchrun(processes, locked.endpoint, "1", script), "the scheduler at .* has keys, and this")
    missing = processes.folder / "missing"
    refused(torchrun(processes, locked.endpoint, "1", script, KVPS_KEYS=str(missing)), "cannot read the key")
    locked.process.signal(signal.SIGTERM)
    locked.process.wait()


def test_the_entry_point_is_found() -> None:
    from torch.distributed.elastic.rendezvous import registry as torchs
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    from kvps.platforms.torchrun.handler import create

    torchs._register_out_of_tree_handlers()
    assert rendezvous_handler_registry._registry["kvps"] is create
    assert sys.modules[create.__module__].NAME == "kvps"
    assert (BIN / "torchrun").exists()
