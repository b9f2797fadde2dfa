"""What one pushpull() costs in Python: its calls, and its processor time with warm and with cold caches.

    python benchmarks/calls.py [--size 16384] [--rounds 300]
    python benchmarks/calls.py --cluster [--size 16384] [--rounds 31] [--rows pull | push] [--functions]

A local store pushes and pulls one array: the rules of a worker and of a server run in this
process, without sockets. Counted are the Python functions that are called meanwhile, kvps's and
others'. The processor time of the calling thread is taken in a loop, and where
:data:`EVICTED_BYTES` are read between two calls, as other processes of a host do between two messages.

With ``--cluster`` this process is the worker of a job whose server and scheduler are processes of their own,
with keys and shared memory, as a user has it. Printed are the calls of one pushpull() by file, in the thread
that calls, in the worker's loop and in the server's loop: those of the round whose sum is the median, so
that beats and other timers do not count. ``--rows`` counts a pull or a push of 1,000 ids of an embedding
table instead, and ``--functions`` prints the calls by function.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import torch

import kvps
from kvps.cli import server as server_command
from kvps.runtime import key_files as keys

EVICTED_BYTES = 64 << 20
WARM_UP = 300
TURNS = 5
ROOT = Path(kvps.__file__).parent
SETTLED_S = 0.02
"""Seconds after a call in which both loops finish what it has left to do."""
PLACES = ("caller", "worker", "server")
ROWS, DIM, TABLE_ROWS = 1000, 16, 100_000
"""Ids of a pull or a push, elements of a row, and ids that there are."""
Calls = dict[str, dict[str, int]]
"""Place -> file, or file and function -> number of calls."""


def main() -> None:
    """Print the number of calls, and both times; or the calls of a cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=16384, help="elements of the array, float32")
    parser.add_argument("--rounds", type=int, help="calls of a turn (300), or of a cluster (31)")
    parser.add_argument("--cluster", action="store_true", help="count in a job of three processes")
    parser.add_argument("--rows", choices=("pull", "push"), help="count a call of rows in a cluster")
    parser.add_argument("--functions", action="store_true", help="print the calls in a cluster by function")
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.functions)
    elif given.cluster:
        show(cluster_calls(given.size, given.rounds or 31, given.rows, given.functions))
    else:
        local(given.size, given.rounds or 300)


