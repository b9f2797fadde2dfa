"""Network layouts, such as ``4x4`` and ``8@1x4``: the roles of each host, and the rate of a link.

``WxS`` gives every worker and every server a host of its own, ``W@HxS`` puts W workers on H hosts.
The scheduler has a host too; nothing large passes its link.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvps import config
from kvps.errors import ConfigError

HOSTS_MAX = 200
"""Addresses of one network, with room to spare."""
_LAYOUT = re.compile(r"(\d+)(?:@(\d+))?x(\d+)")


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts by number: the scheduler's is 0, then those of workers, then those of servers."""

    workers: int
    worker_hosts: int
    servers: int

    @property
    def count(self) -> int:
        """The number of hosts."""
        return 1 + self.worker_hosts + self.servers

    def of_worker(self, rank: int) -> int:
        """Return the host of a worker; ranks side by side share one."""
        return 1 + rank * self.worker_hosts // self.workers

    def of_server(self, rank: int) -> int:
        """Return the host of a server."""
        return 1 + self.worker_hosts + rank

    def holds(self, host: int) -> str:
        """Say who is on a host."""
        workers = [rank for rank in range(self.workers) if self.of_worker(rank) == host]
        if host == 0:
            return "scheduler"
        if not workers:
            return f"server {host - 1 - self.worker_hosts}"
        if len(workers) == 1:
            return f"worker {workers[0]}"
        return f"workers {workers[0]} to {workers[-1]}"


def layout_of(given: str) -> Hosts:
    """Return the layout that a text describes.

    Raises:
        ConfigError: if it describes none.
    """
    found = _LAYOUT.fullmatch(given)
    if found is None:
        raise ConfigError(
            f"--network={given!r}: write it as 4x4, 4 workers and 4 servers, each on its own host, "
            "or as 8@1x4, 8 workers on 1 host"
        )
    workers, servers = int(found[1]), int(found[3])
    hosts = Hosts(workers, int(found[2] or workers), servers)
    if workers < 1 or servers < 1 or not 1 <= hosts.worker_hosts <= workers:
        raise ConfigError(
            f"--network={given!r}: use 1 or more workers and servers, and 1 to {max(1, workers)} "
            "hosts for the workers"
        )
    if hosts.count > HOSTS_MAX:
        raise ConfigError(f"--network={given!r}: {hosts.count} hosts; use at most {HOSTS_MAX}")
    return hosts


def bytes_per_s(given: str) -> float:
    """Return the rate that a text describes, as tc reads it: ``400mbit`` is 50,000,000.

    Raises:
        ConfigError: if it describes none.
    """
    return config.as_rate("--rate", given)
