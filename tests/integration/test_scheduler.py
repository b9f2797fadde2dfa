"""kvps-scheduler as a process: its port, its state on disk, and how it ends."""

import signal
import sys
from pathlib import Path

import pytest

from tests.integration.processes import ENDPOINT, SUM, Cluster, Processes, free_port


def test_a_busy_port_is_named(processes: Processes) -> None:
    cluster = processes.scheduler(1, 0)
    second = processes.kvps("scheduler", "--workers", 1, "--servers", 0, "--bind", cluster.endpoint)
    assert second.wait() == 78
    assert cluster.endpoint in second.err
    assert "--bind" in second.err
    cluster.process.signal(signal.SIGTERM)
    assert cluster.process.wait() == 0


def test_an_address_that_others_reach_is_refused(processes: Processes) -> None:
    flags = ("--workers", 1, "--servers", 0, "--bind", f"tcp://0.0.0.0:{free_port()}")
    refused = processes.kvps("scheduler", *flags)
    assert refused.wait() == 78
    assert "--insecure" in refused.err
    for more, env in ((("--insecure",), {}), ((), {"KVPS_INSECURE": "1"})):
        allowed = processes.kvps("scheduler", *flags, *more, "--log-level", "info", **env)
        allowed.expect("at tcp://0.0.0.0")
        allowed.signal(signal.SIGINT)
        assert allowed.wait() == 0


def test_localhost_is_loopback(processes: Processes) -> None:
    cluster = processes.scheduler(1, 0, "--bind", "tcp://localhost:0", "--insecure")
    assert cluster.endpoint.startswith("tcp://127.0.0.1:")
    cluster.process.signal(signal.SIGINT)
    assert cluster.process.wait() == 0


def test_settings_come_from_variables(processes: Processes) -> None:
    port = free_port()
    process = processes.kvps(
        "scheduler",
        KVPS_WORKERS="3",
        KVPS_SERVERS="2",
        KVPS_BIND=f"tcp://127.0.0.1:{port}",
        KVPS_LOG_LEVEL="INFO",
    )
    process.expect(f"3 workers and 2 servers at tcp://127.0.0.1:{port}")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_scheduler_exits_with_0_if_every_worker_left(processes: Processes) -> None:
    cluster = processes.scheduler(2, 1)
    script = processes.script(SUM)
    server = cluster.server()
    worker = cluster.worker(sys.executable, script)
    processes.may_fork = False  # kvps-launch starts all others anew in test_launch.py: test_all_of_it_in_one
    workers = [worker, cluster.plain(script)]
    assert [item.wait(90.0) for item in (*workers, server, cluster.process)] == [0, 0, 0, 0]
    assert all("sum [3.0, 3.0, 3.0, 3.0]" in item.out for item in workers)
    assert server.err == ""
    assert all(item.err == "" for item in workers)


LAST = """
import os, time
from pathlib import Path
import kvps, torch
kv = kvps.create("dist_sync", on_worker_lost="shrink", timeout=60)
kv.init("w", torch.zeros(4))
kv.pushpull("w", torch.ones(4))
if kv.rank:
    while not Path("left").exists(): time.sleep(0.01)
    os._exit(3)
kvps.shutdown()
Path("left").touch()
"""
STOPPED = """
kv.barrier()
print("there")
try:
    kv.pull("w", min_version=99)
except kvps.SchedulerLost:
    kv.pull("w")
"""
HASTY = """
import functools, sys
import kvps.cli.scheduler as command
command.run_scheduler = functools.partial(command.run_scheduler, replace_max_s=float(sys.argv.pop(1)))
sys.exit(command.main())
"""


@pytest.mark.timeout(180)
@pytest.mark.spec("R210")
@pytest.mark.parametrize("limit_s", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_lost_worker_without_a_waiter_ends_the_job_after_the_limit(
    processes: Processes, limit_s: int
) -> None:
    flags = ("--workers", 2, "--servers", 1, "--bind", "tcp://127.0.0.1:0", "--log-level", "info")
    scheduler = processes.python("-c", HASTY, limit_s, *flags)
    cluster = Cluster(processes, scheduler, scheduler.expect(ENDPOINT.pattern).group())
    server = cluster.server()
    script = processes.script(LAST)
    workers = [cluster.plain(script, KVPS_RANK=str(rank)) for rank in range(2)]
    assert [worker.wait(90.0) for worker in workers] == [0, 3]
    assert [item.wait(limit_s + 30.0) for item in (scheduler, server)] == [1, 1]
    assert (
        scheduler.err.count(f"waiting {limit_s} s for a replacement, then the job ends: worker 1 is lost")
        == 1
    )


def test_members_are_told_when_it_is_stopped(processes: Processes) -> None:
    cluster = processes.scheduler(1, 1)
    server = cluster.server()
    script = processes.script(SUM + STOPPED)
    worker = cluster.worker(sys.executable, script)
    worker.expect("there")
    cluster.process.signal(signal.SIGTERM)
    assert cluster.process.wait() == 0
    assert server.wait() == 75
    assert worker.wait() == 1
    assert worker.err.count("SchedulerLost: the job is over: the scheduler was asked to stop") == 2


def test_keep_alive_runs_one_job_after_another(processes: Processes) -> None:
    cluster = processes.scheduler(2, 1, "--keep-alive")
    server = cluster.server()
    script = processes.script(SUM)
    for _ in range(2):
        workers = [cluster.worker(sys.executable, script), cluster.plain(script)]
        assert [worker.wait() for worker in workers] == [0, 0]
        assert all("sum [3.0, 3.0, 3.0, 3.0]" in worker.out for worker in workers)
    assert server.popen.poll() is None
    assert cluster.process.popen.poll() is None
    cluster.process.signal(signal.SIGTERM)
    assert cluster.process.wait() == 0
    assert server.wait() == 75


def test_a_restart_before_the_job_has_formed(processes: Processes, tmp_path: Path) -> None:
    state = tmp_path / "state"
    cluster = processes.scheduler(1, 1, "--state", state)
    server = cluster.server("--log-level", "debug")
    server.expect("joined as server 0")
    cluster.process.signal(signal.SIGKILL)
    cluster.process.wait()
    again = processes.kvps(
        "scheduler", "--workers", 1, "--servers", 1, "--bind", cluster.endpoint, "--state", state
    )
    worker = cluster.worker(sys.executable, processes.script(SUM))
    assert [item.wait() for item in (worker, server, again)] == [0, 0, 0]
