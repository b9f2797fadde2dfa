"""Shared memory between real processes: who maps whom, what travels then, what a kill leaves."""

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kvps
from kvps.net.shm.transport import SHARE_MIN_BYTES, SWEEP_EVERY_S
from kvps.protocol import wire
from kvps.protocol.envelope import Packet
from tests.integration.processes import Cluster, Process, Processes, until

COUNT = 300_000
FRAMES = "values travel in frames, not in shared memory"
ROUNDS = f"""
import kvps, os, sys, time, torch
kv = kvps.create("dist_sync")
kv.init("w", torch.zeros({COUNT}))
for turn in range(3):
    out = kv.pushpull("w", torch.full(({COUNT},), kv.rank + turn + 1.0))
print("sum", out.unique().tolist(), flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
"""
"""Two workers' third sum is 3 + 4; then they wait to be let go."""
NOBODY = 65534
AS_NOBODY = "import os, kvps, torch\nimport kvps.store.create\n" + (
    f"os.setgid({NOBODY}); os.setuid({NOBODY})\n"
)
"""Another user from here on: what is imported later could not be read."""
TOO_LITTLE = """
import resource, kvps, torch
import kvps.store.create
torch.set_num_threads(1)  # the stacks of as many threads as a large machine has need room, too
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""
"""No room to map as much as the machine has."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
CAP_SYS_PTRACE = 19


def may_look_into_others() -> bool:
    """Whether this process may read what one of another user has mapped: root may not in most containers."""
    held = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return held is not None and bool(int(held[1], 16) >> CAP_SYS_PTRACE & 1)


def mapped(pid: int) -> Iterator[tuple[int, str]]:
    """The segments that a process has mapped, by number of the file, and how."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:kvps" in line:
            _, how, _, _, inode, *_ = line.split()
            yield int(inode), how


def segments(pid: int) -> dict[int, str]:
    """The segments that a process of ours has mapped: how, by number of the file."""
    found: dict[int, str] = {}
    for inode, how in mapped(pid):
        assert found.setdefault(inode, how) == how, "no segment is mapped in two ways"
    return found


def own(pid: int) -> int:
    """The segment that a process can write to."""
    (inode,) = [inode for inode, how in segments(pid).items() if how == "rw-s"]
    return inode


def let_go(cluster: Cluster, *workers: Process) -> None:
    """Let the workers end, and with them the job."""
    (cluster.processes.folder / "go").touch()
    assert [worker.wait() for worker in workers] == [0] * len(workers), workers
    assert cluster.process.wait() == 0


def warnings(*processes: Process) -> list[str]:
    return [line for process in processes for line in process.err.splitlines() if FRAMES in line]


def test_processes_of_one_host_map_each_other(processes: Processes) -> None:
    cluster = processes.scheduler(2, 2)
    servers = [cluster.server(), cluster.server()]
    script = processes.script(ROUNDS)
    workers = [cluster.plain(script), cluster.plain(script)]
    for worker in workers:
        worker.expect(r"sum \[7.0\]")
    mine = {process.pid: own(process.pid) for process in (*servers, *workers)}
    assert len(set(mine.values())) == 4
    for ones, others in ((servers, workers), (workers, servers)):
        for worker in ones:
            expected = {mine[worker.pid]: "rw-s", **{mine[other.pid]: "r--s" for other in others}}
            until(lambda pid=worker.pid, these=expected: segments(pid) == these, f"mappings {expected}")
    assert warnings(*servers, *workers) == []
    let_go(cluster, *workers)
    assert [server.wait() for server in servers] == [0, 0]


@pytest.mark.spec("R84")
def test_no_payload_travels_between_those_who_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a warm cluster; the first values may go before all have agreed."""
    travelled: Counter[str] = Counter()
    encode = wire.encode

    def note(packet: Packet, *, checked: bool) -> list[bytes | memoryview]:
        kind = type(packet.message).__name__
        travelled[kind] += sum(frame.nbytes for frame in packet.payload)
        travelled[f"{kind} lent"] += len(packet.loans)
        return encode(packet, checked=checked)

    def work(rank: int) -> None:
        kv = kvps.create("dist_sync")
        kv.init(["a", "b"], [torch.zeros(COUNT), torch.zeros(10_000)])
        values = [torch.ones(COUNT), torch.ones(10_000)]
        for turn in range(6):
            if turn == 2:
                kv.barrier()
                travelled.clear()
                kv.barrier()
            (out, _) = kv.pushpull(["a", "b"], values)
            assert out.eq(2).all()

    monkeypatch.setattr(wire, "encode", note)
    with kvps.LocalCluster(2, 2) as cluster:
        cluster.run(work)
    assert travelled["Push lent"] >= 4 * 2
    assert travelled["Pulled lent"] >= 4 * 2
    assert travelled["Push"] + travelled["Pulled"] < SHARE_MIN_BYTES


@pytest.mark.spec("R90")
def test_where_one_end_speaks_tcp_only_nobody_tries_to_share(processes: Processes) -> None:
    cluster = processes.scheduler(2, 1)
    server = cluster.server(KVPS_TRANSPORT="tcp")
    script = processes.script(ROUNDS)
    workers = [cluster.plain(script), cluster.plain(script, KVPS_TRANSPORT="tcp")]
    for worker in workers:
        worker.expect(r"sum \[7.0\]")
    assert list(segments(workers[0].pid).values()) == ["rw-s"], "its own, which nobody reads"
    assert segments(server.pid) == segments(workers[1].pid) == {}
    let_go(cluster, *workers)
    assert server.wait() == 0
    assert warnings(server, *workers) == []


