"""Workers that come to a job while it trains, and leave it, as processes: each push counts once, in whole rounds."""

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

import kvps
from tests.integration.added_worker import DIGITS
from tests.integration.processes import Cluster, Process, Processes, until

WORKER = Path(__file__).with_name("added_worker.py")
NAMES = ("first", "second", "third", "fourth")


class Job:
    """A job of two workers, to which others may be added; the first trains until it is told to end."""

    def __init__(self, processes: Processes, policy: str = "wait", workers: str = "2:3") -> None:
        self.processes, self.policy = processes, policy
        self.cluster: Cluster = processes.scheduler(workers, 2, "--state", processes.folder / "state")
        for _ in range(2):
            self.cluster.server()
        self.first, self.second = self.worker("first"), self.worker("second")
        self.until("first-trains")

    def worker(self, name: str, steps: int = 0) -> Process:
        return self.cluster.worker(sys.executable, WORKER, name, steps, self.policy, self.processes.folder)

    def until(self, name: str) -> None:
        until(lambda: (self.processes.folder / name).exists(), name)

    def let_second_leave(self) -> None:
        (self.processes.folder / "second-leaves").touch()
        assert self.second.wait() == 0, self.second

    def end(self) -> None:
        (self.processes.folder / "last").touch()
        assert self.first.wait() == 0, self.first
        assert self.cluster.process.wait() == 0, self.cluster.process
        self.processes.check_nothing_left()


def told(worker: Process) -> dict[str, int]:
    """Return what a worker has printed at its end."""
    line = (
        r"is rank (?P<rank>\d+) of (?P<of>\d+), began at (?P<begun>\d+), made (?P<made>\d+), saw (?P<saw>\d+)"
    )
    found = re.search(line, worker.out)
    assert found is not None, worker
    return {name: int(text) for name, text in found.groupdict().items()}


def counts(value: int) -> dict[str, int]:
    """Return how many pushes of each worker a value has."""
    return {name: value // DIGITS**at % DIGITS for at, name in enumerate(NAMES)}


def test_workers_come_and_leave_and_all_their_pushes_count(processes: Processes) -> None:
    job = Job(processes)
    third = job.worker("third", 200)
    assert third.wait() == 0, third
    job.let_second_leave()
    fourth = job.worker("fourth", 50)
    assert fourth.wait() == 0, fourth
    job.end()
    ranks = {name: told(script)["rank"] for name, script in (("first", job.first), ("second", job.second))}
    assert sorted(ranks.values()) == [0, 1], "whichever came first"
    assert (told(third)["rank"], told(fourth)["rank"]) == (2, ranks["second"])
    assert 0 < told(third)["begun"] < told(fourth)["begun"]
    last = told(job.first)
    made = {"first": last["made"], "second": told(job.second)["made"], "third": 200, "fourth": 50}
    assert counts(last["saw"]) == made
    assert last["of"] == 1


def test_worker_too_many_is_refused(processes: Processes) -> None:
    job = Job(processes)
    third = job.worker("third")
    job.until("third-trains")
    fourth = job.worker("fourth")
    assert fourth.wait() == 78, fourth
    assert "the job already has 3 workers (--workers 2:3)" in fourth.err
    job.let_second_leave()
    job.end()
    assert third.wait() == 0, third


@pytest.mark.parametrize("policy", ["shrink", "wait", "fail"])
def test_an_added_worker_that_is_killed_is_lost_like_any_other(processes: Processes, policy: str) -> None:
    job = Job(processes, policy)
    (processes.folder / "third-dies").touch()
    third = job.worker("third")
    assert third.wait() == 137, third
    if policy == "fail":
        assert job.first.wait() == 1, job.first
        assert "WorkerLost" in job.first.err
        assert job.second.wait() == 1, job.second
        assert job.cluster.process.wait(60.0) == 1, job.cluster.process
        return
    fourth = job.worker("fourth", 50)
    assert fourth.wait() == 0, fourth
    assert told(fourth)["rank"] == 2
    job.let_second_leave()
    job.end()
    last = told(job.first)
    made = {"first": last["made"], "second": told(job.second)["made"], "third": 3, "fourth": 50}
    assert counts(last["saw"]) == made


def test_launched_job_says_how_to_add_a_worker(processes: Processes) -> None:
    command = (sys.executable, WORKER, "first", 0, "wait", processes.folder)
    job = processes.kvps("launch", "-n", "1:2", "-s", 1, "--log-level", "info", "--", *command)
    line = job.expect(r"to add a worker, of 2 at most: kvps-worker (.*) -- (.*)")
    until(lambda: (processes.folder / "first-trains").exists(), "training")
    words = [item.replace("first", "second") for item in line.group(2).split()]
    words[words.index("second") + 1] = "100"
    second = processes.kvps("worker", *line.group(1).split(), "--", *words)
    assert second.wait() == 0, second
    (processes.folder / "last").touch()
    assert job.wait() == 0, job
    assert counts(told(job)["saw"]) == {"first": told(job)["made"], "second": 100, "third": 0, "fourth": 0}


@pytest.mark.parametrize(
    ("store", "options"), [("allreduce", {}), ("dist_sync", {"on_server_lost": "rebuild"})]
)
def test_stores_that_need_the_first_workers_say_so(store: str, options: dict[str, str]) -> None:
    with (
        kvps.LocalCluster(workers=1, servers=1, most_workers=2) as cluster,
        pytest.raises(kvps.ConfigError, match="the workers of this job come and go"),
    ):
        cluster.run(lambda _: kvps.create(store, **options))


def test_script_hears_of_a_worker_and_its_sampler_divides_by_those_that_are_here() -> None:
    heard: list[int] = []
    came, may_leave = threading.Event(), threading.Event()
    data = TensorDataset(torch.arange(12))

    def shares(sampler: DistributedSampler[Any], epoch: int) -> list[int]:
        sampler.set_epoch(epoch)
        return list(sampler)

    def come(cluster: kvps.LocalCluster) -> None:
        kv = kvps.create("dist_sync")
        assert (kv.rank, kv.num_workers) == (1, 2)
        assert len(kvps.data_sampler(data, kv, shuffle=False)) == 6
        came.set()
        may_leave.wait(30.0)
        cluster.leave()

    def work(cluster: kvps.LocalCluster) -> list[list[int]]:
        kv = kvps.create("dist_sync")
        kv.on_resize(heard.append)
        kv.on_resize(lambda workers: workers / 0)  # it is logged, and nothing ends
        sampler = kvps.data_sampler(data, kv, shuffle=False)
        read = [shares(sampler, 0)]
        other = threading.Thread(target=come, args=(cluster,))
        other.start()
        came.wait(30.0)
        until(lambda: heard == [2], "callback")
        read.append(shares(sampler, 1))
        may_leave.set()
        other.join()
        until(lambda: heard == [2, 1], "its end")
        return [*read, shares(sampler, 2)]

    with kvps.LocalCluster(workers=1, servers=1, most_workers=2) as cluster:
        (read,) = cluster.run(lambda _: work(cluster))
    assert read == [[*range(12)], [*range(0, 12, 2)], [*range(12)]]
