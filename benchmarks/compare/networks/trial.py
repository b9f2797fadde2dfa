"""One trial of one system on hosts with links of a set rate, with the traffic of each link.

The links' counters and the processor time of all processes are read twice, before the first
measured round and after the last, while all workers stand still and rank 0 waits for us (see
:mod:`kvps.tools.bench.rounds`). A cluster has keys of its own, in memory, unless the system is one without.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from benchmarks.compare.networks.layout import Hosts
from benchmarks.compare.networks.namespaces import Namespaces
from benchmarks.compare.networks.traffic import NetworkTrial, traffic_between
from kvps import config
from kvps.errors import KvpsError
from kvps.launchers.reaper import Reaper
from kvps.runtime.key_files import KeyMemory, generate
from kvps.tools.bench.figures import Case
from kvps.tools.bench.local import (
    GLOO_WORKER,
    KVPS_WORKER,
    THREADS,
    Group,
    gloo_environment,
    module,
    trial_of,
    worker_flags,
)
from kvps.tools.bench.systems import System

SCHEDULER_PORT = 9091
GLOO_PORT = 29500
LINK = {"GLOO_SOCKET_IFNAME": "eth0"}


class GatedGroup(Group):
    """The processes of a trial, of which rank 0 waits twice until the traffic has been read."""

    _gate: tuple[int, ...] = ()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for fd in self._gate:
            os.close(fd)

    def gate(self, while_waiting: Callable[[], None]) -> tuple[int, int]:
        """Return two pipes for a process; ``while_waiting`` is called while it waits between them."""
        asked, ask = os.pipe()
        passed, let_pass = os.pipe()
        self._gate = (asked, ask, passed, let_pass)

        def let() -> None:
            os.read(asked, 1)
            while_waiting()
            os.write(let_pass, b".")

        self._selector.register(asked, selectors.EVENT_READ, let)
        return passed, ask

    def cpu_s(self) -> float:
        """Return the processor time that the processes have taken so far, in seconds.

        Raises:
            OSError: if one has ended.
        """
        ticks = 0
        for child in self._children:
            fields = Path(f"/proc/{child.popen.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # utime and stime, of all threads
        return ticks / os.sysconf("SC_CLK_TCK")


def measure(
    system: System, case: Case, rounds: int, hosts: Hosts, namespaces: Namespaces, reaper: Reaper
) -> NetworkTrial:
    """Run a system once.

    Raises:
        KvpsError: if it fails.
    """
    counted: list[tuple[list[tuple[int, int]], float]] = []
    with GatedGroup(reaper) as group, closing(KeyMemory(generate())) as keys:
        gate = group.gate(lambda: counted.append((namespaces.counters(), group.cpu_s())))
        doors = {} if "KVPS_INSECURE" in system.env else {"KVPS_KEYS": keys.path}
        if system.kind == "kvps":
            _start_cluster(group, case, hosts, namespaces, {**system.env, **doors})
        for rank in range(case.workers):
            words = worker_flags(system, case, rounds)
            if rank == 0:
                words += map(str, gate)
            name = KVPS_WORKER if system.kind == "kvps" else GLOO_WORKER
            group.start(
                f"{system.name} worker {rank}",
                namespaces.inside(hosts.of_worker(rank), [*module(name), *words]),
                {**_environment(system, rank, case, hosts, namespaces), **doors},
                is_measured=True,
                pass_fds=gate if rank == 0 else (),
            )
        trial = trial_of(group.wait(), case.workers, system.name)
    if len(counted) != 2:
        raise KvpsError(f"{system.name}: the links were read {len(counted)} times, not 2")
    (links_before, cpu_before), (links_after, cpu_after) = counted
    traffic = traffic_between(links_before, links_after, rounds)
    return NetworkTrial(trial.rounds_ms, traffic, (cpu_after - cpu_before) / rounds)


def _start_cluster(
    group: Group, case: Case, hosts: Hosts, namespaces: Namespaces, doors: Mapping[str, str]
) -> None:
    env = config.environment({**THREADS, **doors}, {})
    scheduler = _scheduler(namespaces)
    sizes = ["--workers", str(case.workers), "--servers", str(case.servers)]
    argv = [*module("kvps.cli.scheduler"), *sizes, "--bind", scheduler]
    group.start("kvps-scheduler", namespaces.inside(0, argv), env)
    for rank in range(case.servers):
        host = hosts.of_server(rank)
        place = ["--scheduler", scheduler, "--rank", str(rank)]
        bind = ["--bind", f"tcp://{namespaces.address(host)}:0"]
        argv = [*module("kvps.cli.server"), *place, *bind]
        group.start(f"kvps-server {rank}", namespaces.inside(host, argv), env)


def _environment(
    system: System, rank: int, case: Case, hosts: Hosts, namespaces: Namespaces
) -> dict[str, str]:
    """Return the environment of a worker."""
    if system.kind == "gloo":
        master = namespaces.address(hosts.of_worker(0))
        return {**gloo_environment(rank, case.workers, master, GLOO_PORT), **LINK}
    place = {"KVPS_SCHEDULER": _scheduler(namespaces), "KVPS_RANK": str(rank)}
    return config.environment({**THREADS, **system.env, **place}, {})


def _scheduler(namespaces: Namespaces) -> str:
    return f"tcp://{namespaces.address(0)}:{SCHEDULER_PORT}"
