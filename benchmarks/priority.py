"""Measures what priority buys on a limited link: a small urgent key behind a large one.

    sudo .venv/bin/python benchmarks/priority.py [RATE]        200mbit

One worker and two servers, each in a network namespace behind a link of RATE, push and pull 64 MiB
and, right after, 1 MiB that is urgent. Printed is how long the urgent key takes, at the same priority
and at a higher one, and how long both take together. Root, Linux.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.compare.networks.namespaces import Namespaces, demand_root
from kvps import config

SERVERS = 2
WORKER = """
import statistics, time, torch, kvps
kv = kvps.create("dist_sync")
bulk, urgent = torch.randn(16 << 20), torch.randn(1 << 18)
kv.init(["bulk", "urgent"], [torch.zeros_like(bulk), torch.zeros_like(urgent)])
for name, priority in (("the same", 0), ("a higher", 1)):
    firsts, wholes = [], []
    for _ in range(5):
        bulk.normal_(), urgent.normal_()
        begin = time.perf_counter()
        later = kv.pushpull("bulk", bulk, async_op=True)
        result = kv.pushpull("urgent", urgent, priority=priority)
        firsts.append(1e3 * (time.perf_counter() - begin))
        assert torch.equal(result, urgent) and torch.equal(later.wait(), bulk)
        wholes.append(1e3 * (time.perf_counter() - begin))
    first, whole = statistics.median(firsts), statistics.median(wholes)
    print(f"{name} priority: urgent after {first:.0f} ms, all after {whole:.0f} ms", flush=True)
"""


def main() -> None:
    """Make the hosts, run the cluster on them, and end both."""
    demand_root()
    rate = sys.argv[1] if len(sys.argv) > 1 else "200mbit"
    with Namespaces(1 + SERVERS, rate) as hosts:
        scheduler = f"tcp://{hosts.address(0)}:9091"
        place = {"KVPS_SCHEDULER": scheduler, "KVPS_TRANSPORT": "tcp", "OMP_NUM_THREADS": "1"}
        env = {**config.environment(place, {}), "PATH": os.environ["PATH"]}
        started = [
            _start(
                hosts,
                0,
                env,
                "-m",
                "kvps.cli.scheduler",
                "--workers",
                "1",
                "--servers",
                str(SERVERS),
                "--bind",
                scheduler,
                "--insecure",
            )
        ]
        for rank in range(SERVERS):
            bind = f"tcp://{hosts.address(1 + rank)}:0"
            server = ("-m", "kvps.cli.server", "--scheduler", scheduler, "--bind", bind)
            started.append(_start(hosts, 1 + rank, env, *server, "--insecure"))
        started.append(_start(hosts, 0, env, "-c", WORKER))
        codes = [process.wait() for process in reversed(started)]
        if any(codes):
            raise SystemExit(f"the processes ended with {codes}")


def _start(hosts: Namespaces, host: int, env: dict[str, str], *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(hosts.inside(host, [sys.executable, *words]), env=env)


if __name__ == "__main__":
    main()