def test_a_transport_that_is_none(processes: Processes) -> None:
    server = processes.kvps("server", KVPS_TRANSPORT="pigeon")
    assert server.wait() == 78
    assert "KVPS_TRANSPORT='pigeon': use one of auto, shm, tcp" in server.err
    cluster = processes.scheduler(1, 1)
    worker = cluster.plain(processes.script(ROUNDS), KVPS_TRANSPORT="pigeon")
    assert worker.wait() == 1
    assert "ConfigError: KVPS_TRANSPORT='pigeon'" in worker.err
    cluster.process.signal(signal.SIGKILL)


# --- where it cannot be ------------------------------------------------------------------------------


@needs_root
@pytest.mark.skipif(not may_look_into_others(), reason="CAP_SYS_PTRACE is not held")
@pytest.mark.spec("R79", "R90")
def test_another_user_gets_frames_and_one_warning(processes: Processes) -> None:
    processes.folder.chmod(0o755)  # it has to see that it may go
    cluster = processes.scheduler(2, 1)
    server = cluster.server()
    workers = [
        cluster.plain(processes.script(ROUNDS, "own.py")),
        cluster.plain(processes.script(AS_NOBODY + ROUNDS, "other.py")),
    ]
    for worker in workers:
        worker.expect(r"sum \[7.0\]")
    until(lambda: own(server.pid) in segments(workers[0].pid), "mapping by the worker")
    both = {own(server.pid), own(workers[0].pid)}
    until(lambda: set(segments(server.pid)) == both, "mapping by the server")
    assert set(segments(workers[1].pid)) == {own(workers[1].pid)}
    let_go(cluster, *workers)
    assert server.wait() == 0
    (at_server,) = warnings(server)
    assert f"its memory is user {NOBODY}'s, not user 0's" in at_server
    (at_worker,) = warnings(workers[1])
    assert "server 0 cannot read our memory" in at_worker
    assert warnings(workers[0]) == []


@needs_root
@pytest.mark.spec("R90")
@pytest.mark.parametrize("insists", ["server", pytest.param("worker", marks=pytest.mark.thorough)])
def test_a_worker_that_insists_on_another_users_memory_ends(processes: Processes, insists: str) -> None:
    cluster = processes.scheduler(1, 1)
    server = cluster.server(KVPS_TRANSPORT="shm" if insists == "server" else "auto")
    script = processes.script(AS_NOBODY + ROUNDS)
    worker = cluster.plain(script, KVPS_TRANSPORT="shm" if insists == "worker" else "auto")
    if insists == "server":  # anybody may come to it: it says so, and serves on
        worker.expect(r"sum \[3.0\]")
        server.expect("values travel in frames, not in shared memory")
    else:
        assert worker.wait() == 1, worker
        says = r"KVPS_TRANSPORT=shm, but memory cannot be shared: .*one host as one user"
        assert re.search(says, worker.err)
    for left in (cluster.process, server, worker):
        left.signal(signal.SIGKILL)


@pytest.mark.spec("R90")
def test_too_little_address_space_is_warned_of(processes: Processes) -> None:
    cluster = processes.scheduler(1, 1)
    server = cluster.server()
    worker = cluster.plain(processes.script(TOO_LITTLE + ROUNDS))
    worker.expect(r"sum \[3.0\]")
    assert segments(worker.pid) == {}
    let_go(cluster, worker)
    assert server.wait() == 0
    (line,) = warnings(server, worker)
    assert "cannot create a segment of" in line


@pytest.mark.spec("R90")
def test_too_little_address_space_ends_who_insists(processes: Processes) -> None:
    cluster = processes.scheduler(1, 1)
    worker = cluster.plain(processes.script(TOO_LITTLE + ROUNDS), KVPS_TRANSPORT="shm")
    assert worker.wait() == 1
    assert "ConfigError: KVPS_TRANSPORT=shm, but memory cannot be shared here" in worker.err
    cluster.process.signal(signal.SIGKILL)


# --- kills ------------------------------------------------------------------------------------------


@pytest.mark.spec("R78", "R89")
def test_a_kill_leaves_no_memory_behind(processes: Processes) -> None:
    cluster = processes.scheduler(2, 1)
    server = cluster.server()
    script = processes.script(ROUNDS)
    workers = [cluster.plain(script), cluster.plain(script)]
    for worker in workers:
        worker.expect(r"sum \[7.0\]")
    inodes = {own(process.pid) for process in (server, *workers)}
    first = own(workers[0].pid)
    workers[0].signal(signal.SIGKILL)
    until(lambda: first not in segments(server.pid), "end of the mapping", SWEEP_EVERY_S + 10)
    assert own(workers[1].pid) in segments(server.pid)
    for worker in (server, workers[1], cluster.process):
        worker.signal(signal.SIGKILL)
        worker.wait()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                left = {inode for inode, _ in mapped(int(folder.name))}
            except OSError:
                continue
            assert not left & inodes, folder.name
