"""How long init, push, pull, rows and a broadcast take on slow links, beside what the links allow.

    sudo python benchmarks/slow_links.py [--rates 0.5 1 8] [--workers 2] [--seconds 40]

The scheduler and a server share one host, each worker has another: network namespaces, each behind a link
of the given rate, both ways (root, Linux). All rates are measured at once, each in hosts of its own, as
such processes mostly wait.

The ideal is payload bytes * 8 / rate on the link that carries most of them: the server's. It brings in the
push of every worker, and takes out the pull of every worker; of a broadcast it brings in one value, and takes
it out to every worker but rank 0. What headers take of a link (5 % of packets of 1,500 octets) is in the
times and not in the ideal. ``bytes`` is what crossed the links of the workers, the way that counts, in parts
of the payload: far more than 1.05 is something that was sent twice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

ACTS = ("init", "push", "pull", "rows", "broadcast")
ROW = 64
"""Elements of a row of the table."""


def main() -> None:
    """Measure every rate in a process of its own; or one rate; or be a worker of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 1.0, 8.0], help="Mbit/s")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=40.0, help="seconds that each act takes at best")
    parser.add_argument("--acts", nargs="+", default=list(ACTS), choices=ACTS)
    parser.add_argument("--queue", default="400ms", help="longest queue of a full link")
    parser.add_argument("--burst", default="16k", help="bytes of a burst beyond the rate")
    parser.add_argument("--limit", type=float, default=1.3, help="exit with 1 above this ratio")
    parser.add_argument("--json", action="store_true", help="print records instead of a table")
    parser.add_argument("--keep", action="store_true", help="show the logs of the processes")
    parser.add_argument("--as-worker", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_worker:
        work(given, given.as_worker)
        return
    if len(given.rates) > 1:
        each = [[*_without_rates(sys.argv[1:]), "--json", "--rates", str(rate)] for rate in given.rates]
        running = [
            subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
            for words in each
        ]
        found = [json.loads(line) for item in running for line in item.communicate()[0].splitlines()]
        failed = any(process.returncode for process in running)
    else:
        found, failed = measure(given, given.rates[0])
    for item in found:
        print(json.dumps(item) if given.json else _line(item), flush=True)
    if failed or any(item["ratio"] > given.limit for item in found):
        raise SystemExit(1)


def _without_rates(words: list[str]) -> list[str]:
    """Return the command line without ``--rates`` and its numbers."""
    if "--rates" not in words:
        return words
    at = words.index("--rates")
    end = at + 1
    while end < len(words) and not words[end].startswith("--"):
        end += 1
    return words[:at] + words[end:]


def _line(item: dict[str, float | str]) -> str:
    return (
        f"{item['rate']:>5g} Mbit/s  {item['act']:<10} {item['MB']:>7.2f} MB  ideal {item['ideal']:>6.1f} s  "
        f"took {item['took']:>6.1f} s  ratio {item['ratio']:>5.2f}  bytes {item['bytes']:>5.2f}"
    )


def shares(workers: int) -> dict[str, int]:
    """Return how often the payload of each act crosses the server's link, the way that counts."""
    return {"init": 1, "push": workers, "pull": workers, "rows": workers, "broadcast": max(1, workers - 1)}


def sizes(given: argparse.Namespace, rate: float) -> dict[str, int]:
    """Return the payload of one worker in each act, in octets."""
    whole = given.seconds * rate * 1e6 / 8
    values = int(whole / given.workers) // (4 * ROW) * 4 * ROW
    alone = int(whole / max(1, given.workers - 1)) // 4 * 4
    return dict.fromkeys(ACTS, values) | {"broadcast": alone}


def measure(given: argparse.Namespace, rate: float) -> tuple[list[dict[str, float | str]], bool]:
    """Run a cluster behind links of ``rate``; return what each act took, and whether anything failed."""
    from benchmarks.compare.networks import namespaces
    from kvps import config

    namespaces.BURST, namespaces.LATENCY = given.burst, given.queue
    with namespaces.Namespaces(1 + given.workers, f"{int(rate * 1000)}kbit") as hosts:
        scheduler = f"tcp://{hosts.address(0)}:9091"
        place = {"KVPS_SCHEDULER": scheduler, "OMP_NUM_THREADS": "1"}
        env = {**config.environment(place, {}), "PATH": os.environ["PATH"]}
        env |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        log = None if given.keep else subprocess.DEVNULL

        def start(host: int, *words: str, **more: int | None) -> subprocess.Popen[str]:
            argv = hosts.inside(host, [sys.executable, *words])
            return subprocess.Popen(argv, env=env, text=True, **more)

        counts = ("--workers", str(given.workers), "--servers", "1")
        cli = ("-m", "kvps.cli.scheduler", *counts, "--bind", scheduler, "--insecure")
        base = [start(0, *cli, stderr=log, stdout=log)]
        cli = ("-m", "kvps.cli.server", "--scheduler", scheduler, "--insecure")
        cli = (*cli, "--bind", f"tcp://{hosts.address(0)}:0")
        base.append(start(0, *cli, stderr=log, stdout=log))
        words = (__file__, "--as-worker", str(rate), *_without_rates(sys.argv[1:]))
        workers = [start(1 + rank, *words, stdout=subprocess.PIPE) for rank in range(given.workers)]
        said = [worker.communicate()[0] for worker in workers]
        codes = [worker.returncode for worker in workers]
        if any(codes):
            for item in base:
                item.terminate()
        codes += [item.wait() for item in base]
    records = [json.loads(line) for some in said for line in some.splitlines()]
    found = []
    for act in given.acts:
        of_act = [record for record in records if record["act"] == act]
        if not of_act:
            continue
        took = max(item["end"] for item in of_act) - min(item["begin"] for item in of_act)
        size, share = sizes(given, rate)[act], shares(given.workers)[act]
        ideal = share * size * 8 / (rate * 1e6)
        way = "rx" if act in ("pull", "rows") or (act == "broadcast" and given.workers > 1) else "tx"
        crossed = sum(item[way] for item in of_act)
        found.append(
            {
                "rate": rate,
                "act": act,
                "MB": size / 1e6,
                "ideal": ideal,
                "took": took,
                "ratio": took / ideal,
                "bytes": crossed / (share * size),
            }
        )
    if any(codes):
        print(f"{rate:g} Mbit/s: the processes ended with {codes}", file=sys.stderr)
    return found, any(codes)


def work(given: argparse.Namespace, rate: float) -> None:
    """Make the calls, and print when each began and ended."""
    import torch

    import kvps

    kv = kvps.create("dist_sync", timeout=20 * given.seconds)
    size = sizes(given, rate)
    values = torch.randn(size["push"] // 4)
    table = torch.randn(size["rows"] // 4 // ROW, ROW)
    whole = torch.full((size["broadcast"] // 4,), float(kv.rank))
    rows = torch.arange(len(table))
    out = torch.empty_like(values)

    def push() -> None:
        kv.push("values", values)
        kv.barrier()

    def broadcast() -> None:
        kv.broadcast("whole", whole, out=whole)
        assert not whole.any(), "it is rank 0's"

    does: dict[str, Callable[[], object]] = {
        "init": lambda: kv.init("values", values),
        "push": push,
        "pull": lambda: kv.pull("values", out=out),
        "rows": lambda: kv.row_sparse_pull("table", row_ids=rows),
        "broadcast": broadcast,
    }
    if "init" not in given.acts and {"push", "pull"} & set(given.acts):
        does["init"]()
    if "rows" in given.acts:
        kv.init("table", table)
    for act in ACTS:
        if act in given.acts:
            kv.barrier()
            before, begin = _crossed(), time.monotonic()
            does[act]()
            end, after = time.monotonic(), _crossed()
            record = {"act": act, "begin": begin, "end": end}
            record |= {way: after[way] - before[way] for way in before}
            print(json.dumps(record), flush=True)
    kv.barrier()


def _crossed() -> dict[str, int]:
    """Return how many octets came in and went out by this host's link so far."""
    counted = {}
    for way in ("rx", "tx"):
        with open(f"/sys/class/net/eth0/statistics/{way}_bytes") as file:
            counted[way] = int(file.read())
    return counted


if __name__ == "__main__":
    main()
