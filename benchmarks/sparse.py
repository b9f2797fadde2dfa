"""What a round of some rows of a table costs, beside a round of all of it.

    python benchmarks/sparse.py [--rows 1000000] [--width 64] [--percent 1] [--optimizer sgd]
    sudo python benchmarks/sparse.py --rate 1gbit

Workers push random values: first of the whole table, which they pull again, then of random rows, other
ones in each round and on each worker, of which they pull those that they need next. Printed are
medians of rank 0, and how much of the dense round the sparse one takes. With a rate, each process has a
network namespace of its own behind a link of that rate (root, Linux); else all share this machine's memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable


def main() -> None:
    """Start a cluster of this machine, or be one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--width", type=int, default=64, help="elements of a row")
    parser.add_argument("--percent", type=float, default=1.0, help="of the rows that are pushed")
    parser.add_argument("--optimizer", default="sgd", help="on the servers; '' for the sum alone")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--rate", help="of the link of each process, such as 1gbit")
    parser.add_argument("--as-worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_worker:
        work(given)
        return
    if given.rate:
        apart(given)
        return
    subprocess.run(
        [
            *(sys.executable, "-m", "kvps.cli.launch"),
            *("-n", str(given.workers), "-s", str(given.servers), "--"),
            *(sys.executable, __file__, "--as-worker", *sys.argv[1:]),
        ],
        check=True,
    )


def apart(given: argparse.Namespace) -> None:
    """Give each process a host of its own, and run the cluster there."""
    from kvps import config
    from kvps.bench.namespaces import Namespaces, demand_root

    demand_root()
    with Namespaces(given.workers + given.servers, given.rate) as hosts:
        scheduler = f"tcp://{hosts.address(0)}:9091"
        place = {"KVPS_SCHEDULER": scheduler, "OMP_NUM_THREADS": "1"}
        env = {**config.environment(place, {}), "PATH": os.environ["PATH"]}

        def start(host: int, *words: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen(hosts.inside(host, [sys.executable, *words]), env=env)

        sizes = ("--workers", str(given.workers), "--servers", str(given.servers))
        cli = ("-m", "kvps.cli.scheduler", *sizes, "--bind", scheduler, "--insecure")
        started = [start(0, *cli)]
        for server in range(given.servers):
            host = given.workers + server
            bind = f"tcp://{hosts.address(host)}:0"
            cli = ("-m", "kvps.cli.server", "--scheduler", scheduler, "--bind", bind, "--insecure")
            started.append(start(host, *cli))
        words = (__file__, "--as-worker", *sys.argv[1:])
        started += [start(worker, *words) for worker in range(given.workers)]
        codes = [one.wait() for one in started]
    if any(codes):
        raise SystemExit(f"the processes ended with {codes}")


def work(given: argparse.Namespace) -> None:
    """Measure both kinds of round; rank 0 prints what they took."""
    import torch

    import kvps

    kv = kvps.create("dist_sync", timeout=600)
    if given.optimizer:
        kv.set_optimizer(given.optimizer, lr=1e-3)
    torch.manual_seed(kv.rank)
    count = max(1, round(given.rows * given.percent / 100))
    value = torch.randn(given.rows, given.width)
    kv.init("table", value)
    out = torch.empty_like(value)
    batches = [torch.randperm(given.rows)[:count] for _ in range(given.rounds + 4)]
    rows = torch.randn(count, given.width)

    def dense(number: int) -> None:
        kv.pushpull("table", value, out=out)

    def sparse(number: int) -> None:
        kv.push("table", (batches[number], rows))
        kv.row_sparse_pull("table", row_ids=batches[number + 1])

    def median_ms(make: Callable[[int], None], rounds: int) -> float:
        times = []
        for number in range(rounds + 3):
            begin = time.perf_counter()
            make(number)
            times.append(time.perf_counter() - begin)
        return 1e3 * statistics.median(times[3:])

    whole_ms = median_ms(dense, max(3, given.rounds // 4))
    kv.barrier()
    rows_ms = median_ms(sparse, given.rounds)
    if kv.rank == 0:
        print(
            f"{given.rows} x {given.width}, {given.optimizer or 'no optimizer'}: all {whole_ms:.1f} ms, "
            f"{given.percent:g} % of the rows {rows_ms:.2f} ms, {100 * rows_ms / whole_ms:.1f} %"
        )


if __name__ == "__main__":
    main()
