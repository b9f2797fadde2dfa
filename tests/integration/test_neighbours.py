"""Workers of one host, real processes, and links between hosts that are network namespaces."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from benchmarks.compare.networks.namespaces import Namespaces
from tests.integration.processes import BIN, Process, Processes, until

WORKERS = 3
SIZES = {"w": 700_000, "x": 30_000, "b": 5}
MODEL_BYTES = 4 * sum(SIZES.values())
ROUNDS = 8
SCRIPT = f"""
import os, signal, sys, time
import torch, kvps

SIZES, ROUNDS = {SIZES}, {ROUNDS}
names = list(SIZES)


def gradients(rank, step):
    dice = torch.Generator().manual_seed(100 * step + rank)
    # whole numbers: their sums are exact in any order
    return [torch.randint(-999, 999, (one,), generator=dice).float() for one in SIZES.values()]


def stand(name):
    open(name, "w").close()


def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.001)


def check(step, pulled, ranks):
    expected = [sum(ones) for ones in zip(*(gradients(rank, step) for rank in ranks))]
    for name, one, other in zip(names, pulled, expected):
        assert torch.equal(one, other), (step, name)


kv = kvps.create("dist_sync", timeout=25, on_worker_lost=os.environ.get("POLICY", "wait"))
kv.init(names, [torch.zeros(size) for size in SIZES.values()])
everyone = range(kv.num_workers)
"""
MEASURED = (
    SCRIPT
    + """
kv.pushpull(names, gradients(kv.rank, 0))
kv.barrier()
stand(f"warm-{kv.rank}")
wait_for("measure")
for step in range(1, ROUNDS + 1):
    if step % 2:
        check(step, kv.pushpull(names, gradients(kv.rank, step)), everyone)
    else:
        kv.push(names, gradients(kv.rank, step))
        check(step, kv.pull(names), everyone)
kv.barrier()
stand(f"done-{kv.rank}")
wait_for("end")
"""
)
KILLED = (
    SCRIPT
    + """
for step in range(ROUNDS):
    if step == ROUNDS // 2 and kv.rank == int(os.environ["VICTIM"]):
        stand("between rounds")
        os.kill(os.getpid(), signal.SIGKILL)
    pulled = kv.pushpull(names, gradients(kv.rank, step))
    there = everyone if step < ROUNDS // 2 else [
        rank for rank in everyone if rank != int(os.environ["VICTIM"])
    ]
    check(step, pulled, there)
print("all rounds were right", flush=True)
"""
)


@pytest.fixture
def hosts(has_namespaces: None) -> Iterator[Namespaces]:
    """One host for the scheduler and all workers, and two for servers."""
    with Namespaces(3, "1gbit") as namespaces:
        yield namespaces


@dataclass
class Job:
    """A scheduler and workers on host 0, servers on hosts 1 and 2."""

    processes: Processes
    hosts: Namespaces
    scheduler: Process | None = None

    def run(self, script: str, **env: str) -> list[Process]:
        """Start everything; return the workers, by rank."""
        train = self.processes.script(script)
        place = f"tcp://{self.hosts.address(0)}:9091"
        self.scheduler = self.start(
            0, "kvps-scheduler", "--workers", WORKERS, "--servers", 2, "--bind", place, "--insecure"
        )
        for host in (1, 2):
            flags = ("--scheduler", place, "--insecure", "--bind", f"tcp://{self.hosts.address(host)}:0")
            self.start(host, "kvps-server", *flags)
        return [
            self.start(0, train, KVPS_SCHEDULER=place, KVPS_RANK=str(rank), OMP_NUM_THREADS="1", **env)
            for rank in range(WORKERS)
        ]

    def end(self) -> None:
        """End the job, which still waits for a replacement."""
        assert self.scheduler is not None
        self.scheduler.signal(signal.SIGTERM)
        self.scheduler.wait()

    def start(self, host: int, program: object, *flags: object, **env: str) -> Process:
        """Start a command of kvps, or a script, on a host."""
        argv = (self.processes.interpreter, BIN / str(program), *flags)
        words = self.hosts.inside(host, [str(argument) for argument in argv])
        return self.processes.start(f"host-{host}", *words, **env)


@pytest.fixture
def job(processes: Processes, hosts: Namespaces) -> Job:
    return Job(processes, hosts)


def test_the_model_crosses_the_link_of_a_host_once_each_way(job: Job) -> None:
    workers = job.run(MEASURED)
    folder = job.processes.folder

    def everyone(stands: str) -> bool:
        if any(worker.popen.poll() for worker in workers):
            raise AssertionError(f"a worker failed: {workers}")
        return all((folder / f"{stands}-{rank}").exists() for rank in range(WORKERS))

    until(lambda: everyone("warm"), "first round")
    before = job.hosts.counters()[0]
    (folder / "measure").touch()
    until(lambda: everyone("done"), "last round")
    after = job.hosts.counters()[0]
    (folder / "end").touch()
    assert [worker.wait() for worker in workers] == [0] * WORKERS, workers
    for way in (0, 1):
        per_round = (after[way] - before[way]) / ROUNDS
        assert MODEL_BYTES <= per_round <= 1.2 * MODEL_BYTES


def test_the_others_go_on_when_a_leader_is_killed(job: Job) -> None:
    """Each of the three leads some chunks of each server."""
    workers = job.run(KILLED, POLICY="shrink", VICTIM="1")
    assert [worker.wait() for worker in workers] == [0, -signal.SIGKILL, 0], workers
    for rank in (0, 2):
        assert "all rounds were right" in workers[rank].out
    job.end()