def local(size: int, rounds: int) -> None:
    """Print the number of calls in a local store, and both times."""
    torch.set_num_threads(1)
    gradients, weights = [torch.randn(size)], [torch.empty(size)]
    others = torch.randn(EVICTED_BYTES // 4)
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    with kvps.create("local") as kv:
        kv.init(["w"], gradients)

        def taken_us(is_cold: bool) -> float:
            """Return the processor time of a call, in microseconds."""
            total_s = 0.0
            for _ in range(rounds):
                if is_cold:
                    others.sum()
                begun_s = time.thread_time()
                kv.pushpull(["w"], gradients, out=weights)
                total_s += time.thread_time() - begun_s
            return 1e6 * total_s / rounds

        for _ in range(WARM_UP):
            kv.pushpull(["w"], gradients, out=weights)
        sys.setprofile(trace)
        kv.pushpull(["w"], gradients, out=weights)
        sys.setprofile(None)
        turns = [(taken_us(False), taken_us(True)) for _ in range(TURNS)]
    warm, cold = (statistics.median(times) for times in zip(*turns, strict=True))
    print(f"{count} calls; {warm:.0f} us in a loop, {cold:.0f} us with cold caches")


# --- a cluster -------------------------------------------------------------------------------------


class CallCounter:
    """Counts the Python calls of every thread that begins from now on, by file, or by function."""

    def __init__(self, by_function: bool) -> None:
        self._by_function = by_function
        self._found: dict[int, Counter[str]] = {}
        """By thread."""
        threading.setprofile(self.trace)

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        """Count an event of the interpreter, if it is a call."""
        if event == "call":
            thread = threading.get_ident()
            counter = self._found.get(thread)
            if counter is None:
                counter = self._found[thread] = Counter()
            code = frame.f_code
            counter[f"{code.co_filename} {code.co_qualname}" if self._by_function else code.co_filename] += 1

    def of(self, thread: int) -> dict[str, int]:
        """Return the calls of a thread so far."""
        return dict(self._found.get(thread, {}))


def serve(endpoint: str, by_function: bool) -> None:
    """Be the server of the job; write the calls of its loop so far for each line that comes."""
    counter, loop = CallCounter(by_function), threading.get_ident()
    threading.setprofile(None)
    sys.setprofile(counter.trace)

    def report() -> None:
        for _ in sys.stdin:
            print(json.dumps(counter.of(loop)), flush=True)

    threading.Thread(target=report, daemon=True).start()
    sys.exit(server_command.main(["--scheduler", endpoint]))


@contextmanager
def server_of_a_job(by_function: bool) -> Iterator[subprocess.Popen[str]]:
    """Start a scheduler and a server; this process is to be their worker."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        keys.write(Path(folder), keys.generate())
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        free.close()
        os.environ |= {"KVPS_KEYS": folder, "KVPS_SCHEDULER": endpoint}
        members = ["--workers", "1", "--servers", "1"]
        scheduler = [sys.executable, "-m", "kvps.cli.scheduler", *members, "--bind", endpoint]
        server = [sys.executable, __file__, "--serve", endpoint, *["--functions"] * by_function]
        pipe = subprocess.PIPE
        with (
            subprocess.Popen(scheduler),
            subprocess.Popen(server, text=True, stdin=pipe, stdout=pipe) as serving,
        ):
            yield serving


def cluster_calls(size: int, rounds: int, rows: str | None, by_function: bool) -> Calls:
    """Return the calls of one pushpull(), or of a pull or push of rows, in a cluster."""
    counter = CallCounter(by_function)
    gradient, weight = torch.randn(size), torch.empty(size)
    generator = np.random.default_rng(0)
    ids = generator.integers(0, TABLE_ROWS, (WARM_UP + rounds, ROWS))
    row_gradients = torch.randn(ROWS, DIM)
    with server_of_a_job(by_function) as server:
        asking, answers = server.stdin, server.stdout
        assert asking is not None
        assert answers is not None

        def counted() -> Calls:
            time.sleep(SETTLED_S)
            here = {thread.name: thread.ident or 0 for thread in threading.enumerate()}
            print(file=asking, flush=True)
            of_server = json.loads(answers.readline())
            found = (counter.of(here["MainThread"]), counter.of(here["kvps"]), of_server)
            return dict(zip(PLACES, found, strict=True))

        turns: list[Calls] = []
        with kvps.create("dist_sync") as kv:
            kv.init("w", gradient)
            table = kv.embedding("table", DIM)
            table.push(np.arange(TABLE_ROWS), torch.randn(TABLE_ROWS, DIM))

            def call(turn: int) -> None:
                if rows == "pull":
                    table.pull(ids[turn])
                elif rows == "push":
                    table.push(ids[turn], row_gradients)
                else:
                    kv.pushpull("w", gradient, out=weight)

            for turn in range(WARM_UP):
                call(turn)
            for turn in range(rounds):
                before = counted()
                sys.setprofile(counter.trace)
                call(WARM_UP + turn)
                sys.setprofile(None)
                turns.append(_less(counted(), before))
        kvps.shutdown()
    return sorted(turns, key=_sum)[rounds // 2]


def _less(after: Calls, before: Calls) -> Calls:
    return {place: dict(Counter(after[place]) - Counter(before[place])) for place in after}


def _sum(calls: Calls) -> int:
    return sum(sum(files.values()) for files in calls.values())


def show(calls: Calls) -> None:
    """Print calls by file."""
    by_file: dict[str, Counter[str]] = {}
    for place, files in calls.items():
        for path, count in files.items():
            file, _, function = path.partition(" ")
            is_ours = file.startswith(str(ROOT))
            name = str(Path(file).relative_to(ROOT)) if is_ours else "/".join(Path(file).parts[-2:])
            name = f"{name} {function}".rstrip()
            by_file.setdefault(name, Counter())[place] += count
    print("".join(f"{place:>8}" for place in PLACES))
    for name, counts in sorted(by_file.items()):
        print("".join(f"{counts[place] or '':>8}" for place in PLACES), f" {name}")
    sums = [sum(calls[place].values()) for place in PLACES]
    print("".join(f"{count:>8}" for count in sums), f" {sum(sums)} calls in {len(by_file)} files")


if __name__ == "__main__":
    main()
