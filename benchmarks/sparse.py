"""What a round of some rows of a table costs, beside a round of all of it.

    python benchmarks/sparse.py [--rows 1000000] [--width 64] [--percent 1] [--optimizer sgd]
    sudo python benchmarks/sparse.py --rate 1gbit
    python benchmarks/sparse.py --floor

Workers push random values: first of the whole table, which they pull again, then of random rows, other
ones in each round and on each worker, of which they pull those that they need next; then they push such
rows again, and bring a copy of the whole table up to date. Printed are medians of rank 0, and how much of
the dense round the others take. With a rate, each process has a
network namespace of its own behind a link of that rate (root, Linux); else all share this machine's memory.

``--floor`` sends nothing. It moves the rows of such a round from place to place as often as they must be,
by the fastest calls that torch and numpy have for that: no store that runs on them takes less.
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
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table")
    parser.add_argument("--width", type=int, default=64, help="elements of a row")
    parser.add_argument("--percent", type=float, default=1.0, help="percentage of the rows to push")
    parser.add_argument("--optimizer", default="sgd", help="optimizer of the servers; '' for the sum alone")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--rate", help="rate of the link of each process, such as 1gbit")
    parser.add_argument("--floor", action="store_true", help="measure the time of memory access alone")
    parser.add_argument("--as-worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_worker:
        work(given)
        return
    if given.floor:
        floor(given)
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
    from benchmarks.compare.networks.namespaces import Namespaces, demand_root
    from kvps import config

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
        codes = [process.wait() for process in started]
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

    held = None

    def refresh(number: int) -> None:
        nonlocal held
        kv.push("table", (batches[number], rows))
        held = kv.refresh("table", out, held)

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
    kv.barrier()
    copy_ms = median_ms(refresh, given.rounds)
    if kv.rank == 0:
        print(
            f"{given.rows} x {given.width}, {given.optimizer or 'no optimizer'}: all {whole_ms:.1f} ms; "
            f"{given.percent:g} % of the rows pushed and as many pulled {rows_ms:.2f} ms, "
            f"{100 * rows_ms / whole_ms:.1f} %; pushed and a copy refreshed {copy_ms:.2f} ms, "
            f"{100 * copy_ms / whole_ms:.1f} %"
        )


def floor(given: argparse.Namespace) -> None:
    """Print what moving the rows takes, on one thread, and what is left of it on all cores."""
    import numpy as np
    import torch

    from kvps.core.row_gradients import numbered

    def in_order(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.from_numpy(np.argsort(ids.numpy()))
        return ids.index_select(0, order), order

    torch.set_num_threads(1)
    count = max(1, round(given.rows * given.percent / 100))
    table = torch.randn(given.rows, given.width)
    pushed = [torch.randn(count, given.width) for _ in range(given.workers)]
    shared = [torch.empty(count, given.width) for _ in range(given.workers)]
    times = []
    for _ in range(given.rounds + 3):
        batches = [torch.randperm(given.rows)[:count] for _ in range(2 * given.workers)]
        begin = time.perf_counter()
        ordered = [in_order(batch) for batch in batches]
        for (_, places), rows, out in zip(ordered, pushed, shared, strict=False):
            torch.index_select(rows, 0, places, out=out)  # to where servers read them
        ids, at = numbered(torch.cat([ids for ids, _ in ordered[: given.workers]]), are_runs=True)
        total = torch.zeros(len(ids), given.width)
        for rows, some in zip(shared, at.split(count), strict=True):
            total.index_add_(0, some, rows)
        weights = table.index_select(0, ids).add_(total, alpha=-1e-3)
        table.numpy()[ids.numpy()] = weights.numpy()
        for ids, places in ordered[given.workers :]:
            answer = table.index_select(0, ids)  # to where workers read them
            torch.empty_like(answer).numpy()[places.numpy()] = answer.numpy()
        times.append(time.perf_counter() - begin)
    alone_ms = 1e3 * statistics.median(times[3:])
    cores = os.cpu_count() or 1
    print(
        f"{given.rows} x {given.width}, {given.percent:g} % of the rows: {alone_ms:.2f} ms of one core for "
        f"{given.workers} workers, {alone_ms / cores:.2f} ms on {cores}"
    )


if __name__ == "__main__":
    main()
